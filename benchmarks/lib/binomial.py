"""Interval of a probability, from a number of successes."""

from math import sqrt
from statistics import NormalDist


def wilson(successes: float, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Return the interval of the probability of success after ``successes`` of ``trials`` (Wilson 1927).

    ``level``: probability with which the interval has the true value. Without trials, the interval is (0, 1).
    """
    if trials <= 0:
        return 0.0, 1.0
    z, part = NormalDist().inv_cdf(0.5 + level / 2), successes / trials
    middle = (part + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * sqrt(part * (1 - part) / trials + z * z / (4 * trials**2))
    return max(0.0, middle - half), min(1.0, middle + half)
