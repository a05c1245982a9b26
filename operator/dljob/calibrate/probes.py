"""Which run to measure next: the one after which the runs to be predicted are known best."""

from collections.abc import Collection

import numpy as np

from dljob.calibrate.scaling import Posterior
from dljob.perf.fit.scaling import Floats, Runs

MAX_PROBES = 5
"""Measured on several devices before the first plan."""


def next_probe(posterior: Posterior, runs: Runs, measured: Collection[int] = ()) -> int | None:
    """Index of the run to measure, of ``runs``, all of which are to be predicted; None when there is none left.

    It takes off most of the sum of the variances of all logarithms of step times (A-optimal; Chaloner, Verdinelli
    1995): measuring run j takes off cov(i, j)^2 / (var(j) + noise(j)) of run i's. Ask again after each measurement:
    the constants move, and with them what is worth knowing.
    """
    left = [i for i in range(len(runs)) if i not in measured]
    if not left or len(measured) >= MAX_PROBES:
        return None
    told = information(posterior, runs)
    return max(left, key=lambda i: float(told[i]))


def information(posterior: Posterior, runs: Runs) -> Floats:
    """Of the summed variance of the logarithms of all ``runs``' steps, the part that measuring each takes off."""
    covariance, noise = posterior.covariance(runs)
    gain = (covariance**2).sum(axis=0) / (np.diag(covariance) + noise)
    return np.asarray(gain / max(float(np.trace(covariance)), 1e-300))
