"""Forecasts of the wait, made by the operator's code when a job begins to wait, and the wait that followed.

A forecast does not know the jobs that come later. Those of namespaces that hold less, and short ones, may pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from benchmarks.scheduling.simulator import Result
from benchmarks.scheduling.workload import Job

from dljob.scheduling import Interval, Recent, Waiter
from dljob.scheduling.forecasting.forecast import WINDOW_S

LEAST_WAIT_S = 60.0
"""Shorter waits do not count: the operator itself and the start of pods take seconds."""


@dataclass
class Foresight:
    """The forecasts of one simulation. Times in seconds of the simulation."""

    start: dict[str, Interval] = field(default_factory=dict)
    """Predicted wait of each job that had to wait."""
    made_s: dict[str, float] = field(default_factory=dict)
    seen: dict[str, tuple[float, Waiter]] = field(default_factory=dict)
    """The moment at which each job arrived, and the job as it was then."""

    def arrived(self, job: Job, waiter: Waiter) -> None:
        self.seen.setdefault(job.name, (job.arrival_s, waiter))

    def recent(self, now_s: float) -> list[Recent]:
        return [Recent(now_s - at_s, job) for at_s, job in self.seen.values() if now_s - at_s < WINDOW_S]

    def note(self, name: str, now_s: float, start: Interval) -> None:
        """Note the forecast of a job. Only its first one counts."""
        if name not in self.start:
            self.start[name], self.made_s[name] = start, now_s


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of the forecasts for the jobs that waited.

    ``errors``: abs(forecast - wait) / wait. ``covered``: True if the job started within the interval.
    """

    errors: tuple[float, ...]
    covered: tuple[bool, ...]


def accuracy(found: Foresight, result: Result) -> Accuracy:
    """Return the accuracy of the forecasts of one simulation."""
    errors, covered = [], []
    for state in result.states:
        start = found.start.get(state.job.name)
        if start is None:
            continue
        wait_s = state.started_s - found.made_s[state.job.name]
        if wait_s >= LEAST_WAIT_S:
            errors.append(abs(start.p50 - wait_s) / wait_s)
            covered.append(start.p10 <= wait_s <= start.p90)
    return Accuracy(tuple(errors), tuple(covered))


def together(found: Sequence[Accuracy]) -> tuple[int, float, float]:
    """Return the number of forecasts, their median error, and the part of their intervals that held."""
    errors = [error for each in found for error in each.errors]
    covered = [one for each in found for one in each.covered]
    return len(errors), float(np.median(errors)) if errors else 0.0, float(np.mean(covered)) if covered else 1.0
