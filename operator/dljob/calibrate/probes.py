"""Choose the next run to measure: the one that most reduces the uncertainty of the predictions."""

from collections.abc import Collection

import numpy as np

from dljob.calibrate.prior import PROBING
from dljob.calibrate.scaling import Posterior
from dljob.perf.fit.scaling import Floats, Runs

MAX_PROBES = 5
"""Number of measured runs on several devices after which no further measurement is suggested."""


def next_probe(posterior: Posterior, runs: Runs, measured: Collection[int] = ()) -> int | None:
    """Return the index in ``runs`` of the run whose measurement would improve predictions most.

    Return None if all runs, or ``MAX_PROBES`` of them, were measured. ``measured``: indices of the measured runs. The
    chosen run most reduces the sum of the variances of log(step time) over all runs (A-optimal design; Chaloner,
    Verdinelli 1995): measuring run j reduces the variance of run i by cov(i, j)^2 / (var(j) + noise(j)). Each
    measurement changes the covariance, so call this again after each.
    """
    left = [i for i in range(len(runs)) if i not in measured]
    if not left or len(measured) >= MAX_PROBES:
        return None
    reduction = information(posterior, runs)
    return max(left, key=lambda i: float(reduction[i]))


def information(posterior: Posterior, runs: Runs) -> Floats:
    """Return, for each run, the fraction (0 to 1) by which measuring it reduces the uncertainty of all predictions.

    The uncertainty is the sum of the variances of log(step time) over all runs in ``runs``.
    """
    covariance, noise = posterior.with_prior(PROBING).covariance(runs)
    gain = (covariance**2).sum(axis=0) / (np.diag(covariance) + noise)
    return np.asarray(gain / max(float(np.trace(covariance)), 1e-300))
