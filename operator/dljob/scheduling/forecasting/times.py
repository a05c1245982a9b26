"""The intervals of times in forecasts."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from statistics import quantiles

from dljob.scheduling.backfill import START_UP_S


@dataclass(frozen=True, slots=True)
class Interval:
    """Percentiles of a time in seconds. Infinity: unknown."""

    p10: float
    p50: float
    p90: float

    def __post_init__(self) -> None:
        if not self.p10 <= self.p50 <= self.p90:
            raise ValueError(f"Interval: found {self}; expected p10 <= p50 <= p90")

    def plus(self, other: "Interval") -> "Interval":
        """Return the percentiles of the sum of both times if both are short or long together."""
        return Interval(self.p10 + other.p10, self.p50 + other.p50, self.p90 + other.p90)


UNKNOWN = Interval(inf, inf, inf)
NO_TIME = Interval(0.0, 0.0, 0.0)
START_UP = Interval(10.0, 20.0, START_UP_S)
"""Seconds from the creation of pods to the first step if few starts were measured.

The 90th percentile is the margin of back-fill."""
MIN_STARTS = 3
"""Minimum number of measured starts that replace ``START_UP``."""


def interval(median_s: float, ratio: float) -> Interval:
    """Return the interval from ``median_s / ratio`` (10th percentile) to ``median_s * ratio`` (90th percentile).

    A ratio below 1 counts as 1. Negative times count as 0.
    """
    median_s, ratio = max(0.0, median_s), max(1.0, ratio)
    return Interval(median_s / ratio, median_s, median_s * ratio)


def start_up(measured: Iterable[float]) -> Interval:
    """Return percentiles of the seconds from the creation of a job's pods to its first step.

    ``measured``: seconds of the starts of some jobs. If there are fewer than ``MIN_STARTS``, return ``START_UP``.
    """
    starts = list(measured)
    if len(starts) < MIN_STARTS:
        return START_UP
    tenths = quantiles(starts, n=10, method="inclusive")
    return Interval(tenths[0], tenths[4], tenths[8])
