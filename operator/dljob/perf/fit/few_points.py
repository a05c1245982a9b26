"""Interpolation of a device's step time over the batch, from a few measured batches.

The result is the lower of two interpolations, made nondecreasing. The first consists of chords: straight lines between
neighbouring points. The time over the batch is usually convex (first overhead, then a steady rate), and chords bound a
convex curve from above. The second is a Gaussian process on log(time / line). The line, overhead plus seconds per
sample, is the one that fits the points best. The Gaussian process bends smoothly where utilisation grows with the
batch. Convexity is not imposed, because measured curves also bend where memory runs short.
"""

from collections.abc import Sequence

import numpy as np

from dljob.perf.fit.curve import nondecreasing
from dljob.perf.fit.fitting import Floats, posterior, radial

AMPLITUDE = 0.6
"""Standard deviation of log(time / line), where the line is the one that fits the measured points best.

``AMPLITUDE``, ``LENGTH`` and ``REPEAT_NOISE`` were chosen by leave-one-out validation on public measurements: Pollux'
cifar10, bert and yolov3, and Gavel's k80 and p100. While ``AMPLITUDE`` is in 0.3 to 1.2, ``LENGTH`` in 1.5 to 4 and
``REPEAT_NOISE`` in 0.02 to 0.1, the error changes by less than half a percentage point."""
LENGTH = 2.5
"""Length scale of the Gaussian process: distance in log(batch) over which deviations from the line remain similar."""
REPEAT_NOISE = 0.05
"""Standard deviation of log(time) in repeated measurements."""
KNOTS = 33
DENSE = 8
"""Maximum number of points through which ``knots_through`` draws a smooth curve.

Straight lines connect the points if there are more, because each line is then short enough."""


def line(batches: Floats, times_s: Floats) -> tuple[float, float]:
    """Return (overhead, seconds per sample) of the line with the least squared relative errors; both are at least 0."""
    columns = np.stack([np.ones_like(batches), batches], axis=1) / times_s[:, None]
    a, c = np.linalg.lstsq(columns, np.ones_like(times_s), rcond=None)[0] if len(batches) > 1 else (0.0, -1.0)
    if a >= 0 and c > 0:
        return float(a), float(c)
    # Otherwise return the better of two lines: one with overhead only, and one with seconds per sample only.
    ones = [1.0 / times_s, batches / times_s]
    fits = [float(x.sum() / (x @ x)) for x in ones]
    misses = [float(((f * x - 1) ** 2).sum()) for f, x in zip(fits, ones, strict=True)]
    return (fits[0], 0.0) if misses[0] < misses[1] else (0.0, fits[1])


def seconds_between(points: Sequence[tuple[float, float]], batches: Floats) -> Floats:
    """Return the interpolated step seconds at ``batches``, which must lie in the range of the measured batches.

    ``points``: measured (batch, seconds) pairs, all positive, in the order of their batches.
    """
    x, measured = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    times = np.exp(np.array(nondecreasing(np.log(measured), [1.0] * len(measured))))
    chords = np.interp(batches, x, times)
    if len(x) < 3:
        return np.asarray(chords)
    overhead, slope = line(x, times)

    def mean(b: Floats) -> Floats:
        return np.asarray(np.log(overhead + slope * b))

    known = radial(np.log(x), np.log(x), AMPLITUDE, LENGTH)

    def smooth(b: Floats) -> Floats:
        cross = radial(np.log(b), np.log(x), AMPLITUDE, LENGTH)
        return np.asarray(np.exp(mean(b) + posterior(known, cross, np.log(times) - mean(x), REPEAT_NOISE)))

    # Two points that are close and differ by noise make the process swing far below both on their way to a third one.
    at_points = np.minimum(times, smooth(x))
    after = np.clip(np.searchsorted(x, batches), 1, len(x) - 1)
    floor = np.minimum(at_points[after - 1], at_points[after])
    return np.asarray(np.maximum(np.minimum(chords, smooth(batches)), floor))


def knots_through(batches: Sequence[float], times_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return the (batch, seconds) knots of a curve that passes exactly through the points (``batches``, ``times_s``).

    Batches must be strictly increasing, and times must not decrease. With 3 to ``DENSE`` points, more knots between the
    points make the curve smooth. With fewer or more points, the knots are the points themselves.
    """
    points = list(zip(map(float, batches), times_s, strict=True))
    if not 3 <= len(points) <= DENSE:
        return points
    x, times = np.array(batches, dtype=float), np.array(times_s)
    inner = np.geomspace(x[0], x[-1], KNOTS)[1:-1]
    inner = inner[np.abs(np.log(inner[:, None] / x[None, :])).min(axis=1) > 1e-6]
    # The smooth curve misses the points because of the noise term. Interpolate that error between the points.
    missed = np.log(times / seconds_between(points, x))
    smooth = seconds_between(points, inner) * np.exp(np.interp(np.log(inner), np.log(x), missed))
    after = np.searchsorted(x, inner)
    held = np.clip(smooth, times[after - 1], np.interp(inner, x, times))
    knots = sorted([*points, *zip(inner.tolist(), held.tolist(), strict=True)])
    rising = np.maximum.accumulate([t for _, t in knots]).tolist()
    return [(b, t) for (b, _), t in zip(knots, rising, strict=True)]
