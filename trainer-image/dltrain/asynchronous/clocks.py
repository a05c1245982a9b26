"""Clocks of the workers in asynchronous training. The parameter server uses them to decide who may start a step.

A worker's clock is the number of steps that it has done. With a bound of s, a worker may start its step c only after
every worker has done c - s steps. So the current steps of two workers differ by at most s (Ho et al. 2013). A bound of
0 means synchronous training. Without a bound no worker waits (Dean et al. 2012). The staleness of an update counts the
updates of other workers since the worker read the parameters.
"""

from collections.abc import Sequence


class Clocks:
    """The clocks of the workers, which count steps. The parameter server updates them.

    ``done``: the number of completed steps of each worker, which is its clock. ``total``: steps that each worker must
    do. ``bound``: a worker may begin a step if it is at most ``bound`` steps ahead of the slowest worker; None: no
    limit.
    """

    def __init__(self, done: Sequence[int], total: int, bound: int | None) -> None:
        self.done = list(done)
        self.total = total
        self._bound = bound
        self._updates = 0
        self._read = [0] * len(done)

    def may_begin(self, worker: int) -> bool:
        """Return True if the worker has steps left and is not too far ahead of the slowest worker to begin one."""
        if self.done[worker] >= self.total:
            return False
        return self._bound is None or self.ahead(worker) <= self._bound

    def ahead(self, worker: int) -> int:
        """Return by how many steps the worker is ahead of the slowest one."""
        return self.done[worker] - min(self.done)

    def read(self, worker: int) -> None:
        """Record that the worker reads the current parameters. The staleness of its next update counts from now on."""
        self._read[worker] = self._updates

    def step(self, worker: int, *, updates: bool = True) -> int:
        """Record that the worker has done a step. Return the staleness of its update.

        The staleness is the number of updates by other workers since this worker last read the parameters (``read``).
        ``updates``: False if the worker had no samples in this step and sent no update.
        """
        staleness = self._updates - self._read[worker]
        self.done[worker] += 1
        self._updates += updates
        return staleness

    @property
    def over(self) -> bool:
        """Return True if all workers have done all of their steps."""
        return min(self.done) >= self.total
