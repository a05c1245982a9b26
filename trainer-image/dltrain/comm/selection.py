"""From a plan's collective to an object."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dlcontract import COLLECTIVES
from dltrain.comm.algorithms.single_rank import Alone
from dltrain.comm.autotuning import Auto, Pick, Picks
from dltrain.comm.core.collective import Collective
from dltrain.comm.core.fault_tolerance import duplicate
from dltrain.comm.core.shared_region import Region
from dltrain.comm.schedules.butterfly import Butterfly
from dltrain.comm.schedules.engine import Scheduled
from dltrain.comm.schedules.halving_doubling import HalvingDoubling
from dltrain.comm.schedules.ring import Ring
from dltrain.comm.schedules.tree import Tree

NAMES = COLLECTIVES
SCHEDULED: dict[str, type[Scheduled]] = {kind.name: kind for kind in (Ring, Tree, Butterfly, HalvingDoubling)}
"""Those that differ by their schedule alone, and need no more than a communicator."""
AUTO = "Auto"
KIB = 2**10
EAGER_NBYTES = 56 * KIB
"""Below what Open MPI sends over TCP at once (64 KiB); longer segments first ask, behind the data under way."""


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
    """The strategy ``name`` for ``buffers`` over ``comm`` (None: a single rank); ``Auto``: what is fastest here.

    Buffers on a GPU are always summed by NCCL: the MPI of the image does not read GPU memory, and a copy through the
    host would cost more than any choice of algorithm gains. ``servers``: ranks of parameter servers, for
    ``ParameterServer``. ``host``: rank 0's address, for ``Torch``. ``region``: memory of all ranks that ``buffers`` lie
    in, ``picks``: what was measured before, for ``Auto``. ``compression``: instead of all that, BF16 or FP16 on the
    wire but for the last ``tail`` elements. Raises ValueError for another name, PeerLostError.
    """
    if comm is None or comm.Get_size() == 1:
        return Alone(buffers)
    if name not in (*NAMES, AUTO):
        raise ValueError(f"collective: found '{name}', expected one of {', '.join((AUTO, *NAMES))}")
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
    """What ``Auto`` tries on ``size`` ranks, likeliest first: short segments for slow links, longer ones for fast.

    Torch is not among them: it needs ports of its own. Halving and doubling between two ranks is a ring.
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
    """A strategy that needs no more than MPI, and for SharedMemory a region; ``comm`` becomes its own."""
    if pick.strategy == "SharedMemory":
        from dltrain.comm.algorithms.shared_memory import SharedMemory

        assert region is not None, "it is a candidate only with a region"
        return SharedMemory(comm, buffers, region)
    if pick.strategy == "MPI":
        from dltrain.comm.algorithms.mpi_allreduce import MpiAllreduce

        return MpiAllreduce(comm, buffers)
    return SCHEDULED[pick.strategy](comm, buffers, pick.segment_nbytes)
