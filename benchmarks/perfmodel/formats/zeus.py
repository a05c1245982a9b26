"""Format ``zeus``: seconds and watts of an epoch by power limit. Files ``summary_power_*.csv`` below the directory.

Columns ``dataset,network,batch_size,optimizer,power_limit,time_per_epoch,average_power``. The model sees the lowest and
the highest limit of every (dataset, network, batch size, optimizer); the energy of an epoch at the others is scored.

If the catalogue has the device of a file's name (``summary_power_v100.csv``), two more tables score what plans use for
a job that was never measured under a limit: time and energy under each limit, divided by those under the highest, of a
typical job, and of a job of which a run without a limit has measured the power.
"""

import csv
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from benchmarks.perfmodel.scoring.compare import compared, dropped
from benchmarks.perfmodel.scoring.scoring import Floats, ape
from benchmarks.perfmodel.scoring.table import Options, Table

from dljob.cluster import catalogue
from dljob.perf.resources.power import LimitPoint, under_limit, under_limits

Job = tuple[str, ...]


def run(directory: Path, options: Options) -> list[Table]:
    """Return one table per file; each file has the measurements of a device."""
    files = sorted(directory.rglob("summary_power_*.csv"))
    if not files:
        raise ValueError(f"{directory}: no summary_power_*.csv; expected Zeus' power tables")
    wanted = [path for path in files if options.wants(_device(path))]
    return [table for path in wanted for table in (_scored(path, options), *_typical(path, options))]


def _device(path: Path) -> str:
    return path.stem.removeprefix("summary_power_")


def model(low: LimitPoint, high: LimitPoint, limits_W: Floats) -> Floats:
    seconds, power = under_limits(low, high, limits_W)
    return seconds * power


def linear(low: LimitPoint, high: LimitPoint, limits_W: Floats) -> Floats:
    """Interpolate the energy linearly."""
    ends = (low.limit_W, high.limit_W), (low.seconds * low.power_W, high.seconds * high.power_W)
    return np.asarray(np.interp(limits_W, *ends))


def two_lines(low: LimitPoint, high: LimitPoint, limits_W: Floats) -> Floats:
    """Interpolate time and power linearly."""
    limits = (low.limit_W, high.limit_W)
    seconds = np.interp(limits_W, limits, (low.seconds, high.seconds))
    return np.asarray(seconds * np.interp(limits_W, limits, (low.power_W, high.power_W)))


def limit_is_power(low: LimitPoint, high: LimitPoint, limits_W: Floats) -> Floats:
    return np.asarray(limits_W * np.interp(limits_W, (low.limit_W, high.limit_W), (low.seconds, high.seconds)))


METHODS: dict[str, Callable[[LimitPoint, LimitPoint, Floats], Floats]] = {
    "model": model,
    "energy on a line": linear,
    "time and power on lines": two_lines,
    "power = limit": limit_is_power,
}


def _scored(path: Path, options: Options) -> Table:
    jobs, complaints = load(path)
    errors: dict[str, dict[str, list[Floats]]] = {name: defaultdict(list) for name in METHODS}
    for job, points in jobs.items():
        if len(points) < 3:
            continue
        low, *middle, high = points
        limits = np.array([p.limit_W for p in middle])
        measured = np.array([p.seconds * p.power_W for p in middle])
        for name, method in METHODS.items():
            errors[name][" ".join(job[:2])].append(ape(measured, method(low, high, limits)))
    merged = {name: {g: np.concatenate(e) for g, e in groups.items()} for name, groups in errors.items()}
    title = f"{_device(path)}: energy of an epoch from the lowest and highest power limit"
    return compared(title, merged, options, dropped(complaints))


def _typical(path: Path, options: Options) -> list[Table]:
    """Return the tables of time and energy under limits for a job of which nothing was measured.

    The data sheet of the catalogue has the peak power of another form of the device (SXM2), so the highest limit of the
    file replaces it.
    """
    sheet, (jobs, complaints) = catalogue.gpu(_device(path)), load(path)
    if sheet is None or not jobs:
        return []
    peak_W = max(points[-1].limit_W for points in jobs.values())
    sheet = replace(sheet, peak_power_W=peak_W)
    errors: dict[str, dict[str, dict[str, list[Floats]]]] = {
        name: {method: defaultdict(list) for method in ("typical job", "power known", "no effect")}
        for name in ("time", "energy")
    }
    for job, points in jobs.items():
        *lower, high = points
        if not lower or high.limit_W < peak_W:
            continue
        network = " ".join(job[:2])
        predicted = {
            "typical job": [under_limit(replace(sheet, power_limit_W=p.limit_W)) for p in points],
            "power known": [under_limit(replace(sheet, power_limit_W=p.limit_W), high.power_W) for p in points],
            "no effect": [high for _ in points],
        }
        for name, of in (("time", _seconds), ("energy", _joules)):
            measured = np.array([of(point) / of(high) for point in lower])
            for method, found in predicted.items():
                ratios = np.array([of(point) / of(found[-1]) for point in found[:-1]])
                errors[name][method][network].append(ape(measured, ratios))
    return [
        compared(
            f"{_device(path)}: {name} under limits relative to the highest, without measurements",
            {method: {g: np.concatenate(e) for g, e in groups.items()} for method, groups in methods.items()},
            options,
            dropped(complaints),
        )
        for name, methods in errors.items()
    ]


def _seconds(point: LimitPoint) -> float:
    return point.seconds


def _joules(point: LimitPoint) -> float:
    return point.seconds * point.power_W


def load(path: Path) -> tuple[dict[Job, list[LimitPoint]], list[str]]:
    """Read the points by job with rising limits. Also return the errors of skipped rows."""
    jobs: dict[Job, dict[float, LimitPoint]] = defaultdict(dict)
    complaints = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        columns = ("dataset", "network", "batch_size", "optimizer", "power_limit", "time_per_epoch", "average_power")
        if missing := [c for c in columns if c not in (reader.fieldnames or ())]:
            raise ValueError(f"{path}: no column {', '.join(missing)}; expected {', '.join(columns)}")
        for number, row in enumerate(reader, start=2):
            try:
                point = LimitPoint(*(float(row[c]) for c in columns[4:]))
            except (ValueError, TypeError) as e:
                complaints.append(f"{path.name} line {number}: {e}")
                continue
            jobs[tuple(row[c] for c in columns[:4])][point.limit_W] = point
    return {job: [points[limit] for limit in sorted(points)] for job, points in jobs.items()}, complaints
