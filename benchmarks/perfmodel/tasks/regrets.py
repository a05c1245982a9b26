"""Score decisions on all public data sets: by how much each choice is worse than the best measured candidate (regret).

    python -m benchmarks.perfmodel.tasks.regrets --pollux DIR --gavel DIR --neusight DIR --zeus DIR --vtrain DIR

A decision is a set of measured candidates that do the same work. Give any of the directories.

pollux, placement: the nodes and devices of a workload for about the same global batch, after probes that the
    calibrator chooses. The planner predicts the candidates.
gavel, placement: the same for each device type: 2, 4 or 8 workers, on one node or one per node.
gavel, device and workers: the device type, the number of workers and their placement for the same global batch. The
    steps of one worker are known, and those of several are predicted by the planner after probes on each device type.
gavel, neusight, new device: the device type for a workload and batch, one type being new. Its time follows from other
    workloads' and devices' times, and from two batches of this workload on it ("two probes"; other batches count).
zeus, power limit: the limit with the least energy of an epoch; the lowest and the highest limit are known.
vtrain, parallelism: tensor, data and pipeline parallelism and micro-batches on the same devices, after a tenth of the
    rows. The benchmark's own model (``models/transformer.py``) predicts them, not the planner.

Objectives are seconds per sample (of which the planner minimizes the p90), joules, or with ``cost``, the catalogue's
price of the devices for the median time.

The column ``floor`` has the regret of choices that know the measured values of both neighbours of each candidate (the
next smaller and larger batch of a placement, or power limit), and only lack the candidate's own. They are worse than
the best because single measurements have noise, and the best one of a decision is often the luckiest.

``--check`` fails (exit code 1) if the mean of the rows' means is above ``MEAN``, or if a regret is above ``WORST`` and
above that of the floor in the same decision.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from benchmarks.perfmodel.formats import gavel_data, neusight, pollux_data, vtrain, zeus
from benchmarks.perfmodel.formats.pollux_data import Key, Measurements
from benchmarks.perfmodel.models.probes import with_probes
from benchmarks.perfmodel.models.transformer import Configuration, fitted
from benchmarks.perfmodel.scoring.scoring import Floats
from benchmarks.perfmodel.scoring.table import Cell, Options, Table
from benchmarks.perfmodel.tasks import few_measurements, plans
from benchmarks.perfmodel.tasks.decisions import candidates
from benchmarks.perfmodel.tasks.new_device import Rows, Times, curves_of, two_of
from benchmarks.perfmodel.tasks.scaling_methods import Task, chosen_probes

from dljob.cluster import catalogue
from dljob.perf.fit.new_device import Point, Sheet, seconds

MEAN, WORST = 3.0, 25.0
"""Goals in per cent."""
PROBES = (3, 5)
SHOWN = 12
"""Number of worst decisions to print."""


@dataclass(frozen=True)
class Decision:
    """Candidates that do the same work; arrays have one element per candidate, and lower values are better."""

    source: str
    """Data set, kind of decision and objective: a row of the table."""
    name: str
    labels: tuple[str, ...]
    measured: Floats
    predicted: Floats
    neighbours: Floats | None = None
    """Predictions from the measured neighbours of each candidate; None: it has none."""

    def regret(self, by: Floats) -> float:
        """Return by how many per cent the candidate with the smallest ``by`` is worse than the best measured one."""
        return float(100 * (self.measured[np.argmin(by)] / self.measured.min() - 1))

    @property
    def floor(self) -> float:
        return 0.0 if self.neighbours is None else self.regret(self.neighbours)

    def text(self) -> str:
        chosen, best = int(np.argmin(self.predicted)), int(np.argmin(self.measured))
        values = " and ".join(f"{self.predicted[i]:.4g} (measured {self.measured[i]:.4g})" for i in (chosen, best))
        lost = f"{self.regret(self.predicted):.0f} % (floor {self.floor:.0f} %)"
        return f"{lost}, {self.source}, {self.name}: {self.labels[chosen]} instead of {self.labels[best]}: {values}"


def between(values: Floats, positions: Floats) -> Floats:
    """Predict each value from its neighbours, linearly in logarithms; the first and the last have their own value."""
    x, y = np.log(positions), np.log(values)
    inner = [float(np.interp(x[i], x[[i - 1, i + 1]], y[[i - 1, i + 1]])) for i in range(1, len(x) - 1)]
    return np.asarray(np.exp([y[0], *inner, y[-1]] if len(x) > 1 else y))


def _place(key: Key) -> str:
    return f"{len(key.counts)} x {key.counts[0]} devices with {key.batch} samples"


def placements(source: str, device: str, workload: Measurements, count: int) -> Iterator[Decision]:
    """Yield the decisions of one workload between the placements that the planner can produce."""
    keys = [key for key in workload.multi if plans.even(key)]
    measured_s = np.array([workload.multi[key].step_s for key in keys])
    probes = chosen_probes(Task(workload.one, tuple(keys)), workload.multi.__getitem__, count)
    predicted_s = plans.priced(workload, keys, probes, measured=True, device=device).p90_s
    neighbours_s = plans.between_neighbours(workload, keys)
    found = candidates(tuple(keys))
    for group in found.groups:
        values = ((times / found.samples)[group] for times in (measured_s, predicted_s, neighbours_s))
        yield Decision(source, f"{workload.name} on {device}", tuple(_place(keys[i]) for i in group), *values)


def of_pollux(directory: Path, count: int) -> Iterator[Decision]:
    for workload in pollux_data.load(directory, 4):
        yield from placements(f"pollux, placement, {count} probes", plans.DEVICE, workload, count)


def _clusters(directory: Path) -> list[tuple[str, Measurements]]:
    """Return (device type, steps of a workload on several of its devices)."""
    return [
        (data.source.removeprefix("gavel ").lower(), Measurements(data.name, data.task.one, data.measured, ()))
        for data in few_measurements.of_gavel(directory)
    ]


def of_gavel(directory: Path, count: int) -> Iterator[Decision]:
    clusters = _clusters(directory)
    for device, workload in clusters:
        yield from placements(f"gavel, placement, {count} probes", device, workload, count)
    for name in sorted({workload.name for _, workload in clusters}):
        yield from _of_types({d: w for d, w in clusters if w.name == name}, count)


def _of_types(types: Mapping[str, Measurements], count: int) -> Iterator[Decision]:
    """Yield the decisions of one workload between device types, numbers of workers and placements."""
    rows: list[tuple[int, str, Key, float, float, float, float]] = []
    """Global batch, device type, placement, and seconds: measured, predicted p90 and median, and by the neighbours."""
    for device, workload in types.items():
        keys = list(workload.multi)
        probes = chosen_probes(Task(workload.one, tuple(keys)), workload.multi.__getitem__, count)
        said = plans.priced(workload, keys, probes, measured=True, device=device)
        near_s = plans.between_neighbours(workload, keys)
        for k, p90_s, median_s, n in zip(keys, said.p90_s, said.median_s, near_s, strict=True):
            rows.append((k.devices * k.batch, device, k, workload.multi[k].step_s, p90_s, median_s, n))
        for b, m in workload.one.items():
            rows.append((b, device, Key((1,), b), m.step_s, m.step_s, m.step_s, m.step_s))
    name = next(iter(types.values())).name
    for size, group in groupby(sorted(rows, key=lambda row: row[:3]), key=lambda row: row[0]):
        each = list(group)
        labels = tuple(f"{device} {_place(key)}" for _, device, key, *_ in each)
        measured_s, p90_s, median_s, near_s = np.array([row[3:] for row in each]).T
        usd = np.array([_usd(device) * key.devices for _, device, key, *_ in each])
        if len(each) > 1:
            source, title = "gavel, device and workers", f"{name}, global batch {size}"
            yield Decision(f"{source}, time, {count} probes", title, labels, measured_s, p90_s, near_s)
            prices = (usd * times for times in (measured_s, median_s, near_s))
            yield Decision(f"{source}, cost, {count} probes", title, labels, *prices)


def _usd(device: str) -> float:
    found = catalogue.gpu(device)
    return found.usd_per_h if found else float("nan")


def new_devices(source: str, sheets: Mapping[str, Sheet], rows: Rows) -> Iterator[Decision]:
    """Yield a decision for each new device type and each workload and batch that was measured on it and on others."""
    points = {Point(d, w, float(b)): s for (d, w, b), s in rows.items() if d in sheets}
    for new in sorted({p.device for p in points}):
        known = {p: s for p, s in points.items() if p.device != new}
        elsewhere = {(p.workload, p.batch) for p in known}
        own = {p: s for p, s in points.items() if p.device == new and (p.workload, p.batch) in elsewhere}
        if own:
            without = dict(zip(own, seconds(sheets, known, list(own)), strict=True))
            yield from _with_new(f"{source}, new device, no probe", points, without)
        for curve in curves_of(own):
            probes = {p: own[p] for p in two_of(curve)}
            rest = [p for p in curve if p not in probes]
            probed = dict(zip(rest, with_probes(sheets, known, probes, rest), strict=True))
            yield from _with_new(f"{source}, new device, two probes", points, probed)


def _with_new(source: str, points: Times, predicted: Mapping[Point, float]) -> Iterator[Decision]:
    """Yield the decisions between the new device, with ``predicted`` seconds, and the others with measured ones."""
    for point, new_s in predicted.items():
        same = [
            p for p in points if (p.workload, p.batch) == (point.workload, point.batch) and p.device != point.device
        ]
        devices = (point.device, *(p.device for p in same))
        measured_s = np.array([points[point], *(points[p] for p in same)])
        predicted_s = np.array([new_s, *measured_s[1:]])
        name = f"{point.workload}, batch {point.batch:g}, new {point.device}"
        yield Decision(f"{source}, time", name, devices, measured_s, predicted_s)
        usd = np.array([_usd(device) for device in devices])
        if np.isfinite(usd).all():
            yield Decision(f"{source}, cost", name, devices, usd * measured_s, usd * predicted_s)


def new_on_gavel(directory: Path) -> Iterator[Decision]:
    curves = gavel_data.load(directory).curves()
    together = {(d, w, b): s for (d, w), c in curves.items() if not d.endswith(gavel_data.SPREAD) for b, s in c.items()}
    found = {d: catalogue.gpu(d) for d, *_ in together}
    sheets = {
        d: Sheet(g.fp32_FLOPs, g.memory_bandwidth_Bps, catalogue.vendor(d)) for d, g in found.items() if g is not None
    }
    return new_devices("gavel", sheets, together)


def new_on_neusight(directory: Path) -> Iterator[Decision]:
    return new_devices("neusight", neusight.sheets(directory, []), neusight.rows(directory, []))


def of_zeus(directory: Path) -> Iterator[Decision]:
    for path in sorted(directory.rglob("summary_power_*.csv")):
        for job, points in zeus.load(path)[0].items():
            if len(points) >= 3:
                limits = np.array([p.limit_W for p in points])
                joules = np.array([p.seconds * p.power_W for p in points])
                predicted = zeus.model(points[0], points[-1], limits)
                labels = tuple(f"{limit:g} W" for limit in limits)
                name = f"{path.stem.removeprefix('summary_power_')} {' '.join(job)}"
                yield Decision("zeus, power limit", name, labels, joules, predicted, between(joules, limits))


def of_vtrain(directory: Path, seeds: int) -> Iterator[Decision]:
    for path in sorted(directory.rglob("ground_truth_*.csv")):
        rows = vtrain.load(path, [])
        groups: dict[tuple[float, ...], list[int]] = {}
        for i, (c, _) in enumerate(rows):
            devices = c.tensor * c.data * c.pipeline
            groups.setdefault((devices, c.global_batch, c.hidden, c.heads, c.layers, c.sequence), []).append(i)
        measured_s = np.array([s for _, s in rows])
        for seed in range(seeds):
            given = np.random.default_rng(seed).permutation(len(rows))[: max(vtrain.MIN_GIVEN, len(rows) // 10)]
            model = fitted([rows[i][0] for i in given], measured_s[given].tolist())
            predicted_s = model.seconds([c for c, _ in rows])
            for work, group in groups.items():
                if len(group) > 1:
                    labels = tuple(_parallelism(rows[i][0]) for i in group)
                    name = "{:g} devices, batch {:g}, width {:g}, {:g} heads, {:g} layers, {:g} tokens".format(*work)
                    source = f"vtrain {path.stem.removeprefix('ground_truth_')}, parallelism"
                    yield Decision(source, name, labels, measured_s[group], predicted_s[group])


def _parallelism(c: Configuration) -> str:
    return f"tensor {c.tensor:g} data {c.data:g} pipeline {c.pipeline:g} micro-batch {c.micro_batch:g}"


def table(decisions: Iterable[Decision]) -> Table:
    """Return a row for each source, and one for all with the unweighted mean of the sources' means."""
    rows: list[tuple[Cell, ...]] = []
    every = list(decisions)
    for source in dict.fromkeys(d.source for d in every):
        these = [d for d in every if d.source == source]
        lost = np.array([d.regret(d.predicted) for d in these])
        floors = [d.floor for d in these if d.neighbours is not None]
        floor = (float(np.mean(floors)), float(np.max(floors))) if floors else (None, None)
        rows.append((source, len(these), float(lost.mean()), float(np.quantile(lost, 0.9)), float(lost.max()), *floor))
    means = [float(row[2]) for row in rows if isinstance(row[2], float)]
    worst = max(d.regret(d.predicted) for d in every)
    rows.append(("all (mean of the sources)", len(every), float(np.mean(means)), None, worst, None, None))
    columns = ("decisions between", "number", "mean", "p90", "worst", "floor: mean", "worst")
    note = "\n".join(d.text() for d in sorted(every, key=lambda d: -d.regret(d.predicted))[:SHOWN])
    return Table("Regret: worse than the best measured candidate, %", columns, tuple(rows), note)


def failures(decisions: list[Decision]) -> list[str]:
    """Return what ``--check`` finds wrong."""
    found = []
    sources = dict.fromkeys(d.source for d in decisions)
    mean = np.mean([np.mean([d.regret(d.predicted) for d in decisions if d.source == s]) for s in sources])
    if mean > MEAN:
        found.append(f"mean regret: found {mean:.1f} %; expected at most {MEAN:g} %")
    found += [d.text() for d in decisions if d.regret(d.predicted) > max(WORST, d.floor)]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("pollux", "gavel", "neusight", "zeus", "vtrain"):
        parser.add_argument(f"--{name}", type=Path, help=f"directory of the {name} artifact")
    parser.add_argument("--seeds", type=int, default=Options().seeds, help="draws of given rows (vtrain)")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    found: list[Decision] = []
    for count in PROBES:
        found += of_pollux(options.pollux, count) if options.pollux else ()
        found += of_gavel(options.gavel, count) if options.gavel else ()
    found += new_on_gavel(options.gavel) if options.gavel else ()
    found += new_on_neusight(options.neusight) if options.neusight else ()
    found += of_zeus(options.zeus) if options.zeus else ()
    found += of_vtrain(options.vtrain, options.seeds) if options.vtrain else ()
    if not found:
        parser.error("found no directory with a decision; expected at least one of --pollux, --gavel, …")
    print(table(found).text())
    wrong = failures(found) if options.check else []
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
