"""Synchronization: what waiting for each other costs when every step ends together (bulk-synchronous; Valiant 1990).

Users: ``step``.
"""

from functools import cache
from statistics import NormalDist

STEP_VARIATION = 0.03
"""Standard deviation of a rank's step time over its mean: repeats of one configuration on a public cluster of T4s
(Pollux, OSDI 2021, artifact) differ by 3.3 %."""


@cache
def straggler_factor(ranks: int, variation: float = STEP_VARIATION) -> float:
    """Expected time of the slowest of ``ranks`` equal ranks over one's mean.

    The largest of n normal variables lies near the quantile (n - 0.375) / (n + 0.25) (Blom 1958). 1 for one rank.
    """
    if ranks <= 1:
        return 1.0
    return 1.0 + variation * max(0.0, NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)))


def agreement_s(ranks: int, latency_s: float) -> float:
    """Agreeing that all ranks have the sum before a step commits: up and down a binary tree of empty messages."""
    return 2 * (ranks - 1).bit_length() * latency_s
