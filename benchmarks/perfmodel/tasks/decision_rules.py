"""Compare rules of decision between placements, after random measurements and after probes that the calibrator chooses.

    python -m benchmarks.perfmodel.tasks.decision_rules --pollux DIR --gavel DIR [--seeds 6]

Candidates are the placements that the planner can produce, with the same devices on each node. A rule chooses the
smallest median times exp(k d) per sample, where d is the standard deviation of the logarithm: k = 0 is the median, 0.84
the p80, and 1.28 the p90, which the planner uses. Regret is by how much the choice is worse than the best measured
candidate: the mean over data sets, its largest value, and the part of decisions above 25 %. A deadline is missed if the
cheapest placement that meets it by the rule's time does not (``decisions.missed``).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.perfmodel.formats import pollux_data
from benchmarks.perfmodel.formats.pollux_data import Measurements
from benchmarks.perfmodel.scoring.scoring import Floats, regret
from benchmarks.perfmodel.scoring.table import Cell, Table
from benchmarks.perfmodel.tasks import plans
from benchmarks.perfmodel.tasks.decisions import Candidates, candidates, missed
from benchmarks.perfmodel.tasks.few_measurements import MIN_KEYS, of_gavel
from benchmarks.perfmodel.tasks.scaling_methods import Probes, Task, chosen_probes, posterior

from dljob.calibrate import MAX_PROBES
from dljob.perf.step.step import SPREAD
from dljob.planner.candidates.cost.measured import predicted

COUNTS = (3, 5, 10)
RULES = (0.0, 0.4, 0.84, 1.28, 1.64)
BAD = 25.0
"""Regret in per cent above which a decision is counted."""


@dataclass(frozen=True)
class Case:
    """Predictions of a data set after some measurements; arrays have one element for each candidate."""

    source: str
    found: Candidates
    measured_s: Floats
    median_s: Floats
    deviation: Floats

    def by(self, k: float) -> Floats:
        return np.asarray(self.median_s * np.exp(k * self.deviation))


def cases(source: str, workload: Measurements, seeds: int) -> Iterator[Case]:
    """Yield the predictions after chosen probes and after ``seeds`` random draws of each number of measurements."""
    keys = tuple(key for key in workload.multi if plans.even(key))
    task, found = Task(workload.one, keys), candidates(keys)
    measured_s = np.array([workload.multi[key].step_s for key in keys])
    for count in COUNTS:
        draws: list[Probes] = []
        if count <= MAX_PROBES:
            draws.append(chosen_probes(task, workload.multi.__getitem__, count))
        for seed in range(seeds if len(keys) >= count + MIN_KEYS // 2 else 0):
            at = np.random.default_rng([seed, count]).choice(len(keys), count, replace=False)
            draws.append([(keys[i], workload.multi[keys[i]]) for i in sorted(at)])
        for probes in draws:
            median_s, deviation = predicted(posterior(task, probes), task.runs(keys))
            yield Case(source, found, measured_s, median_s, np.maximum(deviation, SPREAD["profile"]))


def table(found: list[Case]) -> Table:
    """Return a row for each rule and source, and for each rule and all data sets."""
    rows: list[tuple[Cell, ...]] = []
    for k in RULES:
        for source in [*dict.fromkeys(case.source.split(",")[0] for case in found), "all"]:
            lost: dict[str, list[float]] = {}
            late: dict[str, list[float]] = {}
            for case in found:
                if source in (case.source.split(",")[0], "all"):
                    by, samples = case.by(k), case.found.samples
                    each = regret(case.measured_s / samples, by / samples, list(case.found.groups))
                    lost.setdefault(case.source, []).extend(each)
                    late.setdefault(case.source, []).extend(missed(case.found, case.measured_s, case.median_s, by)[0])
            every = np.concatenate(list(lost.values()))
            mean, missing = (float(np.mean([np.mean(x) for x in d.values()])) for d in (lost, late))
            part = 100 * float(np.mean(every > BAD))
            rows.append((f"{source}, k = {k:g}", len(every), mean, float(every.max()), part, 100 * missing))
    columns = ("source and rule", "decisions", "mean", "worst", f"above {BAD:g} %", "deadlines missed")
    return Table("Regret of rules of decision, %", columns, tuple(rows))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pollux", type=Path, required=True)
    parser.add_argument("--gavel", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args(arguments)
    sets = [(f"pollux, {w.name}", w) for w in pollux_data.load(options.pollux, 4)]
    for data in of_gavel(options.gavel):
        workload = Measurements(data.name, data.task.one, data.measured, ())
        sets.append((f"{data.source}, {data.name}", workload))
    print(table([case for source, workload in sets for case in cases(source, workload, options.seeds)]).text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
