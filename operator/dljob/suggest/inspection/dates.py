"""Find the format of a column of dates, and say where dates have several formats or can be read in two ways."""

import re
from collections import Counter
from collections.abc import Collection
from datetime import datetime

DATE_FORMATS = (
    "%Y-%m-%d",
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%dT%H:%M:%S",
    "%Y-%m-%dT%H:%M:%S%z",
    "%Y-%m-%dT%H:%M:%S.%f",
    "%Y-%m-%dT%H:%M:%S.%f%z",
    "%Y-%m-%d %H:%M:%S.%f",
    "%Y-%m-%d %H:%M:%S%z",
    "%Y-%m-%d %H:%M",
    "%Y/%m/%d",
    "%d.%m.%Y",
    "%d.%m.%Y %H:%M",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%m/%d/%y",
    "%d/%m/%y",
    "%m/%d/%Y %H:%M",
    "%d/%m/%Y %H:%M",
    "%d-%b-%Y",
    "%d %b %Y",
    "%b %d, %Y",
    "%B %d, %Y",
)
ISO = "ISO 8601"
"""Format of dates with a time that are written in several of these ways, such as only some with a fraction."""
ISO_TIME = re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}.*")
MIN_DATES = 0.95
"""A column with this part of dates in one format among its known cells is one of dates. The others are missing."""
TRIED, MIN_TRIED = 50, 0.8
"""Different cells that are read first, and the part of dates among them that lets all cells be read."""
REMEDY = "Write all dates alike, such as 2024-12-31, and leave unknown cells empty."


def moment(cell: str, form: str) -> float | None:
    """Return the date in a cell in seconds of its local time, or None. ``form``: a format of dates, or ``ISO``."""
    try:
        found = datetime.fromisoformat(cell) if form == ISO else datetime.strptime(cell, form)
    except ValueError:
        return None
    return (found.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()


def date_format(counts: Counter[str]) -> str | None:
    """Return the format that most cells have, if nearly all have it; month before day where no cell contradicts it."""
    tried = list(counts)[:TRIED]

    def dates(form: str, cells: Collection[str]) -> int:
        return sum(counts[cell] for cell in cells if moment(cell, form) is not None)

    least = MIN_TRIED * sum(counts[cell] for cell in tried)
    found = {form: dates(form, counts) for form in DATE_FORMATS if dates(form, tried) >= least}
    best = max(found, key=lambda form: found[form], default=None)
    if best is not None and found[best] == counts.total():
        return best
    if all(ISO_TIME.fullmatch(cell) and moment(cell, ISO) is not None for cell in counts):
        return ISO
    return best if best is not None and found[best] >= MIN_DATES * counts.total() else None


def mixed_formats(cells: Collection[str]) -> str:
    """Return what the cells look like if they are dates in several formats, as a noun phrase; otherwise ''."""
    first: dict[str, str] = {}
    for cell in list(cells)[:TRIED]:
        form = next((form for form in DATE_FORMATS if moment(cell, form) is not None), None)
        if form is None:
            return ""
        first.setdefault(form, cell)
    shown = list(first.values())
    return f"dates in several formats, such as {shown[0]!r} and {shown[1]!r}" if len(shown) > 1 else ""


def ambiguous(cells: Collection[str], form: str) -> bool:
    """Return True if all dates are read with the month before the day, but could be read the other way round."""
    other = form.replace("%m/%d", "%d/%m")
    return other != form and all(moment(cell, form) is None or moment(cell, other) is not None for cell in cells)
