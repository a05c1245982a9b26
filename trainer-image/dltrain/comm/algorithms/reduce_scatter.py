"""Reduce-scatter and all-gather, the two halves of an all-reduce, for the sharded optimizer.

Every rank owns one part of every buffer. Together, both operations have the traffic of one all-reduce.
"""

from typing import Any

import torch

from dltrain.comm.algorithms.torch_distributed import TorchDistributed
from dltrain.comm.core.collective import AllOf, Collective, Work
from dltrain.comm.schedules.engine import Scheduled
from dltrain.comm.schedules.ring import Ring, ring
from dltrain.comm.schedules.schedule import Schedule, chunks

NAMES = ("Ring", "Torch")


def owned(rank: int, size: int, count: int) -> tuple[int, int]:
    """Return (start, stop) of the part that ``rank`` owns in a buffer of ``count`` elements. ``size``: number of ranks.

    In a reduce-scatter, a rank receives the totals of the part that it owns. With fewer elements than ranks, some parts
    are empty.
    """
    return chunks(count, size)[(rank + 1) % size]


class ReduceScatter(Scheduled):
    """Reduce each part of a buffer to the rank that owns it. A rank's other parts are undefined afterwards."""

    name = "ReduceScatter"

    def schedule(self, count: int, longest: int) -> Schedule:
        return ring(self.rank, self.size, count, longest, range(self.size - 1))


class AllGather(Scheduled):
    """Copy every part of a buffer from the rank that owns the part to all ranks."""

    name = "AllGather"

    def schedule(self, count: int, longest: int) -> Schedule:
        return ring(self.rank, self.size, count, longest, range(self.size - 1, 2 * (self.size - 1)))


class TorchReduceScatter(TorchDistributed):
    """Reduce each part of a buffer to the rank that owns the part, with one ``reduce`` of torch for each part.

    torch's own reduce-scatter would need parts of equal size.
    """

    name = "TorchReduceScatter"

    def start(self, index: int) -> Work:
        return AllOf([self.begun(self._distributed.reduce, part, owner) for owner, part in _parts(self, index)])


class TorchAllGather(TorchDistributed):
    name = "TorchAllGather"

    def start(self, index: int) -> Work:
        return AllOf([self.begun(self._distributed.broadcast, part, owner) for owner, part in _parts(self, index)])


def _parts(collective: Collective, index: int) -> list[tuple[int, torch.Tensor]]:
    buffer = collective.buffers[index]
    ranges = ((rank, *owned(rank, collective.size, buffer.numel())) for rank in range(collective.size))
    return [(rank, buffer[start:stop]) for rank, start, stop in ranges if stop > start]


class Scattered(Collective):
    """Reduce each part of a buffer to the rank that owns it, and the tail of the last buffer to all ranks.

    The tail consists of elements at the end that all ranks need, such as losses and times.
    """

    name = "Scattered"

    def __init__(self, comm: Any, buffers: list[torch.Tensor], tail: int, name: str, segment_nbytes: int, host: str):
        """Create the collective. ``tail``: number of elements at the end of the last buffer that all ranks receive.

        ``name``: the algorithm, one of ``NAMES``. ``segment_nbytes``: maximum size of a message of ``Ring``. ``host``:
        the address of rank 0, which only ``Torch`` uses.
        """
        super().__init__(comm, buffers)
        *first, last = buffers
        cut = last.numel() - tail
        parts = [*first, last[:cut]] if cut else first
        self._separate = not cut
        """True if the last buffer consists of the tail alone."""
        if name == "Torch":
            self._tail: Collective = TorchDistributed(comm, [last[cut:]], host)
            self._sums: Collective = TorchReduceScatter(comm, parts, host)
        else:
            self._tail = Ring(comm.Dup(), [last[cut:]], segment_nbytes)
            self._sums = ReduceScatter(comm, parts, segment_nbytes)

    def start(self, index: int) -> Work:
        if index < len(self.buffers) - 1:
            return self._sums.start(index)
        return self._tail.start(0) if self._separate else AllOf([self._sums.start(index), self._tail.start(0)])

    def abandon(self) -> None:
        self._sums.abandon()
        self._tail.abandon()

    def close(self) -> None:
        self._sums.close()
        self._tail.close()


def make_all_gather(comm: Any, buffers: list[torch.Tensor], name: str, segment_nbytes: int, host: str) -> Collective:
    """Return the all-gather for ``buffers``. ``comm``: a communicator that nothing else uses from now on.

    ``name``: the algorithm, one of ``NAMES``. ``segment_nbytes``: maximum size of a message of ``Ring``. ``host``: the
    address of rank 0, which only ``Torch`` uses.
    """
    if name == "Torch":
        return TorchAllGather(comm, buffers, host)
    return AllGather(comm, buffers, segment_nbytes)
