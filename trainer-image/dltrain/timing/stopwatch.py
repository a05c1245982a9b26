"""Measure a rank's steps: wall-clock time, CPU time, and how long a rank needs to get this CPU time under a quota."""

import time
from dataclasses import dataclass

from dltrain.timing.step_times import Times

BUDGET_WINDOW_S = 1.0
"""Minimum total duration of steps, in seconds, from which ``Budget`` updates its estimate: ten CPU quota periods."""
FORGETTING = 1.01
"""Factor by which the estimate of ``Budget`` may grow at each update, because the cause of a slowdown may have
ended."""


@dataclass(frozen=True)
class Lap:
    """A duration in seconds: wall-clock time, CPU time of this thread, and CPU time of all threads of the process."""

    wall_s: float = 0.0
    thread_s: float = 0.0
    process_s: float = 0.0

    def __add__(self, other: "Lap") -> "Lap":
        return Lap(self.wall_s + other.wall_s, self.thread_s + other.thread_s, self.process_s + other.process_s)

    def __sub__(self, other: "Lap") -> "Lap":
        return Lap(self.wall_s - other.wall_s, self.thread_s - other.thread_s, self.process_s - other.process_s)


NOTHING = Lap()


def reading() -> Lap:
    """Return the current values of the wall clock and CPU clocks. The difference of two such values is a duration."""
    return Lap(time.perf_counter(), time.thread_time(), time.process_time())


class Budget:
    """Estimate ``rate``, the fraction of a CPU that this rank gets if it computes all the time.

    ``rate`` is below 1 under a CPU quota or on a shared CPU. A quota throttles a process only after the process has
    used its CPU time of a quota period. A rank that often waits for other ranks may never reach this limit, and then
    computes at full speed. The duration of its computing is therefore shorter than if it computed without waiting; its
    CPU time divided by ``rate`` estimates the latter. ``rate`` is at most the fraction of a CPU that the rank got while
    it computed, and at least the fraction that it got overall.
    """

    def __init__(self) -> None:
        self.rate = 1.0
        self._computed = self._whole = Lap()

    def add(self, computed: Lap, whole: Lap) -> float:
        """Add a step. Return the estimated wall-clock seconds of the step if this rank computed without waiting.

        That is the step's CPU time, divided by ``rate``, the fraction of a CPU that the rank gets. ``computed``: time
        of the parts of the step in which the rank computed. ``whole``: time of the whole step, with all waiting.
        """
        self._computed += computed
        self._whole += whole
        if self._whole.wall_s >= BUDGET_WINDOW_S:
            upper, lower = (lap.thread_s / max(lap.wall_s, 1e-9) for lap in (self._computed, self._whole))
            self.rate = max(lower, min(upper, FORGETTING * self.rate), 1e-3)
            self._computed = self._whole = Lap()
        return whole.thread_s / self.rate


class Stopwatch:
    """Measure the parts of each step: waiting for the batch, then computing and waiting for other ranks by turns."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.demanded_s = 0.0
        """Estimated wall-clock seconds of the last step if this rank computed without waiting; 0 if unknown.

        That is its CPU time, divided by the fraction of a CPU that the rank gets (see ``Budget``).
        """
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

    def refetched(self) -> None:
        """Record that the next micro-batch of the step has arrived. The time since the previous call was waiting."""
        self._data += self._lap()

    def computed(self, waited: Lap = NOTHING) -> None:
        """Count the time since the previous call of a method as computing, except ``waited``.

        ``waited``: the part of this time in which the rank waited for other ranks.
        """
        self._computed += self._lap() - waited
        self._waited += waited

    def waited(self) -> None:
        """Count the time since the previous call of a method as waiting for other ranks."""
        self._waited += self._lap()

    def differentiated(self, backward_s: float) -> None:
        """Divide this step's computing time so far: ``backward_s`` seconds are backward passes, the rest is forward.

        0 means that the duration of the backward passes is unknown, and then that of the forward passes is unknown too.
        """
        self._backward_s = backward_s
        self._forward_s = max(0.0, self._computed.wall_s - backward_s) if backward_s else 0.0

    def times(self, exposed_s: float, agree_s: float, fetch_s: float, sum_s: float = 0.0) -> Times:
        """Return the times of the last step.

        The arguments are the fields of ``Times`` with the same names, in seconds.
        """
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
        """Compute ``demanded_s`` for the last step, after adding the step to the estimate in ``Budget``."""
        self.demanded_s = self._budget.add(self._computed, self._data + self._computed + self._waited)

    def _lap(self) -> Lap:
        """Return the duration since the previous call of this method, and since the creation at the first call."""
        now = reading()
        lap = now - self._now
        self._now = now
        return lap
