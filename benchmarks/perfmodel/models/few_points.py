"""A device's curve from a few measured batches alone, for published measurements of workloads that have no model.

Plans interpolate in the same way (``dljob.perf.fit.few_points``), but know the shape of the curve outside the measured
batches from their model of the workload (``dljob.perf.step.compute.calibrated``).
"""

from collections.abc import Sequence

import numpy as np

from dljob.perf.fit.curve import Curve
from dljob.perf.fit.few_points import KNOTS, line, seconds_between
from dljob.perf.fit.fitting import agreeing


def through(points: Sequence[tuple[float, float]]) -> Curve:
    """Return a device's curve from measured (batch, seconds) points.

    Points that contradict most others are dropped, and the times of equal batches are averaged in the logarithm. Below
    the smallest batch, the curve has the shape of the line that fits the points best. Beyond the largest batch B, its
    slope is the mean slope between B / 2 and B, limited to between 0.1 and 1 times the slope of the line from the
    origin to the last point. With a single measured batch, half of its time is assumed to be overhead. Raise ValueError
    without points, or if a batch or a time is not finite and above 0.
    """
    for batch, seconds in points:
        if not (0 < batch < np.inf and 0 < seconds < np.inf):
            raise ValueError(
                f"points: found batch {batch:g} in {seconds:g} s; expected a finite batch and time above 0. "
                "Leave out this point"
            )
    if not points:
        raise ValueError("points: found none; expected at least one measured (batch, seconds) point")
    votes = agreeing(points)
    by_batch: dict[float, list[float]] = {}
    for (batch, seconds), kept in zip(points, votes, strict=True):
        if kept or not any(votes):
            by_batch.setdefault(float(batch), []).append(float(np.log(seconds)))
    merged = [(b, float(np.exp(np.mean(by_batch[b])))) for b in sorted(by_batch)]
    x = np.array([b for b, _ in merged])
    if len(x) == 1:
        return Curve((0.0, x[0]), (merged[0][1] / 2, merged[0][1]), merged[0][1] / x[0] / 2)
    at = np.unique(np.concatenate([x, np.geomspace(x[0], x[-1], KNOTS)]))
    at = at[np.concatenate([[True], np.diff(at) > 1e-9 * at[1:]])]
    times = seconds_between(merged, at)
    # Trust a dip rather than the point before it, which may include warm-up.
    times = np.minimum.accumulate(times[::-1])[::-1]
    half = int(np.searchsorted(at, at[-1] / 2))
    steepest = times[-1] / at[-1]
    slope = float((times[-1] - times[half]) / (at[-1] - at[half])) if at[-1] > at[half] else steepest
    overhead, per_sample = line(x, np.array([t for _, t in merged]))
    first = float(times[0] * overhead / (overhead + per_sample * at[0]))
    return Curve(
        (0.0, *at.tolist()),
        (float(np.clip(first, 1e-3 * times[0], times[0])), *times.tolist()),
        float(np.clip(slope, 0.1 * steepest, steepest)),
    )
