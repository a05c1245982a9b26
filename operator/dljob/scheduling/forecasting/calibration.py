"""Calibrate the intervals of forecast waits with the errors of earlier forecasts.

Simulations cannot know how wrong they are: other jobs arrive than expected, and errors of jobs add up. The score of a
bound is (wait + ``OFFSET_S``) / (bound + ``OFFSET_S``). Each bound is multiplied by a quantile of its last ``MEMORY``
scores. This is conformalized quantile regression (Romano et al., NeurIPS 2019), which treats both bounds apart. After a
restart of the operator, the scores are those of ``PRIOR``, which real ones replace one by one.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from math import ceil, floor, inf
from typing import Any

from dljob.scheduling.forecasting.forecast import Forecast
from dljob.scheduling.forecasting.times import Interval

MEMORY = 200
"""Number of scores of each bound that are stored."""
MISSED = 0.05
"""Part of the waits that are expected to lie below an interval, and part that are expected to lie above it."""
OFFSET_S = 60.0
"""Seconds that are added to each wait in a score. Without them, scores of short waits would be extreme."""
MIN_WAIT_S = 60.0
"""Shorter waits are not learned from: the operator itself and the start of pods take seconds."""
PRIOR = (
    (
        1.0, 1.03, 1.03, 1.05, 1.06, 1.06, 1.06, 1.07, 1.08, 1.08, 1.08, 1.09, 1.1, 1.1, 1.11, 1.11, 1.13, 1.13,
        1.15, 1.19, 1.24, 1.25, 1.28, 1.36, 1.44, 1.56, 1.64, 1.68, 1.81, 1.89, 2.09, 2.21, 2.32, 2.54, 2.87,
        3.09, 3.6, 3.93, 5.9,
    ),
    (
        0.31, 0.4, 0.53, 0.54, 0.6, 0.67, 0.7, 0.75, 0.81, 0.84, 0.86, 0.9, 0.9, 0.9, 0.91, 0.91, 0.91, 0.92,
        0.92, 0.93, 0.93, 0.93, 0.93, 0.94, 0.94, 0.94, 0.95, 0.96, 0.98, 0.99, 1.0, 1.02, 1.05, 1.13, 1.22,
        1.35, 1.81, 2.05, 3.64,
    ),
)  # fmt: skip
"""Scores of the lower and of the upper bound after a restart: the 1/40, 2/40, … 39/40 quantiles of the 135 jobs that
waited for at least a minute in streams 10 to 14 of benchmarks/scheduling."""


class Calibration:
    """The scores of the last forecasts, and intervals that follow from them."""

    def __init__(self, prior: tuple[Sequence[float], Sequence[float]] = PRIOR) -> None:
        """``prior``: scores of the lower and of the upper bound."""
        self._low, self._high = (deque(scores, maxlen=MEMORY) for scores in prior)
        self._first: dict[Hashable, tuple[float, Interval]] = {}
        """For each waiting job: when its wait was first forecast, and that wait before its calibration."""

    def forecast_of(self, job: Hashable, now_s: float, found: Forecast) -> Forecast:
        """Return the calibrated forecast of a waiting job, and remember its first one."""
        self._first.setdefault(job, (now_s, found.start))
        return self.forecast(found)

    def learn(
        self, waiting: Collection[Hashable], now_s: float, started: Callable[[Any], bool] = lambda job: True
    ) -> None:
        """Learn from the jobs that are no longer in ``waiting``, if they have ``started``, and forget them."""
        for job in self._first.keys() - set(waiting):
            made_s, wait = self._first.pop(job)
            if started(job):
                self.note(wait, now_s - made_s)

    def forget_waits(self) -> None:
        """Forget the waiting jobs, but no score."""
        self._first.clear()

    def note(self, forecast: Interval, wait_s: float) -> None:
        """Learn from a job that has started: the forecast of its wait when it began to wait, and its wait.

        ``forecast``: before its calibration. Ignore a wait shorter than ``MIN_WAIT_S``, and an infinite forecast.
        """
        if wait_s >= MIN_WAIT_S and forecast.p90 < inf:
            self._low.append((wait_s + OFFSET_S) / (forecast.p10 + OFFSET_S))
            self._high.append((wait_s + OFFSET_S) / (forecast.p90 + OFFSET_S))

    def forecast(self, found: Forecast) -> Forecast:
        """Return a forecast with a calibrated start. The bounds of the end move as those of the start."""
        start, end = self.interval(found.start), found.end
        if end.p90 == inf or found.start.p90 == inf:
            return Forecast(start, end)
        low = min(end.p50, max(0.0, end.p10 + start.p10 - found.start.p10))
        return Forecast(start, Interval(low, end.p50, max(end.p50, end.p90 + start.p90 - found.start.p90)))

    def interval(self, forecast: Interval) -> Interval:
        """Return a forecast wait with calibrated bounds. Its median stays."""
        low_s = (forecast.p10 + OFFSET_S) * lower(self._low) - OFFSET_S
        high_s = (forecast.p90 + OFFSET_S) * upper(self._high) - OFFSET_S
        return Interval(min(forecast.p50, max(0.0, low_s)), forecast.p50, max(forecast.p50, high_s))


def lower(scores: Sequence[float]) -> float:
    """Return the lower conformal bound of scores: a new one is smaller with a probability of about ``MISSED``.

    With n scores, this is the one of rank floor(``MISSED`` (n + 1)), at least the smallest.
    """
    return sorted(scores)[max(1, floor(MISSED * (len(scores) + 1))) - 1]


def upper(scores: Sequence[float]) -> float:
    """Return the upper conformal bound of scores: a new one is larger with a probability of about ``MISSED``.

    With n scores, this is the one of rank ceil((1 - ``MISSED``) (n + 1)), at most the largest.
    """
    return sorted(scores)[min(len(scores), ceil((1 - MISSED) * (len(scores) + 1))) - 1]
