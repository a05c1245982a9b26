"""The collectives from which plans may choose, those that a script starts itself, and the formulas of their times."""

from collections.abc import Sequence

from dlcontract import DDP_BUCKET_NBYTES
from dljob.perf.step import communication
from dljob.perf.step.backends import backend
from dljob.perf.step.communication import Link
from dljob.perf.step.exchanges import HOP_S, exchanges_s, over_gloo
from dljob.perf.step.step import buckets
from dljob.perf.workload.observed import Collectives
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.options import Option, overlap_of, peer_Bps
from dljob.planner.types import CollectiveName, Request

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


def started_by_script(request: Request, workload: Workload, *, is_gpu: bool) -> tuple[Collectives, ...] | None:
    """Return the collectives that the job's script starts in a step on CPUs, as an earlier run has shown.

    Return None if they are unknown: the gradients are then assumed to be reduced once. They are unknown after a run on
    GPUs (``Structure.cores`` is None), where other threads run the backward pass. A script whose only run had one
    rank need not have started any. On several ranks, it is assumed to reduce its gradients as DistributedDataParallel.
    One that had several and started none of torch.distributed may have used other libraries, such as Horovod.
    """
    seen = request.structure
    if is_gpu or seen is None or seen.cores is None or seen.collectives is None or request.backend is not None:
        return None
    if seen.collectives or seen.ranks > 1 or request.collective != "Torch":
        return seen.collectives or None
    nbytes = workload.gradient_nbytes
    return (Collectives("all_reduce", buckets(nbytes, DDP_BUCKET_NBYTES), nbytes),)


def hop_s(option: Option) -> float:
    """Return the seconds of a gloo message between two ranks of a node of this option, without its bytes."""
    return HOP_S * option.device.factors.host / min(1.0, option.cores)


def copied_Bps(option: Option) -> float:  # noqa: N802 - the unit is part of the name
    """Return the bytes per second at which gloo sends between two ranks of a node, which the cores limit."""
    return backend("Gloo").within.bandwidth * peer_Bps(option)


def exchanged_s(
    request: Request, workload: Workload, chosen: Sequence[Option], nodes: int, ranks: int, link: Link, compute_s: float
) -> float | None:
    """Return the seconds by which the collectives that the script starts make a step longer; None if it is unknown.

    ``chosen``: the options of a candidate plan, with ``ranks`` ranks on ``nodes`` nodes. ``link``: the slowest link
    between its ranks. ``compute_s``: computing seconds of the slowest rank in its last micro-batch.
    """
    found = started_by_script(request, workload, is_gpu=chosen[0].pool.is_gpu)
    if found is None:
        return None
    over = over_gloo(link, nodes, max(map(hop_s, chosen)))
    cores, copying_Bps = min(o.cores for o in chosen), min(map(copied_Bps, chosen))
    return float(exchanges_s(found, compute_s, ranks, over, nodes, overlap_of(list(chosen)), cores, copying_Bps))
