"""Make one table from the errors of several methods over several groups of keys."""

from collections.abc import Mapping, Sequence

import numpy as np
from benchmarks.perfmodel.scoring.scoring import Floats, mean, median, over_workloads, p90
from benchmarks.perfmodel.scoring.table import Cell, Options, Table

COLUMNS = ("method", "group", "keys", "mean", "median", "p90")
Errors = Mapping[str, Mapping[str, Floats]]
"""Method → group → absolute percentage errors. The first method is the model, the others are baselines."""


def compared(title: str, errors: Errors, options: Options, note: str = "") -> Table:
    """Score the methods over all groups (unweighted mean) and over all keys, then the model by group."""
    measures = (mean, median, p90)
    rows: list[tuple[Cell, ...]] = []
    for method, groups in errors.items():
        every = [e for e in groups.values() if len(e)]
        if not every:
            raise ValueError(f"{title}: found nothing to score; expected more keys than the model sees")
        keys = sum(map(len, every))
        rows.append((method, "groups", keys, *(over_workloads(every, m, options.resamples) for m in measures)))
        pooled = [np.concatenate(every)]
        rows.append((method, "keys", keys, *(over_workloads(pooled, m, options.resamples) for m in measures)))
    model = next(iter(errors))
    if len(errors[model]) > 1:
        for name, e in errors[model].items():
            if len(e):
                rows.append((model, name, len(e), *(over_workloads([e], m, options.resamples) for m in measures)))
    return Table(f"{title}, %", COLUMNS, tuple(rows), note)


def dropped(complaints: Sequence[str], most: int = 4) -> str:
    """Return a note on rows that are not valid measurements."""
    if not complaints:
        return ""
    more = f" and {len(complaints) - most} more" if len(complaints) > most else ""
    return f"skipped: {'; '.join(complaints[:most])}{more}"
