"""Task: predict the times of one left-out device type from the other types, without probes and with two.

With at least four batch sizes of a workload on the device, the two probes are the second smallest and the second
largest; with three, the smallest and the largest. If no workload has three batch sizes, the probes are the two most
informative rows. Every pair of rows is scored too, because a single choice of two depends on luck.
"""

from collections.abc import Mapping
from itertools import combinations

import numpy as np
from benchmarks.perfmodel.models.probes import next_probe, with_probes
from benchmarks.perfmodel.scoring.compare import compared
from benchmarks.perfmodel.scoring.scoring import Floats, ape
from benchmarks.perfmodel.scoring.table import Options, Table

from dljob.perf.fit.few_points import line
from dljob.perf.fit.new_device import Point, Sheet, seconds

Rows = Mapping[tuple[str, str, int], float]
"""(device, workload, batch) → seconds."""
Times = dict[Point, float]


def tables(sheets: Mapping[str, Sheet], rows: Rows, options: Options, note: str = "") -> list[Table]:
    """Return two tables with devices as groups, or none for fewer than three device types."""
    points = {Point(d, w, float(b)): s for (d, w, b), s in rows.items() if d in sheets}
    devices = sorted({p.device for p in points})
    if len(devices) < 3:
        return []
    without: dict[str, dict[str, Floats]] = {"model": {}, "peak-FLOP ratio": {}, "bandwidth ratio": {}}
    probed: dict[str, dict[str, Floats]] = {"model": {}, "model, every pair": {}, "line or ratio": {}}
    for device in devices:
        others = {p: s for p, s in points.items() if p.device != device}
        shared = {(p.workload, p.batch) for p in others}
        own = {p: s for p, s in points.items() if p.device == device and (p.workload, p.batch) in shared}
        if not own:
            continue
        queried, measured = list(own), np.array(list(own.values()))
        without["model"][device] = ape(measured, seconds(sheets, others, queried))
        for name, ratio in (("peak-FLOP ratio", _peak_ratio), ("bandwidth ratio", _bandwidth_ratio)):
            without[name][device] = ape(measured, np.array([ratio(sheets, others, p) for p in queried]))
        for name, errors in _with_two(sheets, others, own).items():
            probed[name][device] = errors
    found = [compared("A device type left out, no probe on it", without, options, note)]
    if probed["model"]:
        drawn = {name: errors for name, errors in probed.items() if errors}
        found.append(compared("A device type left out, two probe batches on it", drawn, options, note))
    return found


def _peak_ratio(sheets: Mapping[str, Sheet], others: Times, queried: Point) -> float:
    return _ratio({d: s.peak_FLOPs for d, s in sheets.items()}, others, queried)


def _bandwidth_ratio(sheets: Mapping[str, Sheet], others: Times, queried: Point) -> float:
    return _ratio({d: s.bandwidth_Bps for d, s in sheets.items()}, others, queried)


def _ratio(speeds: Mapping[str, float], others: Times, queried: Point) -> float:
    """Return the geometric mean over the other devices of the same row's time times the ratio of speeds."""
    same = [(p, s) for p, s in others.items() if (p.workload, p.batch) == (queried.workload, queried.batch)]
    return float(np.exp(np.mean([np.log(s * speeds[p.device] / speeds[queried.device]) for p, s in same])))


def curves_of(own: Times) -> list[list[Point]]:
    """Return the points of each workload with at least three batch sizes, in the order of their batches."""
    by_workload: dict[str, list[Point]] = {}
    for point in sorted(own, key=lambda p: p.batch):
        by_workload.setdefault(point.workload, []).append(point)
    return [points for points in by_workload.values() if len(points) >= 3]


def two_of(curve: list[Point]) -> tuple[Point, ...]:
    """Return the two probes of a curve."""
    return (curve[1], curve[-2]) if len(curve) >= 4 else (curve[0], curve[-1])


def _with_two(sheets: Mapping[str, Sheet], others: Times, own: Times) -> dict[str, Floats]:
    """Return the errors on the rows that were not probed, by method."""
    curves = curves_of(own)
    if curves:
        draws: list[tuple[list[Point], tuple[Point, ...]]] = [(ps, two_of(ps)) for ps in curves]
    else:
        draws = [(list(own), _informative(sheets, others, list(own)))] if len(own) >= 3 else []
    model, simple = [], []
    for points, chosen in draws:
        probes, rest = {p: own[p] for p in chosen}, [p for p in points if p not in chosen]
        measured = np.array([own[p] for p in rest])
        model.append(ape(measured, with_probes(sheets, others, probes, rest)))
        simple.append(ape(measured, _simple(sheets, others, probes, rest, bool(curves))))
    every = [] if curves or not draws else _every_pair(sheets, others, own)
    errors = {"model": model, "model, every pair": every, "line or ratio": simple}
    return {name: np.concatenate(e) for name, e in errors.items() if e}


def _every_pair(sheets: Mapping[str, Sheet], others: Times, own: Times) -> list[Floats]:
    found = []
    for pair in combinations(own, 2):
        rest = [p for p in own if p not in pair]
        predicted = with_probes(sheets, others, {p: own[p] for p in pair}, rest)
        found.append(ape(np.array([own[p] for p in rest]), predicted))
    return found


def _informative(sheets: Mapping[str, Sheet], others: Times, own: list[Point]) -> tuple[Point, ...]:
    first = next_probe(sheets, list(others), own)
    return first, next_probe(sheets, [*others, first], [p for p in own if p != first])


def _simple(sheets: Mapping[str, Sheet], others: Times, probes: Times, rest: list[Point], is_curve: bool) -> Floats:
    """Predict with a line through the two batch sizes, or with the peak-FLOP ratio scaled to the probes."""
    if is_curve:
        overhead, slope = line(np.array([p.batch for p in probes]), np.array(list(probes.values())))
        return np.array([overhead + slope * p.batch for p in rest])
    scale = np.exp(np.mean([np.log(s / _peak_ratio(sheets, others, p)) for p, s in probes.items()]))
    return np.array([scale * _peak_ratio(sheets, others, p) for p in rest])
