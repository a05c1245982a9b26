"""Format ``pollux``: step times on many devices from the one-device curve and a few probes.

A model sees the times on one device and all keys with more devices, but only the values of its probes. These are 3 or 5
probes that the calibrator chooses one after the other (for baselines: hand-picked), or a random tenth of the rows. All
other keys are scored. Both files of a workload form one set of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.perfmodel.formats.pollux_data import Key, Measurements, load
from benchmarks.perfmodel.scoring.scoring import (
    Estimate,
    Floats,
    ape,
    coverage,
    interval_score,
    mean,
    median,
    over_workloads,
    p90,
    regret,
)
from benchmarks.perfmodel.scoring.table import Cell, Options, Table
from benchmarks.perfmodel.tasks import plans
from benchmarks.perfmodel.tasks import scaling_methods as methods
from benchmarks.perfmodel.tasks.decisions import candidates, missed
from benchmarks.perfmodel.tasks.scaling_methods import Probes, Task

from dljob.calibrate import Predicted

OURS = "dljob"
BY_P90 = "dljob, chosen by its p90"
MEASURES = (mean, median, p90)
LEVEL = 0.9
ERROR_COLUMNS = ("model", "workload", "keys", "mean", "median", "p90")


@dataclass(frozen=True)
class Scored:
    """Scores of one workload with one budget of probes, concatenated over draws."""

    name: str
    errors: dict[str, Floats]
    """Absolute percentage errors by model, on the keys that it did not probe."""
    measured_s: Floats
    ours: Predicted
    """Predictions for the keys of ``measured_s``."""
    choices: dict[str, Floats]
    """Regret of each decision, per cent, by model."""
    late: dict[str, tuple[Floats, Floats]]
    """Results of ``decisions.missed``, by the prediction that was compared with the deadline."""
    probes: str


def run(directory: Path, options: Options) -> list[Table]:
    """Score errors, intervals and decisions with 3 probes, with 5, and with a tenth of the rows."""
    workloads = [w for w in load(directory, options.gpus_per_node) if options.wants(w.name)]
    if not workloads:
        raise ValueError(f"--only {','.join(options.only)}: found no such workload below {directory}")
    tables: list[Table] = []
    for count in (3, 5):
        scored = [_probed(w, count) for w in workloads]
        tables += [*_tables(f"{count} probes", scored, options), plans.table(workloads, count, options)]
    return tables + _tables("A random tenth of the rows", [_sampled(w, options.seeds) for w in workloads], options)


def _baselines() -> dict[str, methods.Method]:
    found: dict[str, methods.Method] = {
        "no communication": methods.no_communication,
        "affine": methods.affine,
        "simple": methods.simple,
    }
    if methods.has_adaptdl():
        found["Pollux (adaptdl)"] = methods.pollux
    return found


def _probed(workload: Measurements, count: int) -> Scored:
    task = Task(workload.one, tuple(workload.multi))
    measure = workload.multi.__getitem__
    chosen = methods.chosen_probes(task, measure, count)
    by_hand = methods.picked_by_hand(task, measure, count)
    probes = {OURS: chosen, **dict.fromkeys(_baselines(), by_hand)}
    return _scored(workload, task, probes, "; ".join(_name(key) for key, _ in chosen))


def _name(key: Key) -> str:
    return f"{'+'.join(map(str, key.counts))} x {key.batch}"


def _sampled(workload: Measurements, seeds: int) -> Scored:
    """Score several draws of a tenth of the rows together."""
    task, draws = Task(workload.one, tuple(workload.multi)), list[Scored]()
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        drawn = rng.choice(len(workload.rows), size=max(1, len(workload.rows) // 10), replace=False)
        rows = [workload.rows[i] for i in sorted(drawn)]
        draws.append(_scored(workload, task, dict.fromkeys((OURS, *_baselines()), rows), ""))
    ends = (np.concatenate([getattr(d.ours, end) for d in draws]) for end in ("median_s", "low_s", "high_s"))
    return Scored(
        workload.name,
        {m: np.concatenate([d.errors[m] for d in draws]) for m in draws[0].errors},
        np.concatenate([d.measured_s for d in draws]),
        Predicted(*ends),
        {m: np.concatenate([d.choices[m] for d in draws]) for m in draws[0].choices},
        {h: _together([d.late[h] for d in draws]) for h in draws[0].late},
        "",
    )


def _together(pairs: list[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    late, excess = zip(*pairs, strict=True)
    return np.concatenate(late), np.concatenate(excess)


def _scored(workload: Measurements, task: Task, probes: dict[str, Probes], note: str) -> Scored:
    """Score each model on the keys that it did not probe. Decisions are among all keys."""
    measured_s = np.array([workload.multi[key].step_s for key in task.keys])
    ours = methods.ours(task, probes[OURS], LEVEL)
    hidden = {m: np.array([key not in {k for k, _ in p} for key in task.keys]) for m, p in probes.items()}
    p90_s = methods.ours(task, probes[OURS], 0.8).high_s
    predicted = {OURS: ours.median_s, **{m: call(task, probes[m]) for m, call in _baselines().items()}}
    found = candidates(task.keys)
    groups = list(found.groups)
    per_sample = {m: p / found.samples for m, p in {**predicted, BY_P90: p90_s}.items()}
    return Scored(
        workload.name,
        {m: ape(measured_s[hidden[m]], p[hidden[m]]) for m, p in predicted.items()},
        measured_s[hidden[OURS]],
        Predicted(*(end[hidden[OURS]] for end in (ours.median_s, ours.low_s, ours.high_s))),
        {m: regret(measured_s / found.samples, p, groups) for m, p in per_sample.items()},
        {
            "p90": missed(found, measured_s, ours.median_s, p90_s),
            "median": missed(found, measured_s, ours.median_s, ours.median_s),
        },
        note,
    )


def _tables(budget: str, scored: list[Scored], options: Options) -> list[Table]:
    return [_errors(budget, scored, options), _intervals(budget, scored, options), *_decisions(budget, scored, options)]


def _errors(budget: str, scored: list[Scored], options: Options) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for model in scored[0].errors:
        errors = [s.errors[model] for s in scored]
        rows.append((model, "mean of all", sum(map(len, errors)), *_estimates(errors, options)))
        rows += [(model, s.name, len(e), *_estimates([e], options)) for s, e in zip(scored, errors, strict=True)]
    probes = "\n".join(f"probes of {s.name}: {s.probes}" for s in scored if s.probes)
    missing = "" if methods.has_adaptdl() else "Pollux: not installed; run pip install 'dljob[bench]'"
    note = "\n".join(line for line in (probes, missing) if line)
    return Table(f"{budget}: absolute error of the step time, %", ERROR_COLUMNS, tuple(rows), note)


def _estimates(errors: list[Floats], options: Options) -> tuple[Estimate, ...]:
    return tuple(over_workloads(errors, measure, options.resamples) for measure in MEASURES)


def _intervals(budget: str, scored: list[Scored], options: Options) -> Table:
    """Score dljob's intervals and, as a baseline, intervals of a constant width with exact coverage in hindsight."""
    off = np.concatenate([np.abs(np.log(s.measured_s / s.ours.median_s)) for s in scored])
    half = float(np.exp(np.quantile(off, LEVEL)))
    ends: dict[str, Callable[[Scored], tuple[Floats, Floats]]] = {
        OURS: lambda s: (s.ours.low_s, s.ours.high_s),
        "constant width, in hindsight": lambda s: (s.ours.median_s / half, s.ours.median_s * half),
    }
    rows: list[tuple[Cell, ...]] = []
    for model, of in ends.items():
        covered = [coverage(s.measured_s, *of(s)) for s in scored]
        scores = [interval_score(s.measured_s, *of(s), LEVEL) for s in scored]
        everything = over_workloads([100 * x for x in scores], mean, options.resamples)
        rows.append((model, "mean of all", float(np.mean(covered)), everything))
        rows += [
            (model, s.name, c, over_workloads([100 * x], mean, options.resamples))
            for s, c, x in zip(scored, covered, scores, strict=True)
        ]
    title = f"{budget}: intervals of {LEVEL:.0%}, covered % and interval score of the logarithm (x 100)"
    return Table(title, ("intervals", "workload", "covered", "score"), tuple(rows))


def _decisions(budget: str, scored: list[Scored], options: Options) -> list[Table]:
    regrets: list[tuple[Cell, ...]] = []
    for model in scored[0].choices:
        found = [s.choices[model] for s in scored]
        worst = float(max(x.max() for x in found))
        regrets.append((model, sum(map(len, found)), over_workloads(found, mean, options.resamples), worst))
    late: list[tuple[Cell, ...]] = []
    for figure in scored[0].late:
        misses, excess = zip(*(s.late[figure] for s in scored), strict=True)
        share = over_workloads([100 * m for m in misses], mean, options.resamples)
        late.append((figure, sum(map(len, misses)), share, over_workloads(list(excess), mean, options.resamples)))
    return [
        Table(
            f"{budget}: slower than the best placement of the same global batch, %",
            ("model", "decisions", "mean", "worst"),
            tuple(regrets),
        ),
        Table(
            f"{budget}: cheapest placement that meets a deadline",
            ("compared with it", "deadlines", "missed, %", "device time over the minimum, %"),
            tuple(late),
        ),
    ]
