"""Inspect a table: choose target and task, sort the columns, and find problems such as a leak of the target."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

from dljob.suggest.errors import DataError
from dljob.suggest.inspection.columns import MISSING, Column, Kind, as_values, inspect_column, number
from dljob.suggest.inspection.dates import ambiguous, moment
from dljob.suggest.inspection.leaks import leak_findings
from dljob.suggest.inspection.target import RARE, target_findings, target_name, task_of
from dljob.suggest.reading.table import Table
from dljob.suggest.wording import counted, rows_of

MIN_ROWS = 10
MAX_REASONS = 5
"""Most columns that an error about a table without usable columns names with their reasons."""
COPY_ROWS = 20
"""Rows from which a column with one value for each class, and the reverse, counts as a copy of the target."""


@dataclass(frozen=True)
class TableFacts:
    """What a table holds, and what the model reads of it."""

    target: str
    task: str
    columns: tuple[Column, ...]
    """The columns that the model reads."""
    left_out: dict[str, str]
    """Name of each other column → the reason why the model does not read it."""
    rows: int
    """Number of rows with a known target."""
    test_rows: int
    """Number of rows of a separate test part that do not repeat training rows; 0 without one."""
    classes: dict[str, int]
    """Class → number of rows, most frequent first. Empty for regression."""
    findings: tuple[str, ...]
    decimal: str
    amount: str | None = None
    """Form of the target's numbers if they have a unit or thousands separators, as ``Column.amount``."""

    @property
    def rare(self) -> bool:
        """Return True if a class is so rare that accuracy says little about it."""
        if not self.classes:
            return False
        return min(self.classes.values()) < RARE * self.rows / len(self.classes)


def inspect_table(
    table: Table, target: str | None, task: str | None, test: Table | None = None, keep: Sequence[str] = ()
) -> TableFacts:
    """Return the facts about a table.

    ``target``: name of the column to predict; None: a column with a usual name, or else the last one. ``task``:
    ``classification``, ``regression``, or None: by the values of the target. ``test``: a separate test part. ``keep``:
    columns that the model reads although they look like identifiers or copies of the target; a finding warns of each.
    Raise DataError if no model can be trained.
    """
    findings = list(table.notes)
    if target is None:
        named = target_name(table)
        target = named or table.names[-1]
        why = "has a usual name of targets" if named else "is the last one"
        findings.append(f"--target is not set. The target is the column {target!r}, which {why}.")
    for option, wanted in (("--target", [target]), ("--keep", keep)):
        if unknown := [name for name in wanted if name not in table.names]:
            raise DataError(
                f"{option}: found {unknown[0]!r}; expected a column of {table.path}: {_listed(table.names)}. "
                "Correct it."
            )
    goal = table.column(target)
    known = [i for i, cell in enumerate(goal) if cell not in MISSING]
    if not known:
        raise DataError(
            f"{table.path}: column {target!r}: found no value; expected the target of each row. Choose "
            "another --target."
        )
    if len(known) < MIN_ROWS:
        raise DataError(f"{table.path}: found {len(known)} rows with a target; expected at least {MIN_ROWS}. Add rows.")
    rows = [table.cells[i] for i in known]
    goal = [goal[i] for i in known]
    chosen, (task, form, classes) = task is not None, task_of(table, target, task, goal, known)
    decimal, amount = (form, None) if form in (".", ",") else (".", None if classes else form)
    findings += target_findings(table, target, known, form, classes, chosen=chosen)
    findings += [_of_amounts(target, amount, table, known)] if amount else []
    columns: list[Column] = []
    left_out: dict[str, str] = {}
    for place, name in enumerate(table.names):
        if name == target:
            continue
        cells = [row[place] for row in rows]
        column = inspect_column(name, cells)
        reason = _reason(column, cells, goal if classes else None)
        if name in keep and column.kind is Kind.IDENTIFIER:
            column = as_values(column, cells)
        if column.kind is Kind.NUMBER and column.form == ",":
            decimal = ","
        if reason and (name not in keep or not column.usable):
            left_out[name] = f"{reason}, so --keep has no effect" if name in keep else reason
            continue
        if reason and not column.unclear:  # ``_of_column`` names what is unclear.
            findings.append(f"Column {name!r} is used because of --keep, although {reason}.")
        columns.append(column)
        findings += _of_column(column, table, known, len(rows))
    findings += leak_findings(
        columns,
        [[row[table.names.index(column.name)] for row in rows] for column in columns],
        goal,
        classes,
        form,
        random_split=test is None,
    )
    findings += [f"Column {name!r} is left out: {reason}." for name, reason in left_out.items()]
    if not columns:
        raise DataError(
            f"{table.path}: found no column that a model can learn {target!r} from{_reasons(left_out)}; expected "
            "numbers, categories or dates. Pass --keep COLUMN to use a column that was left out."
        )
    if len(columns) > len(rows):
        findings.append(
            f"The table has more columns ({len(columns)}) than rows ({len(rows)}). A network would memorize the rows, "
            "so the penalty of the linear model decides."
        )
    if test is None and classes and not _can_hold_out(table, rows, target, columns):
        raise DataError(
            f"{table.path}: found rows that differ in no column within any class of {target!r}; expected other rows "
            "for the evaluation. Pass --test FILE, or choose another --target."
        )
    repeated = len(rows) - len({tuple(row) for row in rows})
    if repeated:
        words = "is a copy of another row" if repeated == 1 else "are copies of other rows"
        findings.append(f"{repeated:,} of {rows_of(len(rows))} {words}. Equal rows stay in one part, training or test.")
    test_rows = 0
    if test is not None:
        test_rows, found = _of_test(table, test, target, rows, columns, form, classes)
        findings += found
    return TableFacts(
        target, task, tuple(columns), left_out, len(rows), test_rows, classes, tuple(findings), decimal, amount
    )


def _reasons(left_out: Mapping[str, str]) -> str:
    """Return the first columns with their reasons, in parentheses, for a message; an empty string without columns."""
    if not left_out:
        return ""
    shown = [f"column {name!r:.40}: {reason}" for name, reason in [*left_out.items()][:MAX_REASONS]]
    more = len(left_out) - len(shown)
    return f" ({'; '.join([*shown, *([f'and {more:,} more'] if more else [])])})"


def _can_hold_out(table: Table, rows: Sequence[tuple[str, ...]], target: str, columns: Sequence[Column]) -> bool:
    """Return True if a class has two rows that differ in what the model reads. Equal rows stay in one part."""
    places = [table.names.index(column.name) for column in columns]
    goal = table.names.index(target)
    first: dict[str, list[str]] = {}
    return any(
        [row[place] for place in places] != first.setdefault(row[goal], [row[p] for p in places]) for row in rows
    )


def _reason(column: Column, cells: Sequence[str], goal: Sequence[str] | None) -> str:
    """Return why the model does not read a column, or an empty string. ``goal``: the classes; None for numbers."""
    if not column.name:
        return "it has no name, so it is the index of the rows that pandas and R write"
    if column.kind is Kind.EMPTY:
        return "it has no value"
    if column.kind is Kind.CONSTANT:
        return "it has the same value in all rows"
    if column.kind in (Kind.IDENTIFIER, Kind.TEXT) and column.unclear:
        return f"it has {column.unclear}. {column.remedy}".removesuffix(".")
    if column.kind is Kind.IDENTIFIER:
        return (
            "it looks like an identifier, with another value in each row. It may predict the target of these rows, but "
            "not of new ones (a leak)"
        )
    if column.kind is Kind.TEXT:
        return "it holds free text"
    if goal is not None and column.kind in (Kind.CATEGORY, Kind.NUMBER) and len(cells) >= COPY_ROWS:
        seen: dict[str, set[str]] = defaultdict(set)
        for cell, label in zip(cells, goal, strict=True):
            seen[cell].add(label)
        if len(seen) == len(set(goal)) and all(len(labels) == 1 for labels in seen.values()):
            return "it has one value for each class, so it is a copy of the target (a leak)"
    return ""


def _of_column(column: Column, table: Table, known: Sequence[int], rows: int) -> list[str]:
    found = []
    if column.missing:
        found.append(
            f"Column {column.name!r} lacks {rows_of(column.missing)} ({column.missing / rows:.1%}). "
            + (
                "A missing value is a category of its own."
                if column.kind is Kind.CATEGORY
                else "The median fills them."
            )
        )
    if column.invalid and column.first_invalid is not None:
        line = table.lines[known[column.first_invalid]]
        cell = table.column(column.name)[known[column.first_invalid]]
        found.append(f"Column {column.name!r} has {_unread(column.invalid, column.kind, cell, f'{table.unit} {line}')}")
    if column.kind is Kind.CATEGORY and column.unclear:
        found.append(f"Column {column.name!r} has {column.unclear}. It is read as categories. {column.remedy}")
    if column.amount:
        found.append(_of_amounts(column.name, column.amount, table, known))
    if column.first_grouped is not None:
        cell = table.column(column.name)[known[column.first_grouped]]
        found.append(
            f"Column {column.name!r} has numbers such as {cell!r} in {table.unit} "
            f"{table.lines[known[column.first_grouped]]}. The comma is read as a decimal comma: remove it if it "
            "separates thousands."
        )
    if column.kind is Kind.CATEGORY and column.distinct > 100:
        found.append(
            f"Column {column.name!r} has {column.distinct:,} categories. The model reads the most frequent 32."
        )
    if column.kind is Kind.DATE:
        found.append(f"Column {column.name!r} has dates ({column.format}). The model reads age, season and weekday.")
        if column.format and ambiguous([cell for cell in table.column(column.name) if cell], column.format):
            found.append(
                f"Column {column.name!r} has no day after the 12th, so its dates may also have the day first. The "
                "month is read first. If that is wrong, write dates such as 2024-12-31."
            )
    return found


def _of_amounts(name: str, form: str, table: Table, known: Sequence[int]) -> str:
    """Return a finding about the first number with a unit or thousands separators, and its value."""
    cells = table.column(name)
    row = next(i for i in known if cells[i] not in MISSING and number(cells[i], ".") != number(cells[i], form))
    value = f"{number(cells[row], form):.12g}"
    return f"Column {name!r} has amounts such as {cells[row]!r} in {table.unit} {table.lines[row]}, read as {value}."


def _of_test(
    table: Table,
    test: Table,
    target: str,
    rows: Sequence[tuple[str, ...]],
    columns: Sequence[Column],
    form: str,
    classes: Collection[str],
) -> tuple[int, list[str]]:
    """Return the number of usable test rows, and findings.

    ``columns``: the columns that the model reads. ``form``: form of the numbers of the target. ``classes``: its
    classes; empty for regression.
    """
    names = [*(column.name for column in columns), target]
    if lacking := [name for name in names if name not in test.names]:
        raise DataError(
            f"{test.path}: found no column {lacking[0]!r}, but {_listed(test.names)}; expected the columns of "
            f"{table.path}. Add the column."
        )
    places = [table.names.index(name) for name in names]
    seen = {tuple(row[place] for place in places) for row in rows}
    own = [test.names.index(name) for name in names]
    usable = [i for i, row in enumerate(test.cells) if row[own[-1]] not in MISSING]
    if not usable:
        raise DataError(
            f"{test.path}: column {target!r}: found no value in {rows_of(len(test.cells))}; expected the target of "
            "each row, because the test part judges the model. Add the values, or leave out --test."
        )
    fresh = [i for i in usable if tuple(test.cells[i][place] for place in own) not in seen]
    if not fresh:
        raise DataError(
            f"{test.path}: found {rows_of(len(usable))} with a target, all of which repeat rows of {table.path}; "
            "expected rows that the model has not seen. Leave out --test to hold out a fifth of the rows."
        )
    found = []
    if repeated := len(usable) - len(fresh):
        words = "repeats a training row" if repeated == 1 else "repeat training rows"
        found.append(
            f"{repeated:,} of {rows_of(len(usable))} of {test.path} {words}. The evaluation leaves such rows out."
        )
    goal = {i: test.cells[i][own[-1]] for i in fresh}
    unknown = [i for i, cell in goal.items() if (cell not in classes if classes else isnan(number(cell, form)))]
    if unknown and (not classes or len(unknown) == len(fresh)):
        expected = f"its classes in {table.path}: {_listed([*classes])}" if classes else "a number in each row"
        raise DataError(
            f"{test.path}: {test.unit} {test.lines[unknown[0]]}: column {target!r}: found {goal[unknown[0]]!r:.60}; "
            f"expected {expected}. Correct it."
        )
    if unknown:
        words = "has a class" if len(unknown) == 1 else "have a class"
        found.append(
            f"{len(unknown):,} of {rows_of(len(fresh))} of {test.path} {words} that the training rows lack, such as "
            f"{goal[unknown[0]]!r:.60}. The evaluation leaves such rows out."
        )
    return len(fresh), found + [text for column in columns for text in _of_test_column(column, table, test)]


def _of_test_column(column: Column, table: Table, test: Table) -> list[str]:
    """Return a finding about a column of the test part whose cells cannot be read like those of the training part."""
    own = zip(test.lines, test.column(column.name), strict=True)
    cells = [(line, cell) for line, cell in own if cell not in MISSING]
    what = f"Column {column.name!r} of {test.path}"
    if column.kind is Kind.CATEGORY:
        known = set(table.column(column.name))
        if not cells or any(cell in known for _, cell in cells):
            return []
        return [f"{what} has no category of the training rows, but others, such as {cells[0][1]!r:.40}."]

    def read(cell: str) -> bool:
        if column.kind is Kind.DATE:
            return moment(cell, column.format or "") is not None
        return not isnan(number(cell, column.form))

    bad = [(line, cell) for line, cell in cells if not read(cell)]
    if not bad:
        return []
    return [f"{what} has {_unread(len(bad), column.kind, bad[0][1], f'{test.unit} {bad[0][0]}')}"]


def _unread(count: int, kind: Kind, cell: str, place: str) -> str:
    """Return the end of a sentence about cells that are of another kind than their column."""
    cells = counted(count, f"cell that is no {kind.value}", f"cells that are no {kind.value}s")
    return f"{cells}, such as {cell!r:.40} in {place}. {'It counts' if count == 1 else 'They count'} as missing."


def _listed(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")
