"""Set up the gradient all-reduce of a plan: memory, algorithm, and the choice of algorithms by measurement."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlcontract import Plan, Role
from dltrain.comm.autotuning import Auto, Pick, size_class
from dltrain.comm.core.collective import Collective
from dltrain.comm.core.shared_region import Memory
from dltrain.comm.process_group import ProcessGroup
from dltrain.comm.selection import AUTO, choose
from dltrain.parallel.data_parallel import DataParallel
from dltrain.protocol.errors import BadInputError
from dltrain.protocol.rank_messages import Chosen, Summing
from dltrain.protocol.reporter import RankReporter

_BUCKETS, _MIN_NBYTES = 8, 256 * 2**10
"""A small model has at most this many buckets, each of at least this size. A single bucket would be reduced only after
the backward pass."""
Choices = list[list[Any]]
"""Each choice as [size class, algorithm, segment size in bytes], as stored in a checkpoint (JSON)."""


def data_parallel(
    plan: Plan,
    process_group: ProcessGroup,
    parameters: list[torch.nn.Parameter],
    tail: int,
    before: DataParallel | None = None,
) -> DataParallel:
    """Return a plan's data-parallel strategy. ``before``: the previous strategy, whose measurements are reused.

    All ranks must call it together. Raise PeerLostError, and BadInputError for gradient compression on a GPU.
    """
    if plan.compression and any(parameter.is_cuda for parameter in parameters):
        raise BadInputError("spec.gradientCompression", "gradients on a GPU", "ranks on CPUs", "remove it")
    memory = Memory(process_group.comm if plan.measure_collective and process_group.size > 1 else None)
    measured = measured_by(before) if before is not None else None
    picks = measured.picks if measured is not None else None

    def collective(buffers: list[Tensor]) -> Collective:
        return choose(
            AUTO if plan.measure_collective else plan.collective,
            process_group.comm,
            buffers,
            segment_nbytes=plan.segment_nbytes,
            servers=[rank.rank for rank in plan.ranks if rank.role is Role.SERVER],
            host=plan.ranks[0].host,
            region=memory.region,
            picks=picks,
            compression=plan.compression,
            tail=tail,
        )

    nbytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    bucket_nbytes = min(plan.bucket_nbytes, max(_MIN_NBYTES, nbytes // _BUCKETS))
    return DataParallel(parameters, collective, bucket_nbytes, tail, memory.zeros)


def measured_by(parallel: DataParallel) -> Auto | None:
    """Return the collective if it measures algorithms, otherwise None. Model parallelism has no such collective."""
    collective = getattr(parallel, "collective", None)
    return collective if isinstance(collective, Auto) else None


def choices(parallel: DataParallel) -> Choices:
    """Return the measured choices, for a checkpoint. After a restart, other algorithms would add in another order."""
    if (auto := measured_by(parallel)) is None:
        return []
    return [[number, pick.strategy, pick.segment_nbytes] for number, pick in sorted(auto.picks.items())]


def choices_from_record(sums: Sequence[Summing]) -> Choices:
    """Convert the choices that ``report`` sent to the form that ``reuse`` takes."""
    return [[size_class(each.nbytes), each.strategy, each.segment_nbytes] for each in sums]


def reuse(parallel: DataParallel, picks: Choices) -> None:
    """Reduce gradients with the algorithms of an earlier run, where possible. All ranks must call it together.

    Raise PeerLostError.
    """
    if (auto := measured_by(parallel)) is not None:
        auto.reuse({number: Pick(name, segment) for number, name, segment in picks})


def report(parallel: DataParallel, reporter: RankReporter) -> None:
    """Report the all-reduce algorithms to the agent and the log."""
    if (auto := measured_by(parallel)) is None:
        return
    picks = sorted(auto.picks.items())
    sums = [
        Summing(nbytes=4**number, strategy=p.strategy, segment_nbytes=p.segment_nbytes, bandwidth_Bps=p.bandwidth_Bps)
        for number, p in picks
    ]
    reporter.send(Chosen(rank=reporter.rank, sums=tuple(sums)))
    if reporter.rank == 0:
        for number, pick in picks:
            text = f"all-reduce of buckets from {4**number} B: {pick}, {pick.bandwidth_Bps / 1e6:.0f} MB/s"
            print(f"dltrain: {text}", file=sys.stderr, flush=True)  # noqa: T201
