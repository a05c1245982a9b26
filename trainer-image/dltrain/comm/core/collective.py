"""The Collective interface: what the training loop needs of a way to sum gradients over ranks.

One strategy a module; ``choose`` maps the plan's names to them. A buffer is a contiguous 1-D CPU or GPU
tensor that lives as long as the collective and keeps its address, so that a strategy may preallocate,
register memory and keep persistent requests for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from numpy.typing import NDArray

from dltrain.comm.core.fault_tolerance import revoke
from dltrain.protocol.errors import BadInputError, PeerLostError

__all__ = ["AllOf", "Collective", "PeerLostError", "Work", "host_array"]


def host_array(buffer: torch.Tensor) -> NDArray[Any]:
    """The buffer as numpy sees it, sharing memory. Raises BadInputError for a dtype that numpy has not."""
    try:
        return buffer.numpy()
    except TypeError:
        found = f"parameters of {buffer.dtype} on a CPU"
        remedy = "keep them in float32 and compute under torch.autocast, or choose spec.collective Torch"
        raise BadInputError("model", found, "float32, float64 or float16", remedy) from None


class Work(Protocol):
    """An all-reduce under way on one buffer."""

    def test(self) -> bool:
        """Make progress without blocking; True once the sum is in the buffer."""
        ...

    def wait(self) -> None:
        """Block until the sum is in the buffer. Raises PeerLostError."""
        ...


class AllOf:
    """Work that is done when all of its parts are; each of them makes progress whenever one is tested."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def test(self) -> bool:
        return all([work.test() for work in self._works])  # noqa: C419 - each has to make progress

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Collective(ABC):
    """Sums buffers over ranks, in place.

    Every rank constructs it with the same buffers (same count, sizes and dtypes, in the same order) and
    starts them in the same order. A rank that contributes nothing (share 0) takes part with zeros.
    """

    name: ClassVar[str]

    def __init__(self, comm: Any, buffers: list[torch.Tensor]) -> None:
        """``comm``: an mpi4py intracommunicator that is this collective's own (duplicate before passing)."""
        for buffer in buffers:
            assert buffer.dim() == 1 and buffer.is_contiguous(), "a buffer is a contiguous 1-D tensor"
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.buffers = buffers

    @abstractmethod
    def start(self, index: int) -> Work:
        """Begin summing ``buffers[index]`` over all ranks; the buffer must not be touched until it is done."""

    def allreduce(self, index: int) -> None:
        """Sum ``buffers[index]`` over all ranks, in place. Raises PeerLostError."""
        self.start(index).wait()

    def carry(self, factor: float) -> None:  # noqa: B027 - most carry nothing
        """Multiply what is carried over from the last sums into the next ones, if anything is; 0 forgets it."""

    def abandon(self) -> None:
        """Wake the ranks that wait for this one in it, without waiting for them."""
        if self.size > 1:
            revoke(self.comm)

    @abstractmethod
    def close(self) -> None:
        """Free requests and communicators; also after PeerLostError, without blocking."""
