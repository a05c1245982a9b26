"""Find columns that alone predict the target, groups of rows that belong together, and rows in time order."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dljob.suggest.inspection.columns import MISSING, Column, Kind, names_identifier, number
from dljob.suggest.inspection.dates import moment

MIN_ROWS = 20
"""Rows from which a column that predicts the target is no chance."""
MIN_CLASS_ROWS = 5
"""Rows of the rarest class from which such a column is no chance, also among hundreds of columns."""
MAX_ROWS = 20_000
"""Rows that are compared, evenly spread over the table."""
ERRORS = 0.02
"""A column alone predicts the classes if it leaves at most this part of the errors of the most frequent class."""
CORRELATION = 0.9999
"""A column alone predicts numbers if the correlation of values or of ranks is at least this."""
GROUP_ROWS = 2
"""Rows that a group has on average, at least."""


def leak_findings(
    columns: Sequence[Column],
    cells: Sequence[Sequence[str]],
    goal: Sequence[str],
    classes: Collection[str],
    form: str,
    *,
    random_split: bool,
) -> list[str]:
    """Return findings about the columns that the model reads, each of which may make its scores too good.

    ``cells``: the cells of each column. ``goal``: the target of each row. ``classes``: its classes; empty for
    regression. ``form``: form of the target's numbers, as ``Column.form``. ``random_split``: True if the test part is
    a random part of the rows.
    """
    found = []
    for column, own in zip(columns, cells, strict=True):
        found.append(_predictor(column, own, goal, classes, form))
        if random_split:
            found += [_group(column, own), _time_order(column, own)]
    return [text for text in found if text]


def _predictor(column: Column, cells: Sequence[str], goal: Sequence[str], classes: Collection[str], form: str) -> str:
    stride = -(-len(goal) // MAX_ROWS)
    cells, goal = cells[::stride], goal[::stride]
    if len(goal) < MIN_ROWS or (column.kind is Kind.DATE and not column.missing):
        return ""
    found = _of_classes(column, cells, goal) if classes else _of_numbers(column, cells, goal, form)
    if not found:
        return ""
    return (
        f"Column {column.name!r} alone predicts the target of {found}. It is a leak if it is known only after the "
        "target: then remove it from the table."
    )


def _of_classes(column: Column, cells: Sequence[str], goal: Sequence[str]) -> str:
    counts = Counter(goal)
    if len(counts) < 2 or min(counts.values()) < MIN_CLASS_ROWS:
        return ""
    most = ERRORS * (len(goal) - max(counts.values()))
    known = [cell not in MISSING for cell in cells]
    if not all(known) and (errors := _errors(known, goal)) <= most:
        return f"{_part(errors, len(goal))}, by where its cells are empty"
    groups: Sequence[object]
    if column.kind is Kind.NUMBER:
        values = np.array([number(cell, column.form) for cell in cells])
        groups = _intervals(values, goal, len(counts))
    else:
        groups = list(cells) if MIN_CLASS_ROWS * column.distinct <= len(goal) else []
    if not groups or (errors := _errors(groups, goal)) > most:
        return ""
    return _part(errors, len(goal))


def _part(errors: int, rows: int) -> str:
    return f"{1 - errors / rows:.1%} of the rows" if errors else "all rows"


def _errors(groups: Sequence[object], goal: Sequence[str]) -> int:
    """Return how many rows do not have the most frequent class of their group."""
    counts: dict[object, Counter[str]] = defaultdict(Counter)
    for group, label in zip(groups, goal, strict=True):
        counts[group][label] += 1
    return sum(own.total() - max(own.values()) for own in counts.values())


def _intervals(values: NDArray[np.float64], goal: Sequence[str], most: int) -> list[int]:
    """Return the interval of each value, for at most ``most`` intervals; empty: more would be needed.

    Of two classes, the cut with the fewest errors makes two intervals. NaN has an interval of its own.
    """
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(values[known], kind="stable")]
    if len(order) < MIN_ROWS:
        return []
    ordered = values[order]
    intervals = np.zeros(len(values), dtype=np.int64)
    intervals[~np.isfinite(values)] = -1
    ends = np.flatnonzero(np.diff(ordered)) + 1  # A cut separates different values only.
    if not len(ends):
        return []
    if most == 2:
        second = np.array([label == goal[0] for label in goal])[order].cumsum()
        total, below = second[-1], second[ends - 1]
        wrong = below + (len(order) - ends) - (total - below)  # The second class below the cut, the first one above.
        best = int(np.argmin(np.minimum(wrong, len(order) - wrong)))
        intervals[order[ends[best] :]] = 1
        return intervals.tolist()
    labels = [goal[i] for i in order]
    changes = [i for i, (one, other) in enumerate(pairwise(labels), 1) if one != other]
    if len(changes) >= most or not set(changes) <= set(ends.tolist()):
        return []
    for change in changes:
        intervals[order[change:]] += 1
    return intervals.tolist()


def _of_numbers(column: Column, cells: Sequence[str], goal: Sequence[str], form: str) -> str:
    if column.kind is not Kind.NUMBER:
        return ""
    x = np.array([number(cell, column.form) for cell in cells])
    y = np.array([number(cell, form) for cell in goal])
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < MIN_ROWS or np.ptp(x / 2) == 0 or np.ptp(y / 2) == 0:
        return ""
    values, ranks = _correlation(x, y), _correlation(_ranks(x), _ranks(y))
    if max(values, ranks) < CORRELATION:
        return ""
    return f"all rows (correlation of {'values' if values >= CORRELATION else 'ranks'} {max(values, ranks):.5f})"


def _correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    # Divided first: the squares of enormous numbers are no floating-point numbers.
    x, y = x / np.abs(x).max(), y / np.abs(y).max()
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return abs(float(x @ y)) / norm if norm else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.unique(values, return_inverse=True)[1].astype(np.float64)


def _group(column: Column, cells: Sequence[str]) -> str:
    if column.kind not in (Kind.NUMBER, Kind.CATEGORY) or not names_identifier(column.name):
        return ""
    known = len(cells) - column.missing
    if len(cells) < MIN_ROWS or column.distinct < 2 or known < GROUP_ROWS * column.distinct:
        return ""
    return (
        f"Column {column.name!r} looks like an identifier of groups: {column.distinct:,} in {known:,} rows. Rows of "
        "one group are in both parts, so the scores are too good for new groups. Pass --test FILE with other groups, "
        "and remove the column if new groups are to be predicted."
    )


def _time_order(column: Column, cells: Sequence[str]) -> str:
    if column.kind is not Kind.DATE or column.format is None or len(cells) < MIN_ROWS:
        return ""
    times = [time for cell in cells if (time := moment(cell, column.format)) is not None]
    if len(set(times)) < MIN_ROWS:
        return ""
    steps = [other - one for one, other in pairwise(times)]
    if not (all(step >= 0 for step in steps) or all(step <= 0 for step in steps)):
        return ""
    return (
        f"The rows are in the order of the dates in {column.name!r}, but the test part is a random fifth of them. If "
        "the model is to predict later rows, the scores are too good. Pass --test FILE with the last rows, and "
        "without them in the table."
    )
