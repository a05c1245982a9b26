"""The interface of collectives, which reduce gradients over ranks.

Each algorithm has its own module, and ``comm.selection.choose`` maps the names in plans to algorithms. A buffer is a
contiguous 1-D CPU or GPU tensor that lives as long as the collective and keeps its address. Algorithms may therefore
preallocate and register memory, and use persistent requests.
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
    """Return the buffer as a numpy array that shares its memory. Raises BadInputError if numpy lacks its dtype."""
    try:
        return buffer.numpy()
    except TypeError:
        found = f"parameters of {buffer.dtype} on a CPU"
        remedy = "keep the parameters in float32 and compute under torch.autocast, or set spec.collective: Torch"
        raise BadInputError("model", found, "float32, float64 or float16", remedy) from None


class Work(Protocol):
    """A pending operation on one buffer, such as an all-reduce."""

    def test(self) -> bool:
        """Make progress without blocking. Return True if the operation is complete, so the buffer has the result."""
        ...

    def wait(self) -> None:
        """Block until the operation is complete, so that the buffer contains the result.

        Raise PeerLostError if a rank is lost.
        """
        ...


class AllOf:
    """Work that consists of several works and is done when all of them are done.

    A test makes progress on all of them.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def test(self) -> bool:
        return all([work.test() for work in self._works])  # noqa: C419 - every part must make progress

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Collective(ABC):
    """Reduce buffers over ranks, in place.

    Every rank must construct the collective with equal buffers (same number, sizes and dtypes, in the same order) and
    start reductions in the same order. A rank with a local batch size of 0 also takes part, with zeros.
    """

    name: ClassVar[str]

    def __init__(self, comm: Any, buffers: list[torch.Tensor]) -> None:
        """Take over ``comm``, an mpi4py intracommunicator that nothing else uses, such as a new duplicate."""
        for buffer in buffers:
            assert buffer.dim() == 1 and buffer.is_contiguous(), "a buffer is a contiguous 1-D tensor"
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.buffers = buffers

    @abstractmethod
    def start(self, index: int) -> Work:
        """Start the all-reduce of ``buffers[index]``. Return a ``Work`` with which the caller waits for the result.

        Do not use the buffer until the all-reduce is done. All ranks must start the same all-reduces in the same order.
        """

    def allreduce(self, index: int) -> None:
        """Sum ``buffers[index]`` over all ranks, in place. Raise PeerLostError if a rank is lost."""
        self.start(index).wait()

    def rescale_residuals(self, factor: float) -> None:  # noqa: B027 - most collectives carry nothing over
        """Multiply the residuals of gradient compression by ``factor``; 0 clears them.

        Residuals are rounding errors that are added to the numbers of the next reduction. Most collectives have none
        and do nothing.
        """

    def abandon(self) -> None:
        """Make all operations of this collective fail on all ranks from now on, without blocking.

        The other ranks then do not wait for this rank.
        """
        if self.size > 1:
            revoke(self.comm)

    @abstractmethod
    def close(self) -> None:
        """Free requests and communicators without blocking, also after PeerLostError."""
