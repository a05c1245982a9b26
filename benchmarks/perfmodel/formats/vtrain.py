"""Format ``vtrain``: iterations of GPT models by tensor, data and pipeline parallelism. Files ``ground_truth_*.csv``.

The model sees a random tenth of the rows and the others are scored, over ``--seeds`` draws: for each file, for all
files, and for the purely data-parallel rows.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.perfmodel.models.transformer import Configuration, fitted, terms
from benchmarks.perfmodel.scoring.compare import compared, dropped
from benchmarks.perfmodel.scoring.scoring import Floats, ape
from benchmarks.perfmodel.scoring.table import Options, Table

COLUMNS = (
    "global batch",
    "micro batch",
    "hidden size",
    "attention heads",
    "# layers",
    "sequence length",
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
)
TIME = "iteration time (ms)"
GIVEN_FRACTION = 0.1
MIN_GIVEN = 3
Row = tuple[Configuration, float]


def run(directory: Path, options: Options) -> list[Table]:
    """Return tables for all rows and for the purely data-parallel ones."""
    files = sorted(directory.rglob("ground_truth_*.csv"))
    complaints: list[str] = []
    sets = {path.stem.removeprefix("ground_truth_"): load(path, complaints) for path in files}
    sets = {name: rows for name, rows in sets.items() if options.wants(name)}
    if not sets:
        raise ValueError(f"{directory}: found no selected ground_truth_*.csv; expected vTrain's measured iterations")
    if len(sets) > 1:
        sets["all files"] = [row for rows in sets.values() for row in rows]
    tables = []
    for name, rows in sets.items():
        pure = [row for row in rows if row[0].is_data_parallel]
        for kind, chosen in (("all", rows), ("pure data parallel", pure)):
            if len(chosen) >= 4 * MIN_GIVEN:
                title = f"vTrain {name}, {kind}: {100 * GIVEN_FRACTION:.0f} % of {len(chosen)} rows given"
                tables.append(_scored(title, chosen, options, dropped(complaints)))
    return tables


def _scored(title: str, rows: Sequence[Row], options: Options, note: str) -> Table:
    errors: dict[str, dict[str, Floats]] = {"model": {}, "operations per device": {}, "nearest given row": {}}
    for seed in range(options.seeds):
        order = np.random.default_rng(seed).permutation(len(rows))
        count = max(MIN_GIVEN, round(GIVEN_FRACTION * len(rows)))
        given, rest = [rows[i] for i in order[:count]], [rows[i] for i in order[count:]]
        queried, measured = [c for c, _ in rest], np.array([t for _, t in rest])
        learned = fitted([c for c, _ in given], [t for _, t in given])
        errors["model"][f"draw {seed}"] = ape(measured, learned.seconds(queried))
        work, known = _operations([c for c, _ in given]), np.array([t for _, t in given])
        per_operation = float(np.exp(np.median(np.log(known / work))))
        errors["operations per device"][f"draw {seed}"] = ape(measured, per_operation * _operations(queried))
        near = [int(np.argmin(np.abs(np.log(work / w)))) for w in _operations(queried)]
        errors["nearest given row"][f"draw {seed}"] = ape(measured, known[near])
    return compared(title, errors, options, note)


def _operations(configurations: Sequence[Configuration]) -> Floats:
    """Return the operations of matrix products per device, which give the peak-FLOP ratio."""
    return terms(configurations)["matrix products"]


def load(path: Path, complaints: list[str]) -> list[Row]:
    """Read configurations and seconds. Append the errors of skipped rows to ``complaints``."""
    rows: list[Row] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        if missing := [c for c in (*COLUMNS, TIME) if c not in (reader.fieldnames or ())]:
            raise ValueError(f"{path}: no column {', '.join(missing)}; expected {', '.join((*COLUMNS, TIME))}")
        for number, row in enumerate(reader, start=2):
            try:
                configuration = Configuration(*(float(row[c]) for c in COLUMNS))
                seconds = float(row[TIME]) / 1e3
            except (ValueError, TypeError) as e:
                complaints.append(f"{path.name} line {number}: {e}")
                continue
            if 0 < seconds < np.inf:
                rows.append((configuration, seconds))
            else:
                complaints.append(f"{path.name} line {number}: {seconds:g} s")
    return rows
