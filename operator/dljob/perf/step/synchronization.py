"""Cost of waiting in synchronous, stale-synchronous and asynchronous training.

Synchronous ranks end each step together (Valiant 1990). Stale-synchronous ranks are never further apart than a bound
in steps (Ho et al. 2013). Asynchronous ranks only queue for the parameter server (Dean et al. 2012).
``benchmarks/perfmodel/sync_simulation.py`` compares all three formulas with simulations.
"""

from functools import cache
from statistics import NormalDist

STEP_VARIATION = 0.03
"""Standard deviation of a rank's step time, divided by the mean. Repeats of the same configuration on a public cluster
of T4s (Pollux, OSDI 2021, artifact) differ by 3.3 %."""


@cache
def straggler_factor(ranks: int, variation: float = STEP_VARIATION) -> float:
    """Return the expected step time of the slowest of ``ranks`` equal ranks, divided by a rank's mean step time.

    The expected maximum of n variables is near their quantile (n - 0.375) / (n + 0.25) (Blom 1958). Step times are
    positive and skewed, so they get a gamma distribution with coefficient of variation v = ``variation``. Its
    quantile is (1 - v²/9 + z v/3)³, where z is the normal quantile (Wilson, Hilferty 1931).
    """
    if ranks <= 1:
        return 1.0
    z = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return max(1.0, (1.0 - variation**2 / 9 + z * variation / 3) ** 3)


def agreement_s(ranks: int, latency_s: float) -> float:
    """Return the seconds that ranks need at the end of a step to confirm that all have the sum of the gradients.

    For this agreement, empty messages travel up and down a binary tree of ranks.
    """
    return 2 * (ranks - 1).bit_length() * latency_s


def stale_factor(ranks: int, bound: int, variation: float = STEP_VARIATION) -> float:
    """Return the expected step time with a staleness bound, divided by a rank's mean step time.

    ``bound``: the staleness bound in steps; 0 means synchronous training. The distance between two ranks is modelled as
    a random walk with standard deviation ``variation`` per step, reflected at ``bound`` steps. The reflections push
    ranks back by variation^2 / bound per step. The result is therefore 1 + (straggler_factor - 1) variation / bound. If
    variation / bound is larger than 1, or if ``bound`` is 0, the result is ``straggler_factor``.
    """
    alone = straggler_factor(ranks, variation) - 1
    return 1 + (alone if bound == 0 else alone * min(1.0, variation / bound))


def asynchronous_updates_per_s(
    workers: int, think_s: float, service_s: float, variation: float = STEP_VARIATION
) -> float:
    """Return the updates per second of all n ``workers`` together, with one parameter server.

    Again and again, a worker computes for ``think_s`` (Z) and then occupies the server for ``service_s`` (D). Without
    variation, the rate is the upper bound min(n / (Z + D), 1 / D). With a ``variation`` (standard deviation / mean of
    both times) of 0.2 or more, the rate comes from mean value analysis of the closed queue (Reiser, Lavenberg 1980),
    which assumes that an update in service is half done. In between, the rate is interpolated linearly. Raise
    ValueError if an argument is out of range.
    """
    if workers < 1 or not (think_s >= 0 and service_s > 0 and 0 <= variation < 1e3):
        raise ValueError(
            f"parameter server: found {workers} workers, {think_s:g} s of computing, {service_s:g} s of service and "
            f"variation {variation:g} of these times; expected one worker or more, a service time above 0, a "
            "computing time of 0 or more, and a variation from 0 to 1000"
        )
    waiting, busy, rate = 0.0, 0.0, 0.0
    for n in range(1, workers + 1):
        residence_s = service_s * (1 + max(0.0, waiting - busy)) + busy * service_s * (1 + variation**2) / 2
        rate = n / (think_s + residence_s)
        waiting, busy = rate * residence_s, min(1.0, rate * service_s)
    most = min(workers / (think_s + service_s), 1 / service_s)
    return most - min(1.0, variation / 0.2) * (most - min(rate, most))


def staleness(workers: int) -> float:
    """Return the mean number of updates by other workers between a worker's read of the parameters and its own update.

    Each other worker makes one update in this time.
    """
    return float(workers - 1)
