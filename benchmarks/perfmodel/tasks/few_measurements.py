"""Score the fit of multi-device steps after 1 to 10 measurements, beside the simple model.

    python -m benchmarks.perfmodel.tasks.few_measurements --pollux DIR --gavel DIR [--seeds 10] [--details] [--check]

A data set is one workload on one cluster: a workload of the Pollux artifact, or a workload of one device type of
Gavel's. Both models see the same measurements, which are drawn at random, and predict all other placements. The simple
model is ``tasks/scaling_methods.simple``, the baseline of ``published.py``. Tables have a row for each source and
number of measurements: the mean over data sets of the median error, its difference from the simple model with a 95 %
interval (paired bootstrap over data sets and draws), the fraction of data sets on which dljob's error is higher by more
than ``WORSE``, and how many measurements the 90 % intervals contain.

``--check`` fails (exit code 1) if dljob's mean error is above that of the simple model after any number of
measurements; if that is so for one source, and not explained by noise (the 95 % interval of the difference is above 0);
or if the intervals after three or more measurements contain fewer than 85 or more than 95 %.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.perfmodel.formats import gavel_data, pollux_data
from benchmarks.perfmodel.formats.pollux_data import Key, Measured
from benchmarks.perfmodel.scoring.scoring import Estimate, ape, coverage, interval_score, median
from benchmarks.perfmodel.tasks.scaling_methods import Probes, Task, ours, simple

from dljob.calibrate.prior import Prior

COUNTS = tuple(range(1, 11))
LEVEL = 0.9
WORSE = 1.0
"""Percentage points by which a median error must be higher to count as worse."""
COVERED = (85.0, 95.0)
"""Bounds of the coverage of 90 % intervals in per cent."""
MIN_KEYS = 6
"""Minimum number of measured placements of a data set."""


@dataclass(frozen=True)
class DataSet:
    """One workload on one cluster. ``source``: artifact and device type."""

    source: str
    name: str
    task: Task
    measured: dict[Key, Measured]


@dataclass(frozen=True)
class Score:
    """Scores on one data set after ``count`` measurements, as means over draws."""

    source: str
    name: str
    count: int
    ours: float
    """Median absolute error in per cent."""
    simple: float
    covered: float
    """Percentage of measured times within the intervals."""
    interval: float
    """Winkler's score of the intervals of log(seconds), times 100."""
    differences: tuple[float, ...]
    """Error of dljob minus that of the simple model, for each draw."""


def of_pollux(directory: Path, gpus_per_node: int | None) -> Iterator[DataSet]:
    for each in pollux_data.load(directory, gpus_per_node):
        yield DataSet("pollux T4", each.name, Task(each.one, tuple(each.multi)), each.multi)


def of_gavel(directory: Path) -> Iterator[DataSet]:
    """Yield the workloads of each device type, on one node and spread over nodes with one device each."""
    rates = gavel_data.load(directory)
    singles = rates.curves(1)
    for device in sorted({name.removesuffix(gavel_data.SPREAD) for name in rates.devices()}):
        if device == "v100":
            places = [(device + gavel_data.SPREAD, False)]  # rates of several V100 on one node are inconsistent
        else:
            places = [(device, True), (device + gavel_data.SPREAD, False)]
        for workload in sorted({w for d, w in singles if d == device}):
            one = {b: Measured(s, np.nan) for b, s in singles[device, workload].items()}
            found: dict[Key, Measured] = {}
            for name, together in places:
                for count in (2, 4, 8):
                    for batch, seconds in rates.curves(count).get((name, workload), {}).items():
                        if batch in one:
                            found[Key((count,) if together else (1,) * count, batch)] = Measured(seconds, np.nan)
            if len(found) >= MIN_KEYS:
                yield DataSet(f"gavel {device.upper()}", workload, Task(one, tuple(sorted(found))), found)


def score(data: DataSet, count: int, seeds: int, prior: Prior | None = None, with_simple: bool = True) -> Score | None:
    """Score one data set; None if it has too few placements for ``count`` measurements.

    ``with_simple``: False to leave out the simple model, whose scores are then NaN.
    """
    keys = data.task.keys
    if len(keys) < count + MIN_KEYS // 2:
        return None
    measured_s = np.array([data.measured[key].step_s for key in keys])
    found = []
    for seed in range(seeds):
        drawn = np.random.default_rng([seed, count]).choice(len(keys), count, replace=False)
        hidden = np.ones(len(keys), dtype=bool)
        hidden[drawn] = False
        probes: Probes = [(keys[i], data.measured[keys[i]]) for i in sorted(drawn)]
        p = ours(data.task, probes, LEVEL) if prior is None else ours(data.task, probes, LEVEL, prior)
        other = simple(data.task, probes) if with_simple else np.full(len(keys), np.nan)
        found.append(
            (
                median(ape(measured_s, p.median_s)[hidden]),
                median(ape(measured_s, other)[hidden]),
                coverage(measured_s[hidden], p.low_s[hidden], p.high_s[hidden]),
                100 * float(interval_score(measured_s[hidden], p.low_s[hidden], p.high_s[hidden], LEVEL).mean()),
            )
        )
    error, simple_error, covered, interval = np.mean(found, axis=0).tolist()
    differences = tuple(own - other for own, other, *_ in found)
    return Score(data.source, data.name, count, error, simple_error, covered, interval, differences)


def difference(scores: Sequence[Score], resamples: int = 1000) -> Estimate:
    """Return the mean difference from the simple model over data sets, with a bootstrap over data sets and draws."""
    rng, draws = np.random.default_rng(0), [np.array(s.differences) for s in scores]
    again = [
        np.mean([rng.choice(draws[i], len(draws[i])).mean() for i in rng.integers(len(draws), size=len(draws))])
        for _ in range(resamples)
    ]
    low, high = np.percentile(again, [2.5, 97.5])
    return Estimate(float(np.mean([d.mean() for d in draws])), float(low), float(high))


def table(scores: list[Score], details: bool = False) -> str:
    columns = f"{'dljob %':>8} {'simple %':>8} {'difference':>17} {'worse':>6} {'covered %':>9} {'score':>7}"
    lines = [f"{'source':16} {'after':>5} {'sets':>5} {columns}"]
    for source in [*dict.fromkeys(s.source for s in scores), "all"]:
        for count in COUNTS:
            these = [s for s in scores if s.count == count and source in (s.source, "all")]
            if these:
                off = difference(these)
                off, worse = difference(these), sum(s.ours > s.simple + WORSE for s in these)
                ours, other, covered, interval = (
                    np.mean([getattr(s, field) for s in these]) for field in ("ours", "simple", "covered", "interval")
                )
                lines.append(
                    f"{source:16} {count:5} {len(these):5} {ours:8.1f} {other:8.1f} "
                    f"{off.value:5.1f} [{off.low:4.1f},{off.high:4.1f}] {worse:6} {covered:9.1f} {interval:7.1f}"
                )
    for s in scores if details else ():
        scores_of = f"{s.ours:7.1f} {s.simple:7.1f} {s.covered:7.1f} {s.interval:7.1f}"
        lines.append(f"{s.source:12} {s.name:24} {s.count:3} {scores_of}")
    return "\n".join(lines)


def failures(scores: list[Score]) -> list[str]:
    """Return what ``--check`` finds wrong."""
    found = []
    for count in COUNTS:
        these = [s for s in scores if s.count == count]
        if not these:
            continue
        error, other = np.mean([s.ours for s in these]), np.mean([s.simple for s in these])
        covered = float(np.mean([s.covered for s in these]))
        if error > other:
            found.append(f"{count} measurements: error {error:.1f} %, but {other:.1f} % with the simple model")
        else:
            for source in dict.fromkeys(s.source for s in these):
                off = difference([s for s in these if s.source == source])
                if off.low > 0:
                    found.append(f"{count} measurements: {source}: error {off.value:.1f} % above the simple model's")
        if count >= 3 and not COVERED[0] <= covered <= COVERED[1]:
            found.append(f"{count} measurements: 90 % intervals contain {covered:.1f} %")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pollux", type=Path, help="directory of the Pollux artifact")
    parser.add_argument("--gpus-per-node", type=int, default=4, metavar="K")
    parser.add_argument("--gavel", type=Path, help="directory of the Gavel artifact")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--details", action="store_true", help="print a row for each data set, too")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if not (options.pollux or options.gavel):
        parser.error("found neither --pollux nor --gavel; expected at least one of them")
    sets = [*(of_pollux(options.pollux, options.gpus_per_node) if options.pollux else ())]
    sets += of_gavel(options.gavel) if options.gavel else ()
    scores = [s for data in sets for count in COUNTS if (s := score(data, count, options.seeds)) is not None]
    print(table(scores, options.details))
    wrong = failures(scores) if options.check else []
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
