"""From a plan's collective to an object. Users: ``loop``, the benchmarks."""

from collections.abc import Sequence
from typing import Any

import torch

from dltrain.comm.alone import Alone
from dltrain.comm.base import Collective
from dltrain.comm.faults import duplicate

NAMES = ("Ring", "MPI", "Tree", "Butterfly", "ParameterServer", "Torch")


def choose(
    name: str,
    comm: Any,
    buffers: list[torch.Tensor],
    *,
    segment_nbytes: int = 128 * 2**10,
    servers: Sequence[int] = (),
    host: str = "127.0.0.1",
) -> Collective:
    """The strategy ``name`` for ``buffers`` over ``comm`` (None: a single rank).

    Buffers on a GPU are always summed by NCCL: the MPI of the image does not read GPU memory, and a copy through the
    host would cost more than any choice of algorithm gains. ``servers``: ranks of parameter servers, for
    ``ParameterServer``. ``host``: rank 0's address, for ``Torch``. Raises ValueError for another name, PeerLostError.
    """
    if comm is None or comm.Get_size() == 1:
        return Alone(buffers)
    if name not in NAMES:
        raise ValueError(f"collective: found '{name}', expected one of {', '.join(NAMES)}")
    own = duplicate(comm)
    if name == "Torch" or any(buffer.is_cuda for buffer in buffers):
        from dltrain.comm.torch_dist import TorchDistributed

        return TorchDistributed(own, buffers, host)
    if name == "MPI":
        from dltrain.comm.mpi import MpiAllreduce

        return MpiAllreduce(own, buffers)
    if name == "ParameterServer":
        from dltrain.comm.parameter_server import ParameterServer

        return ParameterServer(own, buffers, segment_nbytes, tuple(servers))
    if name == "Ring":
        from dltrain.comm.ring import Ring

        return Ring(own, buffers, segment_nbytes)
    if name == "Tree":
        from dltrain.comm.tree import Tree

        return Tree(own, buffers, segment_nbytes)
    from dltrain.comm.butterfly import Butterfly

    return Butterfly(own, buffers, segment_nbytes)
