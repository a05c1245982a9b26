"""Predict the step at which a metric reaches its target, from the curve of its values so far. No I/O.

Curves of losses and accuracies over steps s are close to a + b·f(s), with a power of s, its logarithm, an exponential
or a hyperbola for f (Domhan et al. 2015 compare such functions). For a given f, a and b follow from linear regression.
Several functions f often fit the values equally well, but predict different steps. The result is therefore an interval
of steps that covers all curves with a good fit. Each of these curves is also fitted five more times, each time without
another fifth of the values, and the interval covers these curves, too. If one of the curves reaches the target too late
or never, there is no forecast.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, log

from dlcontract import TargetForecast, Until

MIN_VALUES = 12
MAX_VALUES = 64
"""Maximum number of values to which curves are fitted. From more values, some are chosen at equal distances."""
MIN_EXPLAINED = 0.8
"""Minimum fraction of the variance of the values that a curve must explain. Other curves are ignored."""
SIMILAR = 1.4
"""Maximum ratio of a curve's residuals (root mean square) to those of the best curve.

The interval of a forecast covers only the curves within this ratio.
"""
FARTHEST = 10.0
"""If a curve may reach the target only after more than this multiple of the steps so far, there is no forecast."""
FOLDS = 5
MARGIN = 0.1
"""Fraction of the steps to the target by which the interval is wider on each side, because no curve is exact."""

Values = Sequence[tuple[float, float]]
Function = Callable[[float], float]


@dataclass(frozen=True)
class Shape:
    """A function f of the step in a curve a + b·f(s), and its inverse.

    ``inverse``: maps a value of f to its step, and returns infinity for a value that f never has.
    """

    f: Function
    inverse: Function


@dataclass(frozen=True)
class Fit:
    """The curve a + b·f(s) that fits values at the steps s. ``rms``: root mean square of its residuals."""

    shape: Shape
    a: float
    b: float
    rms: float

    def at(self, step: float) -> float:
        return self.a + self.b * self.shape.f(step)

    def step_of(self, value: float) -> float:
        """Return the step at which the curve has ``value``; infinity if it never has."""
        return self.shape.inverse((value - self.a) / self.b)


def _power(c: float) -> Shape:
    def inverse(x: float) -> float:
        return x ** (-1 / c) if x > 0 else inf

    return Shape(lambda s: s**-c, inverse)


def _exponential(tau: float) -> Shape:
    def inverse(x: float) -> float:
        return -tau * log(x) if x > 0 else inf

    return Shape(lambda s: exp(-s / tau), inverse)


def _hyperbola(k: float) -> Shape:
    def inverse(x: float) -> float:
        return 1 / x - k if x > 0 else inf

    return Shape(lambda s: 1 / (s + k), inverse)


def _inverse_of_log(x: float) -> float:
    return exp(x) if x < 50 else inf


def _shapes(last: float) -> list[Shape]:
    """Return the functions f of curves a + b·f(s) that are fitted to values. ``last``: the step of the last value."""
    powers = [_power(c) for c in (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.3)]
    parts = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.55, 0.75, 1.0, 1.5, 2.5)
    return [
        *powers,
        Shape(log, _inverse_of_log),
        *(_exponential(last * part) for part in parts),
        *(_hyperbola(last * part) for part in parts),
    ]


def _fitted(values: Values, shape: Shape) -> Fit | None:
    """Fit the curve a + b·f(s) to (step, value) pairs by least squares. ``shape``: the function f.

    Return None if the curve is constant or explains too little of the values' variance (``MIN_EXPLAINED``).
    """
    xs, ys = [shape.f(s) for s, _ in values], [y for _, y in values]
    n = len(values)
    x_mean, y_mean = sum(xs) / n, sum(ys) / n
    sxx, syy = sum((x - x_mean) ** 2 for x in xs), sum((y - y_mean) ** 2 for y in ys)
    sxy = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    if not sxx or not syy or not sxy:
        return None
    b = sxy / sxx
    left = max(0.0, syy - b * sxy)
    if 1 - left / syy < MIN_EXPLAINED:
        return None
    return Fit(shape, y_mean - b * x_mean, b, (left / n) ** 0.5)


def forecast(values: Values, until: Until) -> TargetForecast | None:
    """Return the predicted step at which the metric reaches its target, with an interval of steps, or None.

    ``values``: (step, value) of the metric in the order of the steps. The result is None if there are too few values,
    if no curve fits them and improves, or if a curve that fits reaches the target too late or never.
    """
    target = until.at_least if until.at_least is not None else until.at_most
    values = [(s, y) for s, y in values if s > 0]
    if target is None or len(values) < MIN_VALUES:
        return None
    stride = -(-len(values) // MAX_VALUES)
    values = values[(len(values) - 1) % stride :: stride]
    last = float(values[-1][0])
    fits = [fit for shape in _shapes(last) if (fit := _fitted(values, shape)) is not None]
    best = min(fits, key=lambda fit: fit.rms, default=None)
    if best is None or not until.better(best.at(last), best.at(values[0][0])):
        return None
    found = [best.step_of(target)]
    harder = best.rms if until.at_least is not None else -best.rms
    for fit in fits:
        if fit.rms > SIMILAR * best.rms:
            continue
        # A single value exceeds its curve by chance, so the target is reached between these two steps.
        found += [fit.step_of(target - harder), fit.step_of(target + harder)]
        parts = [[v for i, v in enumerate(values) if i % FOLDS != fold] for fold in range(FOLDS)]
        found += [inf if (other := _fitted(part, fit.shape)) is None else other.step_of(target) for part in parts]
    if max(found) > FARTHEST * last:
        return None
    margin = MARGIN * max(0.0, found[0] - last)
    low, middle, high = (max(last, step) for step in (min(found) - margin, found[0], max(found) + margin))
    return TargetForecast(step=round(middle), earliest_step=round(low), latest_step=round(high))
