"""Read public measurements of programs on GPUs with locked clocks.

- ``stage_profile/MODEL+DEVICE_bf16.csv`` of Perseus (SOSP 2024; branch ``kronos`` of ml-energy/zeus): columns ``stage,
  instruction,frequency,time,energy``. Forward and backward pass of one layer on one GPU; their sum is a point.
- ``perseus/DEVICE/PARALLELISM/MODEL/N.sched.json`` and ``N.prof.json`` of the same: for each rank of a pipeline, the
  clock of every instruction of schedule N, and the measured times of forward and backward passes, of iterations, and
  the energy of iterations. Schedule 0 is that at the maximum clock.
- ``DEVICE-dvfs-real.csv`` of NV-DVFS-Benchmark (blackjack2015): columns ``benchmark,argNo,kernel,core_frequency,
  memory_frequency,time,average_power``. Only rows with the highest memory clock count.
"""

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

IDLE_W = {"a100_sxm": 55.0, "A100": 50.0, "a40": 28.0, "A40": 28.0, "v100": 40.0, "rtx8000": 20.0}
"""Device of a file → idle power in watts, as in the device catalogue; RTX 8000: an estimate."""
LOWEST = 0.5
"""Least clock, as a fraction of the highest, that counts. Below it, V100 kernels slow down more than their clock."""
WIDEST = 0.12
"""Largest range of a rank's clocks in a schedule that counts as one clock, as a fraction of the highest."""
BUSY = 0.9
"""Least part of an iteration in which a rank computes, for its mean power to be that of computing."""
WARM_UP = 3
"""Iterations of a schedule that do not count."""


class Point(NamedTuple):
    """Time and mean power at a clock, divided by those at the highest clock, and the clock likewise."""

    clock: float
    seconds: float
    power: float | None


@dataclass(frozen=True)
class Curve:
    """Measurements of one program, or of one rank of it, on one device."""

    device: str
    program: str
    demand_W: float
    """Mean power at the highest clock."""
    points: tuple[Point, ...]


def load(directory: Path) -> tuple[list[Curve], list[str]]:
    """Read all files below ``directory``. Also return what was skipped. Raise ValueError without any measurement."""
    complaints = list[str]()
    found = [*_layers(directory), *_pipelines(directory, complaints), *_kernels(directory)]
    if not found:
        raise ValueError(
            f"{directory}: found no measurements; expected stage_profile/*.csv, perseus/*/*/*/0.sched.json or "
            "*-dvfs-real.csv"
        )
    return [curve for curve in found if curve.points], complaints


def _rows(path: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        if missing := [c for c in columns if c not in (reader.fieldnames or ())]:
            raise ValueError(f"{path}: no column {', '.join(missing)}; expected {', '.join(columns)}")
        yield from reader


def _curve(device: str, program: str, measured: dict[float, tuple[float, float]]) -> Curve:
    """Return the curve of {clock: (seconds, watts)}."""
    top = max(measured)
    top_s, top_W = measured[top]
    points = (
        Point(clock / top, seconds / top_s, watts / top_W)
        for clock, (seconds, watts) in sorted(measured.items(), reverse=True)
        if clock < top and clock >= LOWEST * top
    )
    return Curve(device, program, top_W, tuple(points))


def _layers(directory: Path) -> Iterator[Curve]:
    for path in sorted(directory.rglob("stage_profile/*.csv")):
        program, _, device = path.stem.removesuffix("_bf16").partition("+")
        sums: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for row in _rows(path, ("stage", "instruction", "frequency", "time", "energy")):
            if row["stage"] == "0":  # the other stages repeat its layer
                sums[float(row["frequency"])].append((float(row["time"]), float(row["energy"])))
        totals = {clock: (sum(t for t, _ in each), sum(e for _, e in each)) for clock, each in sums.items()}
        yield _curve(device, f"layer of {program}", {clock: (t, e / t) for clock, (t, e) in totals.items()})


def _pipelines(directory: Path, complaints: list[str]) -> Iterator[Curve]:
    for first in sorted(directory.rglob("perseus/*/*/*/0.sched.json")):
        folder, device = first.parent, first.parents[2].name
        program = folder.name.removeprefix("merak+").partition("+")[0]
        schedules = [_schedule(folder, n) for n in range(len(list(folder.glob("*.sched.json"))))]
        for rank, base in enumerate(schedules[0]):
            if base is None or base.narrowest != base.widest:
                complaints.append(f"{folder.parents[1].name}/{program} rank {rank}: no schedule at one clock")
                continue
            top, points = base.clock, list[Point]()
            for ranks in schedules[1:]:
                at = ranks[rank]
                if at is None or (at.widest - at.narrowest) / top > WIDEST or at.clock > 0.995 * top:
                    continue
                busy = min(at.busy_s / at.iteration_s, base.busy_s / base.iteration_s)
                points.append(
                    Point(at.clock / top, at.busy_s / base.busy_s, at.power_W / base.power_W if busy >= BUSY else None)
                )
            yield Curve(device, program, base.power_W, tuple(points))


class _Rank(NamedTuple):
    clock: float
    narrowest: float
    widest: float
    busy_s: float
    iteration_s: float
    power_W: float


def _schedule(folder: Path, number: int) -> list[_Rank | None]:
    """Return the medians of each rank under schedule ``number``; None for a rank without measurements."""
    clocks, profiles = (
        json.loads((folder / f"{number}.{kind}.json").read_text(encoding="utf-8")) for kind in ("sched", "prof")
    )
    return [_rank(schedule["power_states"], profile) for schedule, profile in zip(clocks, profiles, strict=True)]


def _rank(states: list[float], profile: dict[str, Any]) -> _Rank | None:
    forward, backward = (profile["time_breakdown"][name][WARM_UP:] for name in ("forward", "backward"))
    seconds, joules = profile["iter_time"][WARM_UP:], profile["iter_energy"][WARM_UP:]
    if not (forward and backward and seconds and joules):
        return None
    busy_s = median(sum(f) + sum(b) for f, b in zip(forward, backward, strict=True))
    clock = 1 / fmean(1 / state for state in states)
    return _Rank(clock, min(states), max(states), busy_s, median(seconds), median(joules) / median(seconds))


def _kernels(directory: Path) -> Iterator[Curve]:
    columns = ("benchmark", "kernel", "core_frequency", "memory_frequency", "time", "average_power")
    for path in sorted(directory.rglob("*-dvfs-real.csv")):
        rows = list(_rows(path, columns))
        memory = max(float(row["memory_frequency"]) for row in rows)
        kernels: dict[str, dict[float, tuple[float, float]]] = defaultdict(dict)
        for row in rows:
            if float(row["memory_frequency"]) == memory:
                kernels[f"{row['benchmark']} {row['kernel']}"][float(row["core_frequency"])] = (
                    float(row["time"]),
                    float(row["average_power"]),
                )
        for name, measured in kernels.items():
            yield _curve(path.stem.removesuffix("-dvfs-real"), name, measured)
