"""Find the kind of each column of a table: number, category, date, identifier, free text or constant."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from dljob.suggest.inspection import amounts, dates
from dljob.suggest.inspection.amounts import COMMA, POINT, amount, amounts_of
from dljob.suggest.inspection.dates import date_format, mixed_formats, moment

MISSING = frozenset({"", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "-", "?", "#N/A"})
"""Cells that mean an unknown value, as R, pandas, SQL and spreadsheets write it."""
MISSING |= {"<NA>", "NaT", "N.A.", "n.a.", "\\N", "#DIV/0!", "#VALUE!", "#REF!"}
GROUPED = re.compile(r"[-+]?\d{1,3},\d{3}")
"""A number with a comma that may separate thousands."""
MAX_NUMBER = 1e100
"""Largest absolute value of a number. The squares of larger ones, and so deviations, would be infinite."""
MIN_NUMBERS = 0.95
"""A column with this part of numbers among its known cells is a column of numbers. The other cells count as missing."""
WITH_UNIT = re.compile(r"[-+]?\d+(?:[.,]\d+)?\s*([A-Za-zµ°Å²³/]{1,6})")
MAX_WORDS = 5
"""More different words among numbers than these are codes."""
MIN_IDENTIFIER_ROWS = 20
UNIQUE = 0.95
"""A text column with this part of distinct values tells rows apart, and nothing else."""
IDENTIFIER_NAME = re.compile(
    r"(^|[_\s.-])(id|uuid|guid|key|index|idx|row|rownum|nr|no|serial)$|^unnamed", re.IGNORECASE
)
CAMEL_CASE_IDENTIFIER = re.compile(r"[a-z](Id|ID|Key|UUID|No|Nr)$")
"""Names such as PassengerId, but not such as valid."""


class Kind(StrEnum):
    NUMBER = "number"
    CATEGORY = "category"
    DATE = "date"
    IDENTIFIER = "identifier"
    TEXT = "text"
    CONSTANT = "constant"
    EMPTY = "empty"


@dataclass(frozen=True)
class Column:
    """What a column holds. ``format``: the format of its dates. ``decimal_comma``: it writes 3.5 as 3,5."""

    name: str
    kind: Kind
    distinct: int
    missing: int
    invalid: int = 0
    """Number of known cells that are not of this kind. They count as missing."""
    first_invalid: int | None = None
    """Index of the row with the first such cell."""
    format: str | None = None
    decimal_comma: bool = False
    first_grouped: int | None = None
    """Index of the first row with a number such as 1,234, if all decimal commas stand before three digits."""
    amount: str | None = None
    """Form of its numbers if they have a unit or thousands separators, such as ``amounts.POINT``."""
    unclear: str = ""
    """What its cells look like if they are numbers that cannot be read with certainty, as a noun phrase."""

    @property
    def usable(self) -> bool:
        """Return True if a model can learn from the column."""
        return self.kind in (Kind.NUMBER, Kind.CATEGORY, Kind.DATE)

    @property
    def remedy(self) -> str:
        """Return what the user can do about ``unclear``."""
        return dates.REMEDY if self.unclear.startswith("dates") else amounts.REMEDY

    @property
    def form(self) -> str:
        """Return the form of its numbers, for ``number``: the decimal sign, or a form of amounts."""
        return self.amount or ("," if self.decimal_comma else ".")


def inspect_column(name: str, cells: Sequence[str]) -> Column:
    """Return the kind of values in a column, with facts about them, from the column's cells."""
    known = [cell for cell in cells if cell not in MISSING]
    counts = Counter(known)
    missing, distinct = len(cells) - len(known), len(counts)
    if distinct == 0:
        return Column(name, Kind.EMPTY, 0, missing)
    if distinct == 1:
        kind = Kind.CATEGORY if missing >= MIN_IDENTIFIER_ROWS else Kind.CONSTANT
        return Column(name, kind, 1, missing)
    comma = sum(count for cell, count in counts.items() if _value(cell, ",") is not None)
    point = sum(count for cell, count in counts.items() if _value(cell, ".") is not None)
    decimal = "," if comma > point else "."
    found = amounts_of(counts) if max(comma, point) < len(known) else None
    if found is not None and found.form:
        named = not found.unit and _identifies(name, [*found.values.values()], len(known))
        kind = Kind.IDENTIFIER if named else Kind.NUMBER
        return Column(name, kind, distinct, missing, decimal_comma=found.form == COMMA, amount=found.form)
    if max(comma, point) >= MIN_NUMBERS * len(known):
        bad = [i for i, cell in enumerate(cells) if cell not in MISSING and _value(cell, decimal) is None]
        values = [value for cell in counts if (value := _value(cell, decimal)) is not None]
        kind = Kind.IDENTIFIER if _identifies(name, values, len(known)) else Kind.NUMBER
        grouped = None
        if decimal == "," and all(GROUPED.fullmatch(cell) for cell in counts if "," in cell):
            grouped = next(i for i, cell in enumerate(cells) if "," in cell)
        first = bad[0] if bad else None
        return Column(name, kind, distinct, missing, len(bad), first, None, decimal == ",", grouped)
    if dated := date_format(counts):
        bad = [i for i, cell in enumerate(cells) if cell not in MISSING and moment(cell, dated) is None]
        return Column(name, Kind.DATE, distinct, missing, len(bad), bad[0] if bad else None, format=dated)
    unclear = (found.unclear if found is not None else "") or _nearly_numbers(counts) or mixed_formats(counts)
    if len(known) >= MIN_IDENTIFIER_ROWS and distinct >= UNIQUE * len(known):
        blanks = sum(cell.count(" ") for cell in counts) / distinct
        return Column(name, Kind.TEXT if blanks >= 2 else Kind.IDENTIFIER, distinct, missing, unclear=unclear)
    return Column(name, Kind.CATEGORY, distinct, missing, unclear=unclear)


def as_values(column: Column, cells: Sequence[str]) -> Column:
    """Return a column of identifiers as one of numbers, or of categories if its cells are no numbers."""
    numeric = all(number(cell, column.form) == number(cell, column.form) for cell in cells if cell not in MISSING)
    return replace(column, kind=Kind.NUMBER if numeric else Kind.CATEGORY)


def number(text: str, form: str) -> float:
    """Return the value of a cell, or NaN if it is missing, no number or above ``MAX_NUMBER``.

    ``form``: as ``Column.form``.
    """
    value = amount(text, form) if form in (POINT, COMMA) else _value(text, form if "." not in text else ".")
    return math.nan if text in MISSING or value is None else value


def _value(text: str, decimal: str) -> float | None:
    if "_" in text or (decimal == "," and "." in text):
        return None
    text = text.removesuffix("%")
    try:
        value = float(text.replace(",", ".") if decimal == "," else text)
    except ValueError:
        return None
    return value if abs(value) <= MAX_NUMBER else None  # NaN is no number either.


def is_large(text: str) -> bool:
    """Return True for a number above ``MAX_NUMBER``, which is not read, or for infinity."""
    try:
        return abs(float(text.replace(",", "."))) > MAX_NUMBER
    except ValueError:
        return False


def _identifies(name: str, values: Sequence[float], rows: int) -> bool:
    """Return True for whole numbers that differ in all rows and are either named so or nearly consecutive."""
    if rows < MIN_IDENTIFIER_ROWS or len(values) < rows or any(value % 1 for value in values):
        return False
    return names_identifier(name) or max(values) - min(values) < 1.05 * rows


def _nearly_numbers(counts: Counter[str]) -> str:
    """Return what the cells look like if they have one unit, or a few words among numbers, as a noun phrase."""
    units = [match[1] if (match := WITH_UNIT.fullmatch(cell)) else "" for cell in counts]
    if len(counts) > MAX_WORDS and units[0] and len(set(units)) == 1:
        return f"numbers with the unit {units[0]!r}, such as {next(iter(counts))!r}"
    words = [cell for cell in counts if _value(cell, ".") is None and _value(cell, ",") is None]
    if len(words) > MAX_WORDS or len(counts) < 3 * MAX_WORDS or 2 * sum(counts[w] for w in words) > counts.total():
        return ""
    one = next(cell for cell in counts if cell not in words)
    return f"numbers such as {one!r}, but also {words[0]!r:.40} in {counts[words[0]]} rows"


def names_identifier(name: str) -> bool:
    """Return True for a usual name of identifiers, such as ``id``, ``customer_id`` or ``PassengerId``."""
    name = name.strip()
    return IDENTIFIER_NAME.search(name) is not None or CAMEL_CASE_IDENTIFIER.search(name) is not None
