"""What a step takes this rank: on the clock, on a CPU, and how long that CPU time takes to come by."""

import time
from dataclasses import dataclass

from dltrain.timing.step_times import Times

BUDGET_WINDOW_S = 1.0
"""Ten periods of a quota."""
FORGETTING = 1.01
"""How much faster than it has shown a rank may be after each such window: what slowed it down may be over."""


@dataclass(frozen=True)
class Lap:
    """A stretch of time: on the clock, on a CPU in this thread, and on CPUs in all threads of the process."""

    wall_s: float = 0.0
    thread_s: float = 0.0
    process_s: float = 0.0

    def __add__(self, other: "Lap") -> "Lap":
        return Lap(self.wall_s + other.wall_s, self.thread_s + other.thread_s, self.process_s + other.process_s)

    def __sub__(self, other: "Lap") -> "Lap":
        return Lap(self.wall_s - other.wall_s, self.thread_s - other.thread_s, self.process_s - other.process_s)


NOTHING = Lap()


def reading() -> Lap:
    """Of the clocks, now: the difference of two is a stretch."""
    return Lap(time.perf_counter(), time.thread_time(), time.process_time())


class Budget:
    """What part of a CPU this rank gets when it asks for all of it: less than 1 under a quota, or beside others.

    A quota stops a process only once it has used up its part of a period, and a rank that waits for others uses none.
    So the time that its computing takes says little of how much more it could do; the CPU time that it uses does, once
    ``rate`` is known. It is at most what it got while it computed, and at least what it got on the whole.
    """

    def __init__(self) -> None:
        self.rate = 1.0
        self._computed = self._whole = Lap()

    def add(self, computed: Lap, whole: Lap) -> float:
        """A step, and its computing. Returns seconds that its CPU time takes to come by."""
        self._computed += computed
        self._whole += whole
        if self._whole.wall_s >= BUDGET_WINDOW_S:
            most, least = (lap.thread_s / max(lap.wall_s, 1e-9) for lap in (self._computed, self._whole))
            self.rate = max(least, min(most, FORGETTING * self.rate), 1e-3)
            self._computed = self._whole = Lap()
        return whole.thread_s / self.rate


class Stopwatch:
    """Of one step after the other: its batch, then in turns computing and waiting for other ranks."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.demanded_s = 0.0
        """Time that the CPU time of the last step takes to come by; 0 where that is not known."""
        self._forward_s = self._backward_s = 0.0
        self._now = reading()
        self._data = self._computed = self._waited = Lap()

    def begin(self) -> None:
        """A step's batch is wanted."""
        self._lap()
        self._computed = self._waited = Lap()

    def fetched(self) -> None:
        """The batch is here."""
        self._data = self._lap()

    def computed(self, waited: Lap = NOTHING) -> None:
        """``waited``: spent on other ranks amid computing."""
        self._computed += self._lap() - waited
        self._waited += waited

    def waited(self) -> None:
        self._waited += self._lap()

    def differentiated(self, backward_s: float) -> None:
        """What was computed so far is forward, and backward for so long."""
        self._backward_s = backward_s
        self._forward_s = max(0.0, self._computed.wall_s - backward_s) if backward_s else 0.0

    def times(self, exposed_s: float, agree_s: float, fetch_s: float, sum_s: float = 0.0) -> Times:
        """Of the step just made; the arguments as in ``Times``."""
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
        """Count the step just made for the budget and ``demanded_s``."""
        self.demanded_s = self._budget.add(self._computed, self._data + self._computed + self._waited)

    def _lap(self) -> Lap:
        """Since the last one."""
        now = reading()
        lap = now - self._now
        self._now = now
        return lap
