"""Robust least squares with nonnegative coefficients, for predictors that only benchmarks compare."""

import numpy as np

from dljob.perf.fit.fitting import Floats


def positive_fit(
    terms: Floats, seconds: Floats, ridge: float = 1e-3, tolerance: float = 0.15, rounds: int = 6, sweeps: int = 200
) -> Floats:
    """Return nonnegative coefficients c so that ``terms @ c`` predicts ``seconds`` with small relative errors.

    The fit is robust against outliers. ``seconds``: one measured time per row. ``terms``: shape (rows, terms); a
    coefficient times its term is a part of the predicted time. Coordinate descent minimizes the mean squared relative
    error, with Huber weights where log(predicted / measured) is beyond ±``tolerance`` (Huber 1964). Each squared
    relative error is divided by predicted / measured, so that it nearly equals the squared error of the logarithm.
    ``ridge``: weight of a penalty on the squared coefficients, after each term is scaled to a root mean square of 1. If
    the rows cannot tell two terms apart, the penalty divides the effect between them. ``rounds``: how often the weights
    are computed anew. ``sweeps``: passes over all coefficients in each round.
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
