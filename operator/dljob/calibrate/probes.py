"""Choice of the next run to measure: the one that reduces the uncertainty of the predictions most."""

from collections.abc import Collection

import numpy as np

from dljob.calibrate.scaling import Posterior
from dljob.perf.fit.scaling import Floats, Runs

MAX_PROBES = 5
"""Maximum number of multi-device measurements to suggest."""


def next_probe(posterior: Posterior, runs: Runs, measured: Collection[int] = ()) -> int | None:
    """Return the index of the run of ``runs`` to measure next, or None if none or enough are measured.

    The chosen run reduces the summed variance of the logarithms of all step times most (A-optimal design; Chaloner,
    Verdinelli 1995): measuring run j reduces the variance of run i by cov(i, j)^2 / (var(j) + noise(j)). Call it again
    after each measurement, because the fitted constants change the covariance.
    """
    left = [i for i in range(len(runs)) if i not in measured]
    if not left or len(measured) >= MAX_PROBES:
        return None
    reduction = information(posterior, runs)
    return max(left, key=lambda i: float(reduction[i]))


def information(posterior: Posterior, runs: Runs) -> Floats:
    """Return for each run the fraction by which measuring it reduces the summed variance of all log step times."""
    covariance, noise = posterior.covariance(runs)
    gain = (covariance**2).sum(axis=0) / (np.diag(covariance) + noise)
    return np.asarray(gain / max(float(np.trace(covariance)), 1e-300))
