"""Scores of predictions for all formats: errors, bootstrap, decision regret, intervals.

Arrays of one task have one element per scored key: ``measured`` and ``predicted`` in the same unit, above 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Measure = Callable[[Floats], float]
"""A figure of an array of errors, such as its median."""


@dataclass(frozen=True)
class Estimate:
    """A figure and its bootstrap 95 % interval."""

    value: float
    low: float
    high: float


def ape(measured: Floats, predicted: Floats) -> Floats:
    """Return the absolute percentage errors: 100 |predicted - measured| / measured."""
    return np.asarray(100.0 * np.abs(predicted - measured) / measured)


def mean(errors: Floats) -> float:
    return float(np.mean(errors))


def median(errors: Floats) -> float:
    return float(np.median(errors))


def p90(errors: Floats) -> float:
    return float(np.percentile(errors, 90))


def over_workloads(errors: Sequence[Floats], measure: Measure, resamples: int = 1000, seed: int = 0) -> Estimate:
    """Return the unweighted mean of ``measure`` over workloads; ``errors`` has one array per workload.

    The interval is a stratified percentile bootstrap (Efron 1979): keys are resampled within each workload.
    """
    if not errors or any(len(e) == 0 for e in errors):
        raise ValueError("found a workload without errors to score; expected at least one scored key in each")
    rng = np.random.default_rng(seed)
    value = float(np.mean([measure(e) for e in errors]))
    again = np.array(
        [np.mean([measure(e[rng.integers(len(e), size=len(e))]) for e in errors]) for _ in range(resamples)]
    )
    low, high = np.percentile(again, [2.5, 97.5]) if resamples else (value, value)
    return Estimate(value, float(low), float(high))


def regret(measured: Floats, predicted: Floats, choices: Sequence[NDArray[np.int64]]) -> Floats:
    """Return for each decision by how many per cent the chosen candidate is slower than the best measured one.

    Each of ``choices`` has the indices of the candidates of one decision; the smallest prediction is chosen.
    """
    found = [measured[c][np.argmin(predicted[c])] / measured[c].min() - 1.0 for c in choices if len(c) > 1]
    return np.asarray([100.0 * f for f in found])


def coverage(measured: Floats, low: Floats, high: Floats) -> float:
    """Return the percentage of measurements inside their intervals."""
    return float(100.0 * np.mean((low <= measured) & (measured <= high)))


def interval_score(measured: Floats, low: Floats, high: Floats, level: float = 0.9) -> Floats:
    """Return Winkler's score of central intervals of ``level`` (Gneiting, Raftery 2007) in logarithms; lower is better.

    It is the width plus 2 / (1 - level) times the distance by which a measurement lies outside. Logarithms make it
    relative, so that keys of 10 ms and of 10 s have the same weight.
    """
    x, lo, hi = np.log(measured), np.log(low), np.log(high)
    outside = np.maximum(lo - x, 0.0) + np.maximum(x - hi, 0.0)
    return np.asarray(hi - lo + 2.0 / (1.0 - level) * outside)
