"""Selection of the collective that a plan names."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dlcontract import COLLECTIVES
from dltrain.comm.algorithms.single_rank import SingleRank
from dltrain.comm.autotuning import Auto, Pick, Picks
from dltrain.comm.core.collective import Collective
from dltrain.comm.core.fault_tolerance import duplicate
from dltrain.comm.core.shared_region import Region
from dltrain.comm.schedules.butterfly import Butterfly
from dltrain.comm.schedules.engine import Scheduled
from dltrain.comm.schedules.halving_doubling import HalvingDoubling
from dltrain.comm.schedules.ring import Ring
from dltrain.comm.schedules.tree import Tree

SCHEDULED: dict[str, type[Scheduled]] = {kind.name: kind for kind in (Ring, Tree, Butterfly, HalvingDoubling)}
"""The collectives that are defined by a schedule (a list of one rank's messages), by name."""
AUTO = "Auto"
KIB = 2**10
EAGER_NBYTES = 56 * KIB
"""A segment size in bytes below the eager limit of Open MPI over TCP (64 KiB).

Longer segments need a handshake, which is delayed by the data that is already queued for sending.
"""


def choose(
    name: str,
    comm: Any,
    buffers: list[torch.Tensor],
    *,
    segment_nbytes: int = 128 * KIB,
    servers: Sequence[int] = (),
    host: str = "127.0.0.1",
    region: Region | None = None,
    picks: Picks | None = None,
    compression: str | None = None,
    tail: int = 0,
) -> Collective:
    """Return the collective ``name`` for ``buffers`` over ``comm`` (None: a single rank). ``Auto`` measures candidates.

    Buffers on a GPU always use torch.distributed (NCCL): the image's MPI cannot read GPU memory, and a copy through the
    host would cost more than the choice of an algorithm gains.

    ``segment_nbytes``: maximum size of a message. ``servers``: ranks of parameter servers, for ``ParameterServer``.
    ``host``: the address of rank 0, for ``Torch``. ``region``: memory that contains ``buffers`` and that all ranks
    share, for ``Auto``. ``picks``: results of earlier measurements, for ``Auto``. ``compression``: "BF16" or "FP16"
    replaces the named collective by one that sends 16-bit numbers, except for the last ``tail`` elements of the last
    buffer. Raise ValueError for an unknown name, and PeerLostError if a rank is lost during the call.
    """
    if comm is None or comm.Get_size() == 1:
        return SingleRank(buffers)
    if name not in (*COLLECTIVES, AUTO):
        raise ValueError(f"collective: found '{name}'; expected one of {', '.join((AUTO, *COLLECTIVES))}")
    own = duplicate(comm)
    if compression is not None:
        from dltrain.comm.algorithms.compressed import Compressed

        return Compressed(own, buffers, compression, tail)
    if name == "Torch" or any(buffer.is_cuda for buffer in buffers):
        from dltrain.comm.algorithms.torch_distributed import TorchDistributed

        return TorchDistributed(own, buffers, host)
    if name == "ParameterServer":
        from dltrain.comm.schedules.parameter_server import ParameterServer

        return ParameterServer(own, buffers, segment_nbytes, tuple(servers))
    if name == AUTO:
        return Auto(own, buffers, partial(_made, region), candidates(segment_nbytes, region, comm.Get_size()), picks)
    return _made(region, own, buffers, Pick(name, segment_nbytes))


def candidates(segment_nbytes: int, region: Region | None, size: int) -> list[Pick]:
    """Return the all-reduce algorithms that the collective ``Auto`` measures on ``size`` ranks, most likely first.

    ``segment_nbytes``: the plan's segment size. ``region``: memory that all ranks share, or None. Short segments suit
    slow links, and longer ones suit fast links. Torch is excluded, because it needs separate ports.
    With two ranks, halving-doubling is excluded, because it is equivalent to a ring.
    """
    return [
        *([Pick("SharedMemory")] if region is not None else []),
        Pick("Ring", 16 * KIB),
        Pick("Ring", EAGER_NBYTES),
        Pick("Butterfly", EAGER_NBYTES),
        *([Pick("HalvingDoubling", 16 * KIB), Pick("HalvingDoubling", EAGER_NBYTES)] if size > 2 else []),
        *([Pick("Ring", segment_nbytes)] if segment_nbytes not in (16 * KIB, EAGER_NBYTES) else []),
        Pick("Ring", 8192 * KIB),
        Pick("Ring", 1024 * KIB),
        Pick("MPI"),
        Pick("Butterfly", 16 * KIB),
    ]


def _made(region: Region | None, comm: Any, buffers: list[torch.Tensor], pick: Pick) -> Collective:
    """Return the collective that ``pick`` names. Nothing else may use the communicator ``comm`` from then on.

    ``region``: memory that all ranks share, which only ``SharedMemory`` needs.
    """
    if pick.strategy == "SharedMemory":
        from dltrain.comm.algorithms.shared_memory import SharedMemory

        assert region is not None, "it is a candidate only with a region"
        return SharedMemory(comm, buffers, region)
    if pick.strategy == "MPI":
        from dltrain.comm.algorithms.mpi_allreduce import MpiAllreduce

        return MpiAllreduce(comm, buffers)
    return SCHEDULED[pick.strategy](comm, buffers, pick.segment_nbytes)
