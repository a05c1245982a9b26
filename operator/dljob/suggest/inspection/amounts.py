"""Read numbers with a currency sign, a percent sign or thousands separators, such as $1,200.50 and 1.200,50 €.

The separators of a column are found from all of its cells. A column is not read if its cells allow two readings, or if
they may be telephone numbers, versions or codes instead: these have groups of digits, but no unit and no fraction.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

POINT, COMMA = "amount 1,234.5", "amount 1.234,5"
"""Forms of amounts with a decimal point and with a decimal comma. Blanks and apostrophes may separate thousands too."""
REMEDY = "Write plain numbers in one unit, such as 1234.5, and leave unknown cells empty."

_BLANK = "[ \u00a0\u202f]"
_SIGNS = r"(?:US|CA|C|AU|A|NZ|HK|S|R)?\$|[€£¥₹₽₩₺₪฿₫%]"
_CODES = (
    "AUD|BRL|CAD|CHF|CNY|CZK|DKK|EUR|GBP|HKD|HUF|INR|JPY|KRW|MXN|NOK|NZD|PLN|RUB|SEK|SGD|TRY|USD|ZAR|Fr|Ft|Kč|kr|zł"
)
_UNIT = rf"(?:{_SIGNS}|(?:{_CODES})(?![A-Za-z])|Rs\.)"
_CELL = re.compile(
    rf"(?P<open>\()?(?P<sign>[-−+])?{_BLANK}?(?P<before>{_UNIT})?{_BLANK}?(?P<inner>[-−+])?"
    rf"(?P<digits>\d(?:[\d.,'’ \u00a0\u202f]*\d)?){_BLANK}?(?P<after>{_UNIT})?(?P<close>\))?"
)
_GROUPS = {",": ",", ".": r"\.", "blank": _BLANK, "apostrophe": "['’]"}
"""Separator of thousands → its pattern."""


@dataclass(frozen=True)
class Amounts:
    """The amounts of a column. ``form``: ``POINT`` or ``COMMA``; empty: the cells are not clear.

    ``values``: cell → its value. ``unit``: True if cells have a currency or percent sign. ``unclear``: what the cells
    look like, as a noun phrase.
    """

    form: str
    values: dict[str, float]
    unit: bool = False
    unclear: str = ""


def amounts_of(cells: Collection[str]) -> Amounts | None:
    """Return the amounts in the different known cells of a column; None if it has something else."""
    found = {cell: part for cell in cells if (part := _parts(cell)) is not None}
    if len(found) < len(cells):
        shown = next((cell for cell, (_, _, unit) in found.items() if unit), None)
        if shown is None or 2 * len(found) < len(cells):
            return None
        other = next(cell for cell in cells if cell not in found)
        return Amounts("", {}, True, f"amounts such as {shown!r}, but also {other!r:.40}")
    units = {unit: next(cell for cell in found if found[cell][2] == unit) for _, _, unit in found.values() if unit}
    readings = _readings({cell: digits for cell, (_, digits, _) in found.items()}, bare=not units)
    if not readings:
        return None
    if len(units) > 1:
        shown = " and ".join(map(repr, [*units.values()][:2]))
        return Amounts("", {}, True, f"amounts in several units, such as {shown}")
    if len(readings) > 1:
        first, second = readings.values()
        cell = next(cell for cell in found if first[cell] != second[cell])
        text = f"numbers such as {cell!r}, which may mean {first[cell]:.12g} or {second[cell]:.12g}"
        return Amounts("", {}, bool(units), text)
    ((form, values),) = readings.items()
    return Amounts(form, {cell: sign * values[cell] for cell, (sign, _, _) in found.items()}, bool(units))


def amount(text: str, form: str) -> float | None:
    """Return the value of a cell in the ``form`` of its column, or None."""
    if (part := _parts(text)) is None:
        return None
    value = next((value for group in _GROUPS if (value := _value(part[1], form, group)) is not None), None)
    return None if value is None else part[0] * value


def _parts(cell: str) -> tuple[float, str, str] | None:
    """Return (1 or -1, digits with separators, unit) of a cell; None if it has another form."""
    match = _CELL.fullmatch(cell)
    if match is None or bool(match["open"]) != bool(match["close"]):
        return None
    signs = [sign for sign in (match["sign"], match["inner"], match["open"]) if sign]
    if len(signs) > 1 or (match["before"] and match["after"]):
        return None
    sign = -1.0 if signs and signs[0] != "+" else 1.0
    return sign, match["digits"], match["before"] or match["after"] or ""


def _readings(digits: dict[str, str], *, bare: bool) -> dict[str, dict[str, float]]:
    """Return {form: {cell: value}} for the forms that all cells have, without a form that gives the same values.

    ``bare``: True if no cell has a unit. Then blanks, apostrophes and points separate thousands only beside fractions.
    """
    found: dict[str, dict[str, float]] = {}
    for form in (POINT, COMMA):
        for group in _GROUPS:
            values = {cell: _value(text, form, group) for cell, text in digits.items()}
            read = {cell: value for cell, value in values.items() if value is not None}
            fractions = any(_decimal(form) in text for text in digits.values())
            if len(read) < len(digits) or (bare and group != "," and not fractions):
                continue
            if read not in found.values():
                found.setdefault(form, read)
    return found


def _decimal(form: str) -> str:
    return "." if form == POINT else ","


def _value(digits: str, form: str, group: str) -> float | None:
    """Return the value of digits whose thousands are separated by ``group``; None if they have another form."""
    decimal, whole = _decimal(form), rf"(?:0|[1-9]\d*|[1-9]\d{{0,2}}(?:{_GROUPS[group]}\d{{3}})+)"
    if group == decimal or not re.fullmatch(rf"{whole}(?:{re.escape(decimal)}\d+)?", digits):
        return None
    before, _, fraction = digits.partition(decimal)
    return float(re.sub(r"\D", "", before) + "." + (fraction or "0"))
