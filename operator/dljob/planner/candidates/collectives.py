"""The collectives from which plans may choose, and the formulas that predict their times."""

from dljob.perf.step import communication
from dljob.planner.candidates.options import Option
from dljob.planner.types import CollectiveName

AUTO: dict[bool, tuple[CollectiveName, ...]] = {
    False: ("Ring", "HalvingDoubling", "Butterfly", "Tree", "ParameterServer"),
    True: ("Torch",),
}
"""Collectives that the planner chooses from, by ``is_gpu``. On GPUs the trainer always uses NCCL."""

HALVES: tuple[CollectiveName, ...] = ("Ring", "Torch")
"""Collectives made of a reduce-scatter and an all-gather. Between the two, ranks can update their shards."""

NCCL_NAMES: tuple[CollectiveName, ...] = ("Torch", "Ring", "MPI", "DDP")
"""Collectives that a job on GPUs may name. The trainer uses NCCL for all of them.

``Ring`` and ``MPI`` are accepted because specs of earlier releases name them, and because NCCL does what they say: it
reduces along rings where that is fast, or chooses. ``DDP`` uses NCCL for larger buckets. The other names promise
algorithms that NCCL does not have."""


def summing(option: Option) -> tuple[CollectiveName, ...]:
    """Return the collectives (algorithms that reduce gradients) from which the planner may choose for this option.

    A sharded optimizer allows only those in ``HALVES``.
    """
    names = AUTO[option.pool.is_gpu]
    return tuple(n for n in names if n in HALVES) if option.strategy == "Optimizer" else names


def priced(collective: CollectiveName, is_gpu: bool, by_script: bool = False) -> communication.Collective:
    """Return the collective whose time formula predicts ``collective``: on GPUs, all of ``NCCL_NAMES`` are NCCL.

    ``by_script``: True if a script reduces gradients itself (``Request.reduced_by_script``), for example with MPI.
    """
    nccl = is_gpu and (collective == "Torch" or (collective in NCCL_NAMES and not by_script))
    return "NCCL" if nccl else collective
