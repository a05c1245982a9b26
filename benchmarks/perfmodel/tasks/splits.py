"""Task: split a global batch over heterogeneous devices whose curves are fitted to three batch sizes.

The ground truth is the measured times over the batch size with linear interpolation. The split is planned on curves
fitted to three batch sizes per device, timed on the ground truth, and compared with the best of all splits. Global
batch sizes range from the sum of the smallest measured batch sizes to the sum of the largest, so that the ground truth
is never extrapolated.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from benchmarks.perfmodel.models.few_points import through
from benchmarks.perfmodel.scoring.compare import compared
from benchmarks.perfmodel.scoring.scoring import Floats
from benchmarks.perfmodel.scoring.table import Options, Table
from benchmarks.perfmodel.tasks import one_device

from dljob.perf.fit.curve import Curve, nondecreasing
from dljob.perf.fit.few_points import line
from dljob.planner.candidates.batch_split import Kind, split

SIZES = 12
"""Number of global batch sizes per set of devices, log-spaced."""
MAX_DEVICES = 3
"""Maximum size of a set of devices; the number of sets grows exponentially with it."""
Shares = Sequence[int]


def tables(curves: one_device.Curves, options: Options) -> list[Table]:
    """Score every set of two or three devices of each workload; each workload is a group."""
    over: dict[str, dict[str, list[float]]] = {"model": {}, "affine": {}, "in proportion to speed": {}, "even": {}}
    for workload in sorted({w for _, w in curves}):
        measured = {d: c for (d, w), c in curves.items() if w == workload and len(c) >= 4}
        for count in range(2, min(MAX_DEVICES, len(measured)) + 1):
            for devices in combinations(sorted(measured), count):
                for name, excess in _excess([measured[d] for d in devices]).items():
                    over[name].setdefault(workload, []).extend(excess)
    found = {name: {w: np.array(e) for w, e in groups.items()} for name, groups in over.items()}
    if not found["model"]:
        return []
    return [compared("Uneven split from three batches a device: time over the exhaustive optimum", found, options)]


def _excess(measured: Sequence[Mapping[int, float]]) -> dict[str, list[float]]:
    """Return the per cent over the optimum for each global batch size, by method."""
    truths = [_truth(m) for m in measured]
    given = [[(float(b), m[b]) for b in one_device.probes(list(m))] for m in measured]
    lows, highs = [min(m) for m in measured], [max(m) for m in measured]
    planned = {"model": [through(g) for g in given], "affine": [_affine(g) for g in given]}
    sizes = np.unique(np.geomspace(sum(lows), sum(highs), SIZES).round().astype(int))
    found: dict[str, list[float]] = {}
    for size in sizes.tolist():
        best = optimum(truths, lows, highs, size)
        middles = [through(g).seconds(g[1][0]) / g[1][0] for g in given]
        shares = {name: _planned(curves, lows, highs, size) for name, curves in planned.items()}
        shares["in proportion to speed"] = _within([1 / m for m in middles], lows, highs, size)
        shares["even"] = _within([1.0] * len(measured), lows, highs, size)
        for name, share in shares.items():
            took = max(t.seconds(b) for t, b in zip(truths, share, strict=True))
            found.setdefault(name, []).append(100 * (took / best - 1))
    return found


def _truth(measured: Mapping[int, float]) -> Curve:
    batches = sorted(measured)
    times = nondecreasing([measured[b] for b in batches], [1.0] * len(batches))
    return Curve(tuple(map(float, batches)), tuple(times), times[-1] / batches[-1])


def _affine(given: list[tuple[float, float]]) -> Curve:
    overhead, slope = line(*(np.array(column) for column in zip(*given, strict=True)))
    least = 1e-9 * given[-1][1]
    return Curve((0.0,), (max(overhead, least),), max(slope, least))


def _planned(curves: Sequence[Curve], lows: Shares, highs: Shares, size: int) -> Shares:
    """Return the planner's split. No share is below a device's smallest measured batch size."""
    kinds = [Kind(_from(c, low), 1, high - low + 1) for c, low, high in zip(curves, lows, highs, strict=True)]
    parts = split(kinds, size - sum(lows) + len(lows))
    assert parts is not None, "expected a size between the sums of the smallest and the largest batch sizes"
    return [low - 1 + part[0] for low, part in zip(lows, parts, strict=True)]


def _from(curve: Curve, low: int) -> Curve:
    """Return the curve as a function of the samples above ``low`` - 1."""
    knots = [(b - (low - 1), t) for b, t in zip(curve.batches, curve.times_s, strict=True) if b > low]
    knots = [(1.0, curve.seconds(low)), *knots]
    return Curve(tuple(b for b, _ in knots), tuple(t for _, t in knots), curve.slope_s)


def _within(speeds: Sequence[float], lows: Shares, highs: Shares, size: int) -> Shares:
    """Return shares in proportion to speed within the bounds; the remainder is distributed one by one."""
    shares = [int(np.clip(size * s / sum(speeds), low, high)) for s, low, high in zip(speeds, lows, highs, strict=True)]
    while (missing := size - sum(shares)) != 0:
        step = 1 if missing > 0 else -1
        room = [i for i, (b, lo, hi) in enumerate(zip(shares, lows, highs, strict=True)) if lo <= b + step <= hi]
        for i in room[: abs(missing)]:
            shares[i] += step
    return shares


def optimum(truths: Sequence[Curve], lows: Shares, highs: Shares, size: int) -> float:
    """Return the minimum over all splits of ``size`` of the slowest device's time, by dynamic programming.

    After the first k devices, ``best[n]`` is the minimum time over all ways to split n samples among them.
    """
    best: Floats = np.array([0.0])
    for truth, low, high in zip(truths, lows, highs, strict=True):
        times = truth.seconds_array(np.arange(low, high + 1, dtype=float))
        longer = np.full(min(len(best) + high, size + 1), np.inf)
        for n in np.flatnonzero(np.isfinite(best)).tolist():
            reach = min(high, len(longer) - 1 - int(n))
            if reach >= low:
                part = slice(n + low, n + reach + 1)
                longer[part] = np.minimum(longer[part], np.maximum(best[n], times[: reach - low + 1]))
        best = longer
    return float(best[size])
