"""The intervals of times in forecasts."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Interval:
    """Percentiles of a time in seconds. Infinity: unknown."""

    p10: float
    p50: float
    p90: float

    def __post_init__(self) -> None:
        if not self.p10 <= self.p50 <= self.p90:
            raise ValueError(f"Interval: found {self}; expected p10 <= p50 <= p90")


UNKNOWN = Interval(inf, inf, inf)


def interval(median_s: float, ratio: float) -> Interval:
    """Return the interval from ``median_s / ratio`` (10th percentile) to ``median_s * ratio`` (90th percentile).

    A ratio below 1 counts as 1. Negative times count as 0.
    """
    median_s, ratio = max(0.0, median_s), max(1.0, ratio)
    return Interval(median_s / ratio, median_s, median_s * ratio)
