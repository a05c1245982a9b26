"""Predicted memory of model-parallel candidates, or the memory that runs with the same split were measured to need."""

from dataclasses import dataclass
from math import ceil

from dljob.calibrate.memory import Split, complete_run_nbytes
from dljob.perf.resources import memory
from dljob.perf.step import model_split as split
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.evaluate import Part
from dljob.planner.candidates.strategies.split_candidate import SplitCandidate
from dljob.planner.types import Request


@dataclass(frozen=True)
class SplitMemory:
    """Memory that a plan needs. ``rank_nbytes``: of the largest rank on its device. ``pod_nbytes``: main memory."""

    rank_nbytes: int
    pod_nbytes: int
    measured: bool = False
    """True if both follow from a complete run with the same split."""


def split_memory(candidate: SplitCandidate, batch: int, request: Request, model: split.Model) -> SplitMemory:
    """Return the memory that a candidate needs. ``batch``: samples per step of one replica.

    On CPUs, a complete run of the same script with the same split bounds the prediction, with a margin for the
    difference between runs. The split is the number of parts, replicas and micro-batches, and the batch. Without the
    layers of a script, a prediction assumes more than most scripts need.
    """
    option = candidate.part.option
    held = _rank_nbytes(candidate, batch, model, request.checkpoints)
    predicted = SplitMemory(held, _pod_nbytes(candidate.part, batch, model.workload, held))
    if option.pool.is_gpu or option.learned is None or request.memory_admitted:
        return predicted
    how = Split(candidate.split_over, candidate.replicas, candidate.micro_batches, request.checkpoints)
    place = option.ranks_per_node, ceil(batch / candidate.micro_batches), candidate.strategy, how
    pod_nbytes = complete_run_nbytes(option.learned.memory, *place)
    if pod_nbytes is None or pod_nbytes >= predicted.pod_nbytes:
        return predicted  # A larger need is requested without a change of the prediction (``measured_memory``).
    return SplitMemory(min(held, pod_nbytes // option.ranks_per_node), pod_nbytes, measured=True)


def _rank_nbytes(candidate: SplitCandidate, batch: int, model: split.Model, checkpoints: bool) -> int:
    """Return the memory in bytes that a rank needs on its device. ``batch``: samples per step of one replica."""
    option = candidate.part.option
    return split.rank_nbytes(
        model.workload,
        candidate.strategy,
        candidate.split_over,
        candidate.micro_batches,
        candidate.replicas,
        batch,
        option.pool.is_gpu,
        option.device.growth_factors,
        checkpoints,
        candidate.collective,
    )


def _pod_nbytes(part: Part, batch: int, workload: Workload, held: int) -> int:
    """Return the main memory in bytes that a pod with all its ranks needs.

    ``held``: memory in bytes that a rank needs on its device. It counts only on CPUs, where it is main memory.
    ``batch``: global batch size in samples; it counts only on GPUs, whose ranks prepare samples in main memory.
    """
    beside_ranks = memory.AGENT_NBYTES + workload.beside_ranks_nbytes
    if not part.option.pool.is_gpu:
        ranks = part.option.ranks_per_node
        return beside_ranks + memory.shm_nbytes(ranks, is_gpu=False) + ranks * held
    share = memory.pod_nbytes(workload, batch, 1, is_gpu=True) - beside_ranks
    return beside_ranks + part.option.ranks_per_node * share


def host_room_nbytes(part: Part, request: Request) -> int:
    """Return the main memory in bytes that each pod of ``part`` can use.

    If the job has a memory request, that is the result. Otherwise the pods are assumed to run on the ``part.nodes``
    nodes with the most free memory, and the result is the smallest free memory of these nodes.
    """
    if request.memory_per_pod_nbytes is not None:
        return request.memory_per_pod_nbytes
    return part.option.pool.falling_memory_nbytes[part.nodes - 1]
