"""Predicted time of the evaluations of built-in models, at the end of each epoch and of the training."""

from collections.abc import Iterable
from math import ceil

from dljob.perf.fit.curve import Curve
from dljob.perf.step.step import BACKWARD_PART
from dljob.perf.workload.datasets import DATASETS
from dljob.perf.workload.workload import Workload
from dljob.planner.types import Request

MAX_BATCH = 256
"""Maximum number of samples in a batch of an evaluation, as in the trainer (``dltrain.builtin.evaluation``)."""


def evaluations(request: Request) -> tuple[int, int]:
    """Return (number of evaluations of a training, held-out samples of each).

    Return (0, 0) for other models and data than built-in ones, because nobody knows whether and on what scripts
    evaluate.
    """
    data = DATASETS.get(request.dataset or "") if request.model is not None else None
    if data is None or not data.test_samples or request.global_batch < 1:
        return 0, 0
    return ceil(request.total_steps / ceil(data.train_samples / request.global_batch)), data.test_samples


def evaluations_s(request: Request, workload: Workload, groups: Iterable[tuple[Curve, float, int, int]]) -> float:
    """Return the seconds of all evaluations of a data-parallel training: forward passes of the held-out samples.

    ``groups``: for each group, (computing seconds of a step over the samples of a rank, CPUs of a rank, largest share
    of a rank, number of micro-batches of a step). The ranks divide the samples in proportion to their shares, and all
    wait for the slowest. An evaluation has batches as large as a micro-batch, so a rank passes its share forward in as
    many batches as it trains with.
    """
    count, samples = evaluations(request)

    def once_s(computing: Curve, cores: float, share: int, micro_batches: int) -> float:
        mine, most = ceil(samples * share / request.global_batch), min(MAX_BATCH * micro_batches, share)
        whole, rest = divmod(mine, most)
        passes_s = whole * computing.seconds(most) + (computing.seconds(rest) if rest else 0.0)
        return (1 - BACKWARD_PART) * passes_s + mine * workload.making_s / min(1.0, cores)

    return count * max((once_s(*group) for group in groups if group[2]), default=0.0) if count else 0.0


def split_evaluations_s(request: Request, workload: Workload, step_s: float, batch: int, cores: float) -> float:
    """Return the seconds of all evaluations of a training whose ranks split the model.

    ``step_s``: seconds of a step's computing and messages, if its micro-batches went one after another through all
    ranks, as those of an evaluation do. ``batch``: samples whose input each rank prepares for a step. ``cores``: CPUs
    of a rank.
    """
    count, samples = evaluations(request)
    pass_s = (1 - BACKWARD_PART) * step_s + batch * workload.making_s / min(1.0, cores)
    return count * pass_s * samples / request.global_batch
