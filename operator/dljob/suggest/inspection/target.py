"""Inspect the target of a table: classes or numbers, and what is unusual about them."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import log
from statistics import quantiles

from dljob.suggest.errors import DataError
from dljob.suggest.inspection.columns import MAX_NUMBER, MISSING, Kind, inspect_column, is_large, number
from dljob.suggest.reading.table import Table
from dljob.suggest.wording import counted, rows_of

TARGET_NAMES = ("target", "label", "class", "y", "outcome", "species", "category", "diagnosis")
FEATURE_NAMES = ("y", "category")
"""Those of them that features have too, such as coordinates x and y: targets stand in the first or the last column."""
CLASSIFICATION, REGRESSION = "classification", "regression"
MAX_NUMBERED_CLASSES = 20
"""Whole numbers with at most this many values are classes, if no task is given."""
FEW_NUMBERED_CLASSES = 5
"""More whole numbers than these may also be counts or grades, so a finding says that they are classes."""
MAX_CLASSES = 1000
RARE = 0.1
"""If the rarest class has less than this part of the rows of an equal share, classes are weighted."""
OUTLIER = 20
"""A target at so many interquartile ranges from the median is an outlier. Heavy tails of real prices stay below."""

MIN_SPREAD = 1e-100
"""Least difference between the largest and the smallest target. The squares of smaller ones would be 0."""
SKEWED = 0.01
"""From this part of outliers on, they may be a tail instead of errors."""


def target_name(table: Table) -> str | None:
    """Return the column with a usual name of targets, or None."""
    edges = (table.names[0], table.names[-1])
    return next(
        (
            name
            for usual in TARGET_NAMES
            for name in table.names
            if name.strip().lower() == usual and (usual not in FEATURE_NAMES or name in edges)
        ),
        None,
    )


def task_of(
    table: Table, target: str, task: str | None, goal: Sequence[str], known: Sequence[int]
) -> tuple[str, str, dict[str, int]]:
    """Return task, form of the target's numbers (``Column.form``), and the classes with their numbers of rows."""
    column, counts = inspect_column("", goal), Counter(goal)
    if len(counts) == 1:
        raise DataError(
            f"{table.path}: column {target!r}: found the value {goal[0]!r} in all rows; expected at least two values. "
            "Choose another --target."
        )
    if column.unclear and (task == REGRESSION or len(counts) > MAX_NUMBERED_CLASSES):
        raise DataError(
            f"{table.path}: column {target!r}: found {column.unclear}; expected numbers that can be read in one way "
            f"only. {column.remedy}"
        )
    if column.kind is Kind.DATE and task is None:
        raise DataError(
            f"{table.path}: column {target!r}: found dates such as {goal[0]!r}; expected classes or numbers. Choose "
            "another --target, write the dates as numbers of days, or pass --task tabular-classification."
        )
    values = [number(cell, column.form) for cell in goal]
    numeric = column.kind in (Kind.NUMBER, Kind.IDENTIFIER) and any(value == value for value in values)
    if task is None:
        whole = all(value % 1 == 0 for value in values if value == value)
        few = len(counts) <= min(MAX_NUMBERED_CLASSES, len(goal) / 2)
        task = REGRESSION if numeric and not (whole and few) else CLASSIFICATION
    if task == REGRESSION:
        for i, value in zip(known, values, strict=True):
            if value != value:
                cell = table.column(target)[i]
                expected = "a number, because the task is regression"
                remedy = "Correct it, or pass --task tabular-classification."
                if is_large(cell):
                    expected = f"a number of at most {MAX_NUMBER:g}, because larger ones have no finite squares"
                    remedy = "Correct it, or write the logarithm of the target."
                raise DataError(
                    f"{table.path}: {table.unit} {table.lines[i]}: column {target!r}: found {cell!r:.60}; expected "
                    f"{expected}. {remedy}"
                )
        if max(values) - min(values) < MIN_SPREAD:
            raise DataError(
                f"{table.path}: column {target!r}: found numbers such as {goal[0]!r:.60} that are equal, or nearly, as "
                f"64-bit floats; expected differences of at least {MIN_SPREAD:g}. Subtract a constant, use another "
                "unit, or choose another --target."
            )
        return task, column.form, {}
    classes = dict(counts.most_common())
    if len(classes) > MAX_CLASSES or len(classes) > len(goal) / 2:
        raise DataError(
            f"{table.path}: column {target!r}: found {len(classes):,} classes in {len(goal):,} rows; expected at most "
            f"{MAX_CLASSES:,}, with at least two rows each on average. Merge rare classes, choose another --target, or "
            "pass --task tabular-regression for numbers."
        )
    return task, column.form, classes


def target_findings(
    table: Table,
    target: str,
    known: Sequence[int],
    form: str,
    classes: Mapping[str, int],
    *,
    chosen: bool,
) -> list[str]:
    """Return findings about the target. ``known``: the rows that have it. ``chosen``: True if the user gave the task.

    ``form``, ``classes``: what ``task_of`` returns.
    """
    cells = table.column(target)
    found = []
    if gap := len(cells) - len(known):
        first = next(i for i, cell in enumerate(cells) if cell in MISSING)
        shown = f", with {cells[first]!r}" if cells[first] else ""
        found.append(
            f"{rows_of(gap)} without a target {'is' if gap == 1 else 'are'} left out; the first is {table.unit} "
            f"{table.lines[first]}{shown}."
        )
        if words := sorted({cell for cell in cells if cell in MISSING and cell.isalpha() and classes}):
            found.append(f"{words[0]!r} counts as a missing target. If it is a class, write another word.")
    if classes:
        return found + _of_classes(classes, len(known)) + _alike(classes) + ([] if chosen else _numbered(classes))
    return found + _of_numbers(table, [cells[i] for i in known], form, known)


def _alike(classes: Collection[str]) -> list[str]:
    """Return a finding about two classes that are the same number, such as 1 and 1.0, or differ in case or blanks."""
    numbers: dict[float, str] = {}
    words: dict[str, str] = {}
    for name in classes:
        value = number(name, ".")
        if value == value and numbers.setdefault(value, name) != name:
            return [f"Classes {numbers[value]!r} and {name!r} are the same number, but count as two. Write them alike."]
        if (other := words.setdefault(" ".join(name.split()).casefold(), name)) != name:
            return [
                f"Classes {other!r} and {name!r} differ in case or blanks only, but count as two. Write them alike."
            ]
    return []


def _numbered(classes: Collection[str]) -> list[str]:
    """Return findings about classes that are numbers, or nearly all of which are."""
    words = [name for name in classes if number(name, ".") != number(name, ".")]
    if len(words) == len(classes):
        return []
    if len(words) == 1 and len(classes) > 2:
        return [f"Class {words[0]!r:.60} is no number, unlike the others. Leave its cells empty if it means unknown."]
    if words or len(classes) <= FEW_NUMBERED_CLASSES:
        return []
    return [
        f"The {len(classes)} whole numbers of the target are read as classes. Pass --task tabular-regression if they "
        "are amounts or grades, of which some are nearer to each other than others."
    ]


def _of_classes(classes: Mapping[str, int], rows: int) -> list[str]:
    rarest, count = min(classes.items(), key=lambda item: item[1])
    found = [
        f"Class {rarest!r} is rare: {count} of {rows} rows ({count / rows:.1%}). Classes are weighted, and balanced "
        "accuracy is the measure: always answering with the most frequent class would look good otherwise."
    ]
    if count >= RARE * rows / len(classes):
        found = []
    return found + single_findings(classes, "row")


def single_findings(classes: Mapping[str, int], unit: str) -> list[str]:
    """Return a finding about classes with one sample. ``unit``: the word for a sample, such as ``image``."""
    single = [name for name, count in classes.items() if count == 1]
    if not single:
        return []
    if len(single) == 1:
        return [f"Class {single[0]!r:.60} has one {unit}. The test part cannot judge it."]
    return [f"{len(single)} classes have one {unit}, such as {single[0]!r:.60}. The test part cannot judge them."]


def _of_numbers(table: Table, goal: Sequence[str], form: str, known: Sequence[int]) -> list[str]:
    """Return a finding about numbers of a target so far from the others that they alone decide the loss."""
    values = [number(cell, form) for cell in goal]
    far = _far(values)
    if not far:
        return []
    skewed = min(values) > 0 and len(far) >= SKEWED * len(values) and not _far([log(value) for value in values])
    return [
        f"The target has {counted(len(far), 'value', 'values')} far from the others, such as {goal[far[0]]!r:.40} in "
        f"{table.unit} {table.lines[known[far[0]]]}. {'It dominates' if len(far) == 1 else 'They dominate'} a squared "
        "loss: "
        + (
            "predict the logarithm, which has no such values, or remove errors."
            if skewed
            else "correct or remove errors."
        )
    ]


def _far(values: Sequence[float]) -> list[int]:
    """Return the indices of the values that are outliers."""
    low, middle, high = quantiles(values, n=4)
    return [i for i, value in enumerate(values) if high > low and abs(value - middle) > OUTLIER * (high - low)]
