"""Which worker may begin a step when not all are at the same one: the parameter server's bookkeeping. Pure.

A worker's clock is the number of steps that it has done. With a bound of s it may begin its step c only once every
worker has done c - s steps: steps at work are never more than s apart (Ho et al. 2013; 0 is lockstep). Without a bound
nobody waits (Dean et al. 2012). The staleness of an update is how many updates by others came between its worker's
reading of the parameters and itself.
"""

from collections.abc import Sequence


class Clocks:
    """Of ``len(done)`` workers that do ``total`` steps each."""

    def __init__(self, done: Sequence[int], total: int, bound: int | None) -> None:
        self.done = list(done)
        self.total = total
        self._bound = bound
        self._updates = 0
        self._read = [0] * len(done)

    def may_begin(self, worker: int) -> bool:
        """Whether it has a step left and the others have done enough."""
        if self.done[worker] >= self.total:
            return False
        return self._bound is None or self.ahead(worker) <= self._bound

    def ahead(self, worker: int) -> int:
        """Steps that it has done more than the slowest one."""
        return self.done[worker] - min(self.done)

    def read(self, worker: int) -> None:
        """It reads the parameters as they are now."""
        self._read[worker] = self._updates

    def step(self, worker: int, *, updates: bool = True) -> int:
        """It has done a step; returns the staleness of its update. ``updates``: whether it made one."""
        staleness = self._updates - self._read[worker]
        self.done[worker] += 1
        self._updates += updates
        return staleness

    @property
    def over(self) -> bool:
        """Whether all have done all of their steps."""
        return min(self.done) >= self.total
