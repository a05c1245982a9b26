"""Set up the all-reduce of gradients for a plan: its memory, and its algorithm, which may be chosen by measurement.

``data_parallel`` has the weights of the gradients, and ``bucket_reductions`` applies them.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlcontract import Plan, Role
from dltrain.comm.algorithms.single_rank import SingleRank
from dltrain.comm.autotuning import Auto, Pick, size_class
from dltrain.comm.core.collective import Collective
from dltrain.comm.core.fault_tolerance import duplicate
from dltrain.comm.core.shared_region import Memory
from dltrain.comm.process_group import ProcessGroup
from dltrain.comm.selection import AUTO, choose
from dltrain.optim.combined import CombinedOptimizer
from dltrain.parallel.data_parallel import DataParallel
from dltrain.parallel.placement import Strategy
from dltrain.protocol.errors import BadInputError, MisuseError
from dltrain.protocol.rank_messages import Chosen, Summing
from dltrain.protocol.reporter import RankReporter

_BUCKETS, _MIN_NBYTES = 8, 256 * 2**10
"""Maximum number of buckets of a small model, and the minimum size of these buckets in bytes.

A bucket is a part of the gradients that one all-reduce sums. A single bucket would be reduced only after the backward
pass and could not overlap with it.
"""
Choices = list[list[Any]]
"""The all-reduce algorithms of a run, for its checkpoint (JSON): a list of [n, algorithm, segment size in bytes].

An entry applies to buffers from 4**n bytes up to those of the next entry."""


def data_parallel(
    plan: Plan,
    process_group: ProcessGroup,
    parameters: list[torch.nn.Parameter],
    optimizer: Optimizer,
    tail: int,
    before: Strategy | None = None,
) -> Strategy:
    """Create the data-parallel strategy of a plan: the gradient buffer and the collective that reduces it.

    With several optimizers, or parameters of several dtypes, gradients are reduced in the step of each optimizer.
    ``tail``: number of values that ranks share at every step. ``before``: the strategy of the process group before it
    shrank, whose measurements of algorithms are reused. All ranks must call this together. Raise
    PeerLostError if a rank is lost, and BadInputError for gradient compression on a GPU.
    """
    if plan.compression and any(parameter.is_cuda for parameter in parameters):
        raise BadInputError("spec.gradientCompression", "gradients on a GPU", "ranks on CPUs", "remove this field")
    delayed = isinstance(optimizer, CombinedOptimizer) or _needs_several_dtypes(plan, parameters)
    if delayed and plan.compression:
        raise MisuseError(
            f"spec.gradientCompression: found {plan.compression} with several optimizers, or parameters of several "
            "dtypes; expected none, because only the gradients of one optimizer and dtype are compressed. Remove this "
            "field"
        )
    memory = Memory(process_group.comm if plan.measure_collective and process_group.size > 1 else None)
    measured = measured_by(before) if before is not None else None
    picks = measured.picks if measured is not None else None

    def collective(buffers: list[Tensor]) -> Collective:
        return choose(
            AUTO if plan.measure_collective else "Torch" if plan.collective == "DDP" else plan.collective,
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

    if delayed:
        from dltrain.parallel.delayed.reduction import DelayedReduction

        return DelayedReduction(parameters, optimizer, collective, tail, memory.zeros)

    def agreement(buffers: list[Tensor]) -> Collective:
        if process_group.size == 1:
            return SingleRank(buffers)
        from dltrain.comm.algorithms.mpi_allreduce import MpiAllreduce

        return MpiAllreduce(duplicate(process_group.comm), buffers)

    nbytes = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    bucket_nbytes = min(plan.bucket_nbytes, max(_MIN_NBYTES, nbytes // _BUCKETS))
    return DataParallel(parameters, collective, bucket_nbytes, tail, memory.zeros, agreement)


def _needs_several_dtypes(plan: Plan, parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Return True if one buffer cannot reduce all gradients, or not in their dtype: numpy and MPI have no bfloat16."""
    kinds = {(parameter.dtype, parameter.device.type) for parameter in parameters if parameter.requires_grad}
    return len({dtype for dtype, _ in kinds}) > 1 or ((torch.bfloat16, "cpu") in kinds and plan.collective != "Torch")


def measured_by(parallel: Strategy) -> Auto | None:
    """Return the collective of ``parallel`` if it chooses its all-reduce algorithm by measurement, otherwise None."""
    collective = getattr(parallel, "collective", None)
    return collective if isinstance(collective, Auto) else None


def choices(parallel: Strategy) -> Choices:
    """Return the algorithms that were chosen by measurement, for a checkpoint; an empty list without measurement.

    With the same algorithms, a restarted run adds gradients in the same order.
    """
    if (auto := measured_by(parallel)) is None:
        return []
    return [[number, pick.strategy, pick.segment_nbytes] for number, pick in sorted(auto.picks.items())]


def choices_from_record(sums: Sequence[Summing]) -> Choices:
    """Convert ``sums``, the all-reduce algorithms in a run report, to the list that ``reuse`` accepts."""
    return [[size_class(each.nbytes), each.strategy, each.segment_nbytes] for each in sums]


def reuse(parallel: Strategy, picks: Choices) -> None:
    """Use the algorithms ``picks`` of an earlier run, if ``parallel`` would otherwise choose them by measurement.

    All ranks must call this function together. Raise PeerLostError if a rank is lost.
    """
    if (auto := measured_by(parallel)) is not None:
        auto.reuse({number: Pick(name, segment) for number, name, segment in picks})


def report(parallel: Strategy, reporter: RankReporter) -> None:
    """Report the all-reduce algorithms that were chosen by measurement to the agent and, on rank 0, to the log."""
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
