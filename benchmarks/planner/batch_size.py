"""Score the global batch size that the gradient noise scale chooses, by its time to a target on public measurements.

    python -m benchmarks.planner.batch_size --dir DIRECTORY [--json]

DIRECTORY has the tables of the Pollux artifact (OSDI 2021), one folder per workload. ``validation-<batch>.csv`` has the
metric and the square and variance of the gradient during a training with each batch size (scaled with AdaScale, or with
the square root for Adam). ``placements.csv`` and ``scalability.csv`` have the step times. The smallest batch size is
the user's. The noise scale (``optim.noise_scale``) comes from its training alone, and the planner's rule then chooses a
batch size for each placement. The score uses data that the rule did not see: the iterations that each batch size
needed to the target, which is the worst of all trainings' best metrics. Step times are measured, so that only the
statistical part is scored. Local batch sizes between two measured ones are interpolated, smaller ones extrapolated by
a line.
"""

import argparse
import csv
import json
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from benchmarks.perfmodel.formats.pollux_data import Key, Measurements, load

from dljob.perf.fit import statistical
from dljob.planner.batch import pick


@dataclass(frozen=True)
class Row:
    iteration: int
    metric: float
    square: float
    variance: float
    """Variance of the gradient of the smallest batch."""


@dataclass(frozen=True)
class Score:
    """Score of one workload: excess time over the best batch size in hindsight, per cent, mean over placements."""

    workload: str
    batches: str
    placements: int
    noise_scale: float
    steps: tuple[float, float]
    """Minimum and maximum of predicted steps / needed steps over the other batch sizes; below 1, training would be too
    short."""
    steps_late: tuple[float, float]
    """The same, predicted from the median noise scale of the later half of the training."""
    chosen: float
    chosen_worst: float
    chosen_late: float
    """The choice from that median."""
    fixed: float
    """The smallest batch everywhere."""
    largest: float
    """The largest batch everywhere."""
    saved: float
    """Reduction of the time to the target compared with the smallest batch, per cent."""


def trainings(folder: Path) -> dict[int, list[Row]]:
    """Read the trainings by batch size. Raise ValueError for a malformed row."""
    found = {}
    for path in folder.glob("validation-*.csv"):
        with path.open(newline="") as file:
            rows = [
                Row(int(r["iteration"]), float(r["metric"]), float(r["grad_sqr"]), float(r["grad_var"]))
                for r in csv.DictReader(file)
            ]
        found[int(path.stem.removeprefix("validation-"))] = rows
    return dict(sorted(found.items()))


def iterations(runs: dict[int, list[Row]]) -> dict[int, int]:
    """Return the iterations to the worst of the trainings' best metrics, by batch size.

    The metric falls or rises as that of the smallest batch does.
    """
    base = runs[min(runs)]
    sign = 1 if base[-1].metric > base[0].metric else -1
    target = min(max(sign * row.metric for row in rows) for rows in runs.values())
    return {b: next(row.iteration for row in rows if sign * row.metric >= target) for b, rows in runs.items()}


def noise_scale(rows: list[Row], base: int, until: int) -> float:
    """Return the harmonic mean of ``optim.noise_scale``; each evaluation counts for the iterations before it."""
    before, shares, weights = 0, [], []
    for row in rows:
        if before < until:
            shares.append(row.square / (row.square + row.variance))
            weights.append(row.iteration - before)
        before = row.iteration
    mean = sum(s * w for s, w in zip(shares, weights, strict=True)) / sum(weights)
    return base * (1 / mean - 1)


def step_s(times: dict[int, float], share: float) -> float | None:
    """Return the step time of a local batch size, or None if it is above the measured ones."""
    measured = sorted(times.items())
    if share > measured[-1][0]:
        return None
    pairs = list(pairwise(measured))
    (b0, t0), (b1, t1) = next((p for p in pairs if share <= p[1][0]), pairs[-1])
    line = t0 + (share - b0) * max(0.0, t1 - t0) / (b1 - b0)
    return max(line, t0 / 2)


def score(workload: Measurements, runs: dict[int, list[Row]]) -> Score:
    base, took = min(runs), iterations(runs)
    noise = noise_scale(runs[base], base, took[base])
    seen = [row for row in runs[base] if row.iteration <= took[base]]
    late = base * median(row.variance / row.square for row in seen[len(seen) // 2 :])
    whole, half = (
        [statistical.steps(took[base], base, b, n) / took[b] for b in runs if b != base] for n in (noise, late)
    )
    places: dict[tuple[int, ...], dict[int, float]] = {(1,): {b: m.step_s for b, m in workload.one.items()}}
    for key, measured in workload.multi.items():
        places.setdefault(Key(key.counts, 0).counts, {})[key.batch] = measured.step_s
    excess: dict[str, list[float]] = {"chosen": [], "late": [], "fixed": [], "largest": []}
    saved = []
    for counts, times in places.items():
        if len(times) < 2:
            continue
        steps = {b: s for b in runs if (s := step_s(times, b / sum(counts))) is not None}
        if base not in steps or len(steps) < 2:
            continue
        real = {b: took[b] * s for b, s in steps.items()}
        chosen, by_late = (
            pick(base, {b: (False, statistical.steps(took[base], base, b, n) * s) for b, s in steps.items()})
            for n in (noise, late)
        )
        best = min(real.values())
        for name, batch in (("chosen", chosen), ("late", by_late), ("fixed", base), ("largest", max(steps))):
            excess[name].append(100 * (real[batch] / best - 1))
        saved.append(100 * (1 - real[chosen] / real[base]))
    return Score(
        workload.name, f"{base}…{max(runs)}", len(saved), noise, (min(whole), max(whole)), (min(half), max(half)),
        fmean(excess["chosen"]), max(excess["chosen"]), fmean(excess["late"]), fmean(excess["fixed"]),
        fmean(excess["largest"]), fmean(saved),
    )  # fmt: skip


HEADER = (
    f"{'workload':<12} {'batches':<11} {'places':>6} {'noise scale':>11} {'pred./needed':>15} "
    f"{'late median':>14} {'chosen':>8} {'worst':>7} {'by median':>9} {'smallest':>8} {'largest':>8} {'saved':>6}"
)


def text(s: Score) -> str:
    return (
        f"{s.workload:<12} {s.batches:<11} {s.placements:>6} {s.noise_scale:>11.3g} {_span(s.steps):>15} "
        f"{_span(s.steps_late):>14} {s.chosen:>6.1f} % {s.chosen_worst:>5.0f} % {s.chosen_late:>7.1f} % "
        f"{s.fixed:>6.0f} % {s.largest:>6.0f} % {s.saved:>4.0f} %"
    )


def _span(ratios: tuple[float, float]) -> str:
    return f"{ratios[0]:.2f}…{ratios[1]:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        found = [
            score(workload, runs) for workload in load(options.dir, None)
            if len(runs := trainings(options.dir / workload.name)) > 1
        ]  # fmt: skip
    except (OSError, KeyError, ValueError) as error:
        parser.error(str(error))
    if not found:
        parser.error(f"{options.dir}: found no workload with at least two files validation-<batch>.csv")
    if options.json:
        sys.stdout.write(json.dumps([asdict(s) for s in found], indent=2) + "\n")
        return 0
    means = {
        name: fmean(getattr(s, name) for s in found) for name in ("chosen", "chosen_late", "fixed", "largest", "saved")
    }
    worst = max(s.chosen_worst for s in found)
    lines = [HEADER, *map(text, found), ""]
    lines.append(
        f"Time to the target over the best batch in hindsight, mean over workloads: chosen {means['chosen']:.1f} % "
        f"(worst placement {worst:.0f} %), from the late median {means['chosen_late']:.1f} %, smallest "
        f"{means['fixed']:.0f} %, largest {means['largest']:.0f} %; the choice saves {means['saved']:.0f} % of the "
        "smallest batch's time"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
