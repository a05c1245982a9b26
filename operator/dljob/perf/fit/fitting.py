"""Small numerical tools of the model's fits: measurements screened, positive least squares, Gaussian processes.

Pure numpy.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def usable(seconds: Sequence[float] | Floats) -> NDArray[np.bool_]:
    """Which of the times can be measurements at all: finite and above 0."""
    t = np.asarray(seconds, dtype=float)
    return np.asarray(np.isfinite(t) & (t > 0))


def checked(name: str, values: Sequence[float] | Floats) -> Floats:
    """The values as an array. Raises ValueError naming the first that is not finite and above 0."""
    array = np.asarray(values, dtype=float)
    bad = ~usable(array)
    if array.size == 0 or bad.any():
        found = "none" if array.size == 0 else f"{array[bad].flat[0]:g} at position {int(np.argmax(bad))}"
        raise ValueError(f"{name}: found {found}, expected finite numbers above 0; drop what was not measured")
    return array


OUTLIER = 5.0
"""By what factor times of two batches may contradict each other and still be measurements of one device."""


def agreeing(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which (batch, seconds) points of one device agree with at least half of the others.

    Two agree when the larger batch took between as long and as long per sample, give or take a factor ``OUTLIER``. Two
    points alone cannot outvote each other, and agree here.
    """
    if len(points) < 3:
        return [True] * len(points)
    votes = [sum(_agree(a, b) for b in points) - 1 for a in points]
    return [2 * v >= len(points) - 1 for v in votes]


def _agree(a: tuple[float, float], b: tuple[float, float]) -> bool:
    (small, small_s), (large, large_s) = sorted((a, b))
    return 1 / OUTLIER <= large_s / small_s <= OUTLIER * large / small


def radial(a: Floats, b: Floats, amplitude: float, length: float) -> Floats:
    """Squared-exponential covariance of points; rows are points, a vector is one feature (Rasmussen, Williams 2006)."""
    u, v = (np.asarray(x, dtype=float).reshape(len(x), -1) for x in (a, b))
    squares = ((u[:, None, :] - v[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(amplitude**2 * np.exp(-0.5 * squares / length**2))


def posterior(known: Floats, cross: Floats, residuals: Floats, noise: float) -> Floats:
    """Mean of a zero-mean Gaussian process: ``cross`` (known + noise² I)⁻¹ residuals.

    ``known``: covariance of the k observations; ``cross``: of m asked points with them, (m, k).
    """
    return np.asarray(cross @ np.linalg.solve(known + noise**2 * np.eye(len(residuals)), residuals))


def positive_fit(
    terms: Floats, seconds: Floats, ridge: float = 1e-3, tolerance: float = 0.15, rounds: int = 6, sweeps: int = 200
) -> Floats:
    """Coefficients c of 0 or more so that ``terms @ c`` is near ``seconds``, relatively and robustly.

    ``terms``: (rows, terms), each what one effect would cost per unit of its coefficient. Minimises the mean squared
    relative error with Huber weights beyond ``tolerance`` (Huber 1964) by coordinate descent; an overestimate's
    relative error is divided by the ratio, which makes it nearly the error of the logarithm. ``ridge`` is on terms
    scaled to unit root mean square, so that a term that no row tells apart from another shares with it.
    """
    scaled = terms / seconds[:, None]
    size = np.sqrt((scaled**2).mean(axis=0))
    size[size < 1e-200] = 1.0
    scaled = scaled / size
    rows, count = scaled.shape
    found, weights = np.full(count, 1.0 / count), np.ones(rows)
    for _ in range(rounds):
        gram = (scaled * weights[:, None]).T @ scaled / rows + ridge * np.eye(count)
        target = (scaled * weights[:, None]).sum(axis=0) / rows
        for _ in range(sweeps):
            for j in range(count):
                found[j] = max(0.0, found[j] + (target[j] - gram[j] @ found) / gram[j, j])
        ratio = np.maximum(scaled @ found, 1e-9)
        off = np.abs(np.log(ratio))
        weights = np.minimum(1.0, tolerance / np.maximum(off, 1e-9)) / np.maximum(ratio, 0.2)
    return np.asarray(found / size)
