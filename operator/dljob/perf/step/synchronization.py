"""Cost of waiting in synchronous, stale-synchronous and asynchronous training.

Synchronous ranks end each step together (Valiant 1990). Stale-synchronous ranks are at most a bound of steps apart (Ho
et al. 2013). Asynchronous ranks only queue for the parameter server (Dean et al. 2012).
``benchmarks/perfmodel/sync_simulation.py`` compares all three with simulations.
"""

from functools import cache
from statistics import NormalDist

STEP_VARIATION = 0.03
"""Standard deviation of a rank's step time divided by its mean: repeats of one configuration on a public cluster of T4s
(Pollux, OSDI 2021, artifact) differ by 3.3 %."""


@cache
def straggler_factor(ranks: int, variation: float = STEP_VARIATION) -> float:
    """Return the expected time of the slowest of ``ranks`` equal ranks, divided by the mean of one; 1 for one rank.

    The maximum of n variables is near the quantile (n - 0.375) / (n + 0.25) (Blom 1958). Times are positive and skewed,
    so the gamma distribution is used: (1 - v²/9 + z v/3)³ with z the normal quantile (Wilson, Hilferty 1931).
    """
    if ranks <= 1:
        return 1.0
    z = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return max(1.0, (1.0 - variation**2 / 9 + z * variation / 3) ** 3)


def agreement_s(ranks: int, latency_s: float) -> float:
    """Return the time to agree that all ranks have the sum: empty messages up and down a binary tree."""
    return 2 * (ranks - 1).bit_length() * latency_s


def stale_factor(ranks: int, bound: int, variation: float = STEP_VARIATION) -> float:
    """Return the expected step time with a staleness bound, divided by the mean of one rank; bound 0 is synchronous.

    The distances between ranks are random walks of ``variation`` per step that are reflected at ``bound`` steps. The
    push of a reflected walk is variation^2 over the width, so the straggler term shrinks by variation / bound.
    """
    alone = straggler_factor(ranks, variation) - 1
    return 1 + (alone if bound == 0 else alone * min(1.0, variation / bound))


def asynchronous_updates_per_s(
    workers: int, think_s: float, service_s: float, variation: float = STEP_VARIATION
) -> float:
    """Return the updates per second of ``workers`` that compute for ``think_s`` and then hold the server ``service_s``.

    Without variation this is the upper bound min(n / (Z + D), 1 / D), with Z think time and D service time. With a
    ``variation`` (standard deviation over mean of both times) of 0.2 or more, it is the mean value analysis of the
    closed queue (Reiser, Lavenberg 1980), where an update in service is assumed to be half done. Between them it is
    interpolated linearly.
    """
    if workers < 1 or not (think_s >= 0 and service_s > 0 and 0 <= variation < 1e3):
        raise ValueError(
            f"found {workers} workers, {think_s:g} s of computing, {service_s:g} s of service and variation "
            f"{variation:g}; expected one worker or more, a service time above 0 and a variation of 0 or more"
        )
    waiting, busy, rate = 0.0, 0.0, 0.0
    for n in range(1, workers + 1):
        residence_s = service_s * (1 + max(0.0, waiting - busy)) + busy * service_s * (1 + variation**2) / 2
        rate = n / (think_s + residence_s)
        waiting, busy = rate * residence_s, min(1.0, rate * service_s)
    most = min(workers / (think_s + service_s), 1 / service_s)
    return most - min(1.0, variation / 0.2) * (most - min(rate, most))


def staleness(workers: int) -> float:
    """Return the mean number of updates by other workers between a worker's read and its update: one by each."""
    return float(workers - 1)
