"""Synchronization: what waiting for each other costs, in lockstep, within a bound, or not at all.

Bulk-synchronous steps end together (Valiant 1990); stale-synchronous ranks are at most a bound of steps apart (Ho et
al. 2013); asynchronous ones only queue for the server (Dean et al. 2012). ``benchmarks/perfmodel/sync_simulation.py``
holds all three against simulated events.
"""

from functools import cache
from statistics import NormalDist

STEP_VARIATION = 0.03
"""Standard deviation of a rank's step time over its mean: repeats of one configuration on a public cluster of T4s
(Pollux, OSDI 2021, artifact) differ by 3.3 %."""


@cache
def straggler_factor(ranks: int, variation: float = STEP_VARIATION) -> float:
    """Expected time of the slowest of ``ranks`` equal ranks over one's mean.

    The largest of n variables lies near the quantile (n - 0.375) / (n + 0.25) (Blom 1958), here of a gamma distribution
    (times are skewed and above 0): (1 - v²/9 + z v/3)³ with z the normal quantile (Wilson, Hilferty 1931). 1 for one
    rank.
    """
    if ranks <= 1:
        return 1.0
    z = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return max(1.0, (1.0 - variation**2 / 9 + z * variation / 3) ** 3)


def agreement_s(ranks: int, latency_s: float) -> float:
    """Agreeing that all ranks have the sum before a step commits: up and down a binary tree of empty messages."""
    return 2 * (ranks - 1).bit_length() * latency_s


def stale_factor(ranks: int, bound: int, variation: float = STEP_VARIATION) -> float:
    """Expected step of ``ranks`` equal ranks that may be ``bound`` steps apart, over one's mean; bound 0 is lockstep.

    Ranks part like random walks of ``variation`` a step and are held back at ``bound`` steps, where they arrive the
    less often the further it is: a reflected walk's push is variation^2 over the width, so the straggler term shrinks
    by variation / bound.
    """
    alone = straggler_factor(ranks, variation) - 1
    return 1 + (alone if bound == 0 else alone * min(1.0, variation / bound))


def asynchronous_updates_per_s(
    workers: int, think_s: float, service_s: float, variation: float = STEP_VARIATION
) -> float:
    """Updates a second of ``workers`` that compute for ``think_s`` and then hold the server for ``service_s``.

    Never more than min(n / (Z + D), 1 / D) (Z thinking, D service): reached when nothing varies. Where much does, mean
    value analysis of the closed queue (Reiser, Lavenberg 1980), an update in service taken to be half done. Between the
    two in proportion to ``variation`` (standard deviation over mean of both times), up to 0.2.
    """
    if workers < 1 or not (think_s >= 0 and service_s > 0 and 0 <= variation < 1e3):
        raise ValueError(
            f"{workers} workers, {think_s:g} s of computing, {service_s:g} s of service, variation {variation:g}: "
            "expected one worker or more, a service above 0 and a variation of 0 or more"
        )
    waiting, busy, rate = 0.0, 0.0, 0.0
    for n in range(1, workers + 1):
        residence_s = service_s * (1 + max(0.0, waiting - busy)) + busy * service_s * (1 + variation**2) / 2
        rate = n / (think_s + residence_s)
        waiting, busy = rate * residence_s, min(1.0, rate * service_s)
    most = min(workers / (think_s + service_s), 1 / service_s)
    return most - min(1.0, variation / 0.2) * (most - min(rate, most))


def staleness(workers: int) -> float:
    """Updates by others between a worker's read and its own update, in the mean: each makes one a round."""
    return float(workers - 1)
