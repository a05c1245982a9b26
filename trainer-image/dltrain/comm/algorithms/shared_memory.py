"""All-reduce in memory that the ranks of one machine share. Messages only signal that data is ready or complete.

Rank r sums part r of all ranks' buffers, in rank order, and writes the total to all of these buffers. An element is
read and written once per rank, while messages would copy it twice at each hop.
"""

from typing import Any

import numpy as np
import torch

from dltrain.comm.core.fault_tolerance import translate
from dltrain.comm.core.polling import Polled, Run
from dltrain.comm.core.shared_region import Region
from dltrain.comm.core.waiting import complete
from dltrain.comm.schedules.schedule import chunks, pieces

_SEGMENT_NBYTES = 128 * 2**10
"""Size of the segments in which a rank sums its part. A segment stays in the cache until its sum is in all buffers."""


class SharedMemory(Polled):
    name = "SharedMemory"

    def __init__(self, comm: Any, buffers: list[torch.Tensor], region: Region) -> None:
        """Create the all-reduce of ``buffers``, which must be in ``region``, the memory that all ranks share."""
        super().__init__(comm, buffers)
        self.use_runs([_Run(comm, tag, buffer, region) for tag, buffer in enumerate(buffers)])


class _Run(Run):
    """The reduction of one buffer.

    In phase 0, this rank waits until the other ranks' buffers are ready. In phase 1, it waits until the other ranks
    have summed their parts. Phase 2 means that the reduction is done.
    """

    def __init__(self, comm: Any, tag: int, buffer: torch.Tensor, region: Region) -> None:
        from mpi4py import MPI  # a local import, because importing it may start MPI

        everywhere = region.everywhere(buffer)
        assert everywhere is not None, "the buffer lies in the region"
        rank, size = comm.Get_rank(), comm.Get_size()
        start, stop = chunks(buffer.numel(), size)[rank]
        longest = max(1, _SEGMENT_NBYTES // buffer.itemsize)
        self._segments = [[part[a:b] for part in everywhere] for a, b in pieces(start, stop, longest)]
        self._mpi_error = MPI.Exception
        nothing = np.empty(0, np.uint8)
        others = [(rank + i) % size for i in range(1, size)]
        # Both phases use these messages to and from each other rank. Messages of one tag arrive in order.
        self._sent = [comm.Send_init(nothing, dest=peer, tag=tag) for peer in others]
        self._received = [comm.Recv_init(nothing, source=peer, tag=tag) for peer in others]
        self._requests = [*self._received, *self._sent]
        self._startall = MPI.Prequest.Startall
        self._phase = 2

    def start(self) -> None:
        assert self.finished, "the previous reduction is done"
        try:
            self._startall(self._requests)
        except self._mpi_error as error:
            raise translate(error) from error
        self._phase = 0
        self.test()

    @property
    def finished(self) -> bool:
        return self._phase == 2

    def test(self) -> bool:
        try:
            if self._phase == 0 and complete(self._requests):
                self._add()
                self._startall(self._requests)
                self._phase = 1
            if self._phase == 1 and complete(self._requests):
                self._phase = 2
        except self._mpi_error as error:
            raise translate(error) from error
        return self._phase == 2

    def _add(self) -> None:
        for first, second, *rest in self._segments:
            np.add(first, second, out=first)
            for other in rest:
                np.add(first, other, out=first)
            for other in (second, *rest):
                np.copyto(other, first)

    @property
    def progress(self) -> int:
        return self._phase

    def close(self) -> None:
        if self.finished:
            for request in self._requests:
                request.Free()
        self._requests = []
