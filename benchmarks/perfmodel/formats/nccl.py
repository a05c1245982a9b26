"""Format ``nccl``: all-reduce times over the message size, by ranks of one node. Folders of files ``AR_GPU<n>…``.

Each file is CSV with bytes in the first column and nanoseconds in the fourth (out of place). The model sees two sizes,
and the others are scored. In the second table it sees only the smallest and the largest n, and those between are
scored.
"""

import csv
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
from benchmarks.perfmodel.models.pipelined import LARGE_PART, SMALL_PART, AllReduce, between, from_two_sizes
from benchmarks.perfmodel.scoring.compare import compared, dropped
from benchmarks.perfmodel.scoring.scoring import Floats, ape
from benchmarks.perfmodel.scoring.table import Options, Table

Sweep = dict[float, float]
"""Bytes → seconds."""


def run(directory: Path, options: Options) -> list[Table]:
    """Return two tables per folder; each folder is a device."""
    folders: dict[Path, dict[int, Sweep]] = defaultdict(dict)
    complaints: list[str] = []
    for path in sorted(directory.rglob("AR_GPU*")):
        number = re.match(r"AR_GPU(\d+)", path.name)
        if number and path.is_file():
            folders[path.parent][int(number[1])] = _sweep(path, complaints)
    if not folders:
        raise ValueError(f"{directory}: no AR_GPU<n> files; expected a folder of them for each device")
    wanted = {p: s for p, s in folders.items() if options.wants(p.name)}
    return [t for p, sweeps in wanted.items() for t in _scored(p.name, sweeps, options, dropped(complaints))]


def given(sweep: Sweep) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the two measurements nearest to the sizes that the calibrator probes."""
    sizes = np.array(sorted(sweep))
    small, large = (
        float(sizes[np.argmin(np.abs(np.log(sizes / (part * sizes[-1]))))]) for part in (SMALL_PART, LARGE_PART)
    )
    if small == large:  # a narrow sweep
        small, large = float(sizes[0]), float(sizes[-1])
    return (small, sweep[small]), (large, sweep[large])


def _scored(device: str, sweeps: dict[int, Sweep], options: Options, note: str) -> list[Table]:
    curves = {n: from_two_sizes(n, *given(s)) for n, s in sweeps.items() if n >= 2 and len(s) >= 3}
    if not curves:
        raise ValueError(f"{device}: ranks {sorted(sweeps)}, expected files of 2 ranks or more")
    errors: dict[str, dict[str, Floats]] = {"model": {}, "alpha-beta": {}, "bandwidth": {}}
    for n, curve in curves.items():
        known = given(sweeps[n])
        sizes, times = _rest(sweeps[n], known)
        for name, predicted in _predictions(curve, known, sizes).items():
            errors[name][f"n = {n}"] = ape(times, predicted)
    tables = [compared(f"NCCL on {device}: two sizes given for every n", errors, options, note)]
    low, high = min(curves), max(curves)
    inner = [n for n in curves if low < n < high]
    if inner:
        fewer: dict[str, dict[str, Floats]] = {"model": {}, "as many ranks' bus bandwidth": {}}
        for n in inner:
            sizes, times = (np.array(x) for x in zip(*sorted(sweeps[n].items()), strict=True))
            fewer["model"][f"n = {n}"] = ape(times, between(curves[low], curves[high], n).seconds(sizes))
            bus = curves[high].bus_s * 2 * (n - 1) / n
            simple = AllReduce(n, curves[high].fixed_s, bus).seconds(sizes)
            fewer["as many ranks' bus bandwidth"][f"n = {n}"] = ape(times, simple)
        tables.append(compared(f"NCCL on {device}: two sizes of n = {low} and {high} given", fewer, options))
    return tables


def _predictions(
    curve: AllReduce, known: tuple[tuple[float, float], tuple[float, float]], sizes: Floats
) -> dict[str, Floats]:
    (v0, t0), (v1, t1) = known
    slope = (t1 - t0) / (v1 - v0)
    return {"model": curve.seconds(sizes), "alpha-beta": t0 + slope * (sizes - v0), "bandwidth": t1 / v1 * sizes}


def _rest(sweep: Sweep, known: tuple[tuple[float, float], tuple[float, float]]) -> tuple[Floats, Floats]:
    rest = sorted((v, t) for v, t in sweep.items() if (v, t) not in known)
    sizes, times = zip(*rest, strict=True)
    return np.array(sizes), np.array(times)


def _sweep(path: Path, complaints: list[str]) -> Sweep:
    """Read bytes → seconds from a file. Append the errors of skipped lines to ``complaints``."""
    sweep: Sweep = {}
    with path.open(encoding="utf-8-sig", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if number == 1:
                continue
            try:
                nbytes, seconds = float(row[0]), float(row[3]) * 1e-9
            except (ValueError, IndexError):
                complaints.append(f"{path.name} line {number}: expected bytes and nanoseconds in columns 1 and 4")
                continue
            if 0 < nbytes < np.inf and 0 < seconds < np.inf:
                sweep[nbytes] = seconds
            else:
                complaints.append(f"{path.name} line {number}: {nbytes:g} bytes in {seconds:g} s")
    if len(sweep) < 3:
        raise ValueError(f"{path}: {len(sweep)} usable sizes, expected at least three")
    return sweep
