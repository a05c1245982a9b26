"""Numerical functions for fits, in pure numpy: outlier checks, Gaussian processes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def usable(seconds: Sequence[float] | Floats) -> NDArray[np.bool_]:
    """Return a mask that is True where a time is finite and above 0."""
    t = np.asarray(seconds, dtype=float)
    return np.asarray(np.isfinite(t) & (t > 0))


def checked(name: str, values: Sequence[float] | Floats) -> Floats:
    """Return ``values`` as an array. Raise ValueError if it is empty or if a value is not finite and above 0.

    ``name``: name of the values in the error message.
    """
    array = np.asarray(values, dtype=float)
    bad = ~usable(array)
    if array.size == 0 or bad.any():
        found = "none" if array.size == 0 else f"{array[bad].flat[0]:g} at position {int(np.argmax(bad))}"
        raise ValueError(f"{name}: found {found}; expected finite numbers above 0. Leave out invalid values")
    return array


OUTLIER = 5.0
"""Factor of tolerance in the check whether the measured times of two batches on one device are plausible together.

``agreeing`` applies it."""


def agreeing(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return a list with True for each (batch, seconds) point that agrees with at least half of the other points.

    The others are outliers. All points must be from one device. Two points agree if, within a factor ``OUTLIER``, the
    larger batch took at least as long as the smaller one and at most as long per sample. Fewer than three points always
    agree.
    """
    if len(points) < 3:
        return [True] * len(points)
    votes = [sum(_agree(a, b) for b in points) - 1 for a in points]
    return [2 * v >= len(points) - 1 for v in votes]


def _agree(a: tuple[float, float], b: tuple[float, float]) -> bool:
    (small, small_s), (large, large_s) = sorted((a, b))
    return 1 / OUTLIER <= large_s / small_s <= OUTLIER * large / small


def radial(a: Floats, b: Floats, amplitude: float, length: float) -> Floats:
    """Return the squared-exponential covariance of the points ``a`` with the points ``b``, shape (len(a), len(b)).

    Each row of ``a`` and ``b`` (or each element, if one-dimensional) is a point. ``amplitude``: standard deviation.
    ``length``: length scale. The formula is in Rasmussen, Williams 2006.
    """
    u, v = (np.asarray(x, dtype=float).reshape(len(x), -1) for x in (a, b))
    squares = ((u[:, None, :] - v[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(amplitude**2 * np.exp(-0.5 * squares / length**2))


def posterior(known: Floats, cross: Floats, residuals: Floats, noise: float) -> Floats:
    """Return the posterior mean of a zero-mean Gaussian process at m points: cross (known + noise² I)⁻¹ residuals.

    ``known``: covariance of the k observations, shape (k, k). ``cross``: covariance of the m points with the
    observations, shape (m, k). ``residuals``: observations minus their prior means, shape (k,). ``noise``: standard
    deviation of an observation.
    """
    return np.asarray(cross @ np.linalg.solve(known + noise**2 * np.eye(len(residuals)), residuals))
