"""Measure a rank's steps: wall-clock time, CPU time, and the time needed to obtain that CPU time."""

import time
from dataclasses import dataclass

from dltrain.timing.step_times import Times

BUDGET_WINDOW_S = 1.0
"""Length of a window: ten periods of a CPU quota."""
FORGETTING = 1.01
"""Growth of the estimated rate per window, because the cause of a slowdown may have ended."""


@dataclass(frozen=True)
class Lap:
    """A duration: wall-clock time, CPU time of this thread, and CPU time of all threads of the process."""

    wall_s: float = 0.0
    thread_s: float = 0.0
    process_s: float = 0.0

    def __add__(self, other: "Lap") -> "Lap":
        return Lap(self.wall_s + other.wall_s, self.thread_s + other.thread_s, self.process_s + other.process_s)

    def __sub__(self, other: "Lap") -> "Lap":
        return Lap(self.wall_s - other.wall_s, self.thread_s - other.thread_s, self.process_s - other.process_s)


NOTHING = Lap()


def reading() -> Lap:
    """Read the clocks. The difference of two readings is a duration."""
    return Lap(time.perf_counter(), time.thread_time(), time.process_time())


class Budget:
    """Estimate ``rate``, the fraction of a CPU that this rank gets under full load.

    ``rate`` is below 1 under a CPU quota or on a shared CPU. A quota throttles a process only after it has used its
    part of a period, and a rank that waits uses no CPU time. The duration of computing therefore does not show how much
    more work the rank could do, but its CPU time divided by ``rate`` does. ``rate`` is at most the fraction of a CPU
    that the rank got while it computed, and at least the fraction that it got overall.
    """

    def __init__(self) -> None:
        self.rate = 1.0
        self._computed = self._whole = Lap()

    def add(self, computed: Lap, whole: Lap) -> float:
        """Add a step (``whole``) and its computing. Return the seconds needed to obtain the step's CPU time."""
        self._computed += computed
        self._whole += whole
        if self._whole.wall_s >= BUDGET_WINDOW_S:
            upper, lower = (lap.thread_s / max(lap.wall_s, 1e-9) for lap in (self._computed, self._whole))
            self.rate = max(lower, min(upper, FORGETTING * self.rate), 1e-3)
            self._computed = self._whole = Lap()
        return whole.thread_s / self.rate


class Stopwatch:
    """Measure one step after another: fetching the batch, then computing and waiting in turns."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.demanded_s = 0.0
        """Seconds needed to obtain the CPU time of the last step; 0 if unknown."""
        self._forward_s = self._backward_s = 0.0
        self._now = reading()
        self._data = self._computed = self._waited = Lap()

    def begin(self) -> None:
        """Begin a step; the rank now waits for the batch."""
        self._lap()
        self._computed = self._waited = Lap()

    def fetched(self) -> None:
        """Record that the batch has arrived."""
        self._data = self._lap()

    def computed(self, waited: Lap = NOTHING) -> None:
        """Record the end of computing. ``waited``: the part of it spent waiting for other ranks."""
        self._computed += self._lap() - waited
        self._waited += waited

    def waited(self) -> None:
        self._waited += self._lap()

    def differentiated(self, backward_s: float) -> None:
        """Divide the computing so far into forward and ``backward_s`` of backward."""
        self._backward_s = backward_s
        self._forward_s = max(0.0, self._computed.wall_s - backward_s) if backward_s else 0.0

    def times(self, exposed_s: float, agree_s: float, fetch_s: float, sum_s: float = 0.0) -> Times:
        """Return the times of the last step. Arguments as in ``Times``."""
        return Times(
            self._data.wall_s,
            self._computed.wall_s,
            exposed_s,
            agree_s,
            self._waited.process_s,
            fetch_s,
            self._forward_s,
            self._backward_s,
            sum_s,
        )

    def demand(self) -> None:
        """Add the last step to the budget and update ``demanded_s``."""
        self.demanded_s = self._budget.add(self._computed, self._data + self._computed + self._waited)

    def _lap(self) -> Lap:
        """Return the duration since the previous call."""
        now = reading()
        lap = now - self._now
        self._now = now
        return lap
