"""Execution of schedules over MPI with persistent requests, preallocated segments and progress from Python.

No memory is allocated during a reduction, because the page faults of new temporary arrays cost more time than the
reduction itself. A buffer is sent in segments, one message each, because single large messages have a far lower
bandwidth.
"""

from abc import abstractmethod
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dltrain.comm.core.collective import host_array
from dltrain.comm.core.fault_tolerance import translate
from dltrain.comm.core.polling import Polled, Run
from dltrain.comm.schedules.schedule import Schedule

_WINDOW = 4
"""Number of receives of a schedule (the messages of one rank) that are posted to MPI ahead of their turn.

They keep a link busy during an addition, and their segments fit into the cache.
"""


class Scheduled(Polled):
    """A collective that executes one ``Schedule`` (the messages of this rank) for each buffer.

    Buffers are on the CPU and have a dtype that numpy supports. ``segment_nbytes``: maximum size of a message.
    """

    def __init__(self, comm: Any, buffers: list[torch.Tensor], segment_nbytes: int) -> None:
        super().__init__(comm, buffers)
        self.use_runs(
            [
                _Run(
                    comm,
                    tag,
                    host_array(buffer),
                    self.schedule_of(tag, buffer.numel(), max(1, segment_nbytes // buffer.itemsize)),
                )
                for tag, buffer in enumerate(buffers)
            ]
        )

    def schedule_of(self, index: int, count: int, longest: int) -> Schedule:
        """Return this rank's messages for the buffer ``index``, which has ``count`` elements.

        By default, they depend only on its size. ``longest``: maximum number of elements of a message.
        """
        return self.schedule(count, longest)

    @abstractmethod
    def schedule(self, count: int, longest: int) -> Schedule:
        """Return this rank's messages in the algorithm for a buffer of ``count`` elements.

        ``longest``: maximum number of elements of a message.
        """


class _Run(Run):
    """The execution of one buffer's schedule (the messages of this rank), restarted for every reduction."""

    def __init__(self, comm: Any, tag: int, buffer: NDArray[Any], schedule: Schedule) -> None:
        from mpi4py import MPI  # a local import, because importing it may start MPI

        self._mpi_error = MPI.Exception
        longest = max((r.stop - r.start for r in schedule.receives if r.add), default=0)
        slots = np.empty((_WINDOW, longest), dtype=buffer.dtype)
        self._targets = [buffer[r.start : r.stop] for r in schedule.receives]
        self._arrivals = [
            slots[i % _WINDOW, : r.stop - r.start] if r.add else self._targets[i]
            for i, r in enumerate(schedule.receives)
        ]
        self._adds = [r.add for r in schedule.receives]
        self._blockers = schedule.blockers()
        self._after = [s.after for s in schedule.sends]
        self._receives = [
            comm.Recv_init(a, source=r.peer, tag=tag) for a, r in zip(self._arrivals, schedule.receives, strict=True)
        ]
        self._sends = [comm.Send_init(buffer[s.start : s.stop], dest=s.peer, tag=tag) for s in schedule.sends]
        self._posted = self._handled = len(self._receives)
        self._begun = len(self._sends)
        self._pending: deque[int] = deque()

    def start(self) -> None:
        assert self.finished, "the previous reduction is done"
        self._handled = self._posted = self._begun = 0
        self.test()

    @property
    def finished(self) -> bool:
        return self._handled == len(self._receives) and self._begun == len(self._sends) and not self._pending

    def test(self) -> bool:
        try:
            self._reap()
            # Test the receive last: another request's test may take its message, and then no socket wakes this rank.
            while self._advance():
                pass
            if self._handled == len(self._receives):
                self._reap()
        except self._mpi_error as error:
            raise translate(error) from error
        return self.finished

    @property
    def progress(self) -> int:
        return self._handled

    def _advance(self) -> bool:
        """Start all sends that may start, and handle the next receive if its message has arrived.

        Return True if a receive was handled, so that another call may make more progress.
        """
        while self._begun < len(self._sends) and self._after[self._begun] <= self._handled:
            self._sends[self._begun].Start()
            self._pending.append(self._begun)
            self._begun += 1
        self._post()
        index = self._handled
        if index == self._posted or not self._receives[index].Test():
            return False
        if self._adds[index]:
            if not self._unblocked(index):
                return False
            target = self._targets[index]
            np.add(target, self._arrivals[index], out=target)
        self._handled += 1
        return True

    def _post(self) -> None:
        limit = min(self._handled + _WINDOW, len(self._receives))
        while self._posted < limit and (self._adds[self._posted] or self._unblocked(self._posted)):
            self._receives[self._posted].Start()
            self._posted += 1

    def _unblocked(self, index: int) -> bool:
        """Return True if receive ``index`` may overwrite its elements: all sends of these elements are complete."""
        return all(send < self._begun and self._sends[send].Test() for send in self._blockers[index])

    def _reap(self) -> None:
        """Remove completed sends from the queue of pending sends, oldest first, up to the first incomplete one."""
        while self._pending and self._sends[self._pending[0]].Test():
            self._pending.popleft()

    def close(self) -> None:
        if self.finished:
            for request in (*self._receives, *self._sends):
                request.Free()
        self._receives, self._sends = [], []
