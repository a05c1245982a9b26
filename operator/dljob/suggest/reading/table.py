"""Read a delimited text file as a table of cells, and find its encoding, delimiter and decimal sign."""

import codecs
import csv
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dljob.suggest.errors import DataError

DELIMITERS = (",", ";", "\t", "|")
MAX_NBYTES = 2**30
"""Largest table that is read into memory."""
SNIFFED_LINES = 200
MAX_UNNAMED = 0.05
"""Columns without a name at the end are left out if at most this part of the rows has cells there."""
PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip or Excel", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
"""First bytes of a file → its format, for files that have the suffix of a text."""
UTF_16_AND_32 = {
    # UTF-32 first: its byte order mark begins with that of UTF-16.
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
BINARY_NBYTES, MAX_CONTROLS = 65_536, 0.02
"""A file is binary if this part of its first bytes are control characters. Random bytes have 10 %."""
CSV, JSON_LINES, PARQUET = "csv", "jsonl", "parquet"


@dataclass(frozen=True)
class Table:
    """A table of text cells. ``cells[i][j]`` is the cell of row i in column j, without surrounding blanks."""

    path: Path
    names: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    """Number of the last line of each row in the file; the first line is 1. Parquet: number of the row."""
    encoding: str
    delimiter: str
    notes: tuple[str, ...] = ()
    """Facts about the file that the user should know, as sentences."""
    form: str = CSV
    """Format of the file, by which the written project reads it."""

    @property
    def unit(self) -> str:
        """Return the word for what the numbers in ``lines`` count: 'row' or 'line'."""
        return "row" if self.form == PARQUET else "line"

    def column(self, name: str) -> list[str]:
        place = self.names.index(name)
        return [row[place] for row in self.cells]


def read_table(
    path: Path, delimiter: str | None = None, encoding: str | None = None, *, one_column: bool = False
) -> Table:
    """Return the table in a CSV or TSV file, whose first row names the columns.

    ``delimiter``, ``encoding``: None: found in the file. ``one_column``: True if a column of texts is enough. Raise
    DataError for a file that is empty, has rows of different lengths, mixes encodings, or cannot be read.
    """
    raw = read_bytes(path)
    if is_html(raw):
        raise DataError(f"{path}: line 1: found a page of HTML; expected a table. Download the table itself.")
    text, encoding, notes = decoded(path, raw, encoding)
    lines = text.splitlines()[:SNIFFED_LINES]
    delimiter = delimiter or sniffed_delimiter(lines)
    names, cells, numbers = _rows(path, text, delimiter)
    if len(names) == 1 and not one_column:
        raise DataError(
            f"{path}: found one column with the delimiter {delimiter!r}; expected a target and at least one other "
            "column. Pass --delimiter if the columns are separated by another character, such as --delimiter ' '."
        )
    names, cells, left_out = _without_unnamed(path, names, cells, numbers)
    notes = (*notes, *left_out)
    _check_header(path, names, cells)
    return Table(path, names, cells, numbers, encoding, delimiter, notes)


def read_bytes(path: Path, *, content: bool = True) -> bytes:
    """Return the bytes of a file. Raise DataError if it is empty or too large. ``content``: False: check this only."""
    try:
        nbytes = path.stat().st_size
        if nbytes > MAX_NBYTES:
            raise DataError(
                f"{path}: found {nbytes / 2**20:,.0f} MiB; expected a table of at most {MAX_NBYTES >> 20} MiB. Pass a "
                "random sample of its rows."
            )
        raw = path.read_bytes() if content or not nbytes else b"."
    except OSError as error:
        raise DataError(f"{path}: found no readable file ({error.strerror}); expected one. Check the path.") from None
    if not raw.strip():
        raise DataError(f"{path}: found an empty file; expected data. Check the path.")
    if (packed := next((name for start, name in PACKED.items() if raw.startswith(start)), None)) is not None:
        raise DataError(f"{path}: found a {packed} file; expected text. Unpack it first, or export it as CSV.")
    return raw


def is_html(raw: bytes) -> bool:
    """Return True for the bytes of a page for browsers, such as a login page in the place of a file."""
    return raw[:1000].lstrip(codecs.BOM_UTF8 + b" \t\r\n").lower().startswith((b"<!doctype html", b"<html"))


def decoded(path: Path, raw: bytes, encoding: str | None) -> tuple[str, str, tuple[str, ...]]:
    """Return (text, encoding, notes for the user) of the bytes ``raw`` of a file. Raise DataError if that fails.

    ``encoding``: None: UTF-8, UTF-16 or UTF-32 with a byte order mark, or Windows-1252, as found in the bytes.
    """
    if encoding is not None:
        try:
            return raw.decode("utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding), encoding, ()
        except LookupError:
            raise DataError(
                f"--encoding: found {encoding!r}; expected an encoding that Python knows, such as utf-8."
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(_invalid(path, raw, error, encoding)) from None
    for wide, marks in UTF_16_AND_32.items():
        if raw.startswith(marks):
            try:
                return _without_nul(path, raw.decode(wide)), wide, ()
            except UnicodeDecodeError as error:
                raise DataError(_invalid(path, raw, error, wide)) from None
    found = "utf-8-sig" if raw.startswith(codecs.BOM_UTF8) else "utf-8"
    try:
        return _without_nul(path, raw.decode(found)), found, ()
    except UnicodeDecodeError as error:
        first = error
    valid, invalid = _non_ascii_lines(raw)
    _check_text(path, raw)
    if valid:
        raise DataError(
            f"{path}: line {invalid[0]}: found byte 0x{raw[first.start]:02x}, which is not UTF-8, but line {valid[0]} "
            f"has UTF-8 characters; expected one encoding in the whole file. Convert such lines ({len(invalid):,}), "
            "or pass --encoding to read all lines in one encoding."
        )
    try:
        text = raw.decode("cp1252")
    except UnicodeDecodeError as error:
        raise DataError(_invalid(path, raw, error, "utf-8 or cp1252")) from None
    note = f"The file is not UTF-8 (line {invalid[0]}). It was read as Windows-1252; pass --encoding if that is wrong."
    return _without_nul(path, text), "cp1252", (note,)


def _check_text(path: Path, raw: bytes) -> None:
    """Raise DataError for binary data, such as a PDF or a picture. Text has hardly any control characters."""
    start = raw[:BINARY_NBYTES]
    controls = sum(byte < 32 and byte not in b"\0\t\n\v\f\r\x1a\x1b" for byte in start)
    if controls > MAX_CONTROLS * len(start):
        raise DataError(f"{path}: found binary data; expected text. Choose another file, or extract the text from it.")


def _without_nul(path: Path, text: str) -> str:
    if "\0" in text:
        _check_text(path, text.encode())
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(
            f"{path}: line {line}: found a NUL character; expected text. If the file holds text, pass its encoding, "
            "such as --encoding utf-16-le. Otherwise it is binary: choose another file."
        )
    return text


def _invalid(path: Path, raw: bytes, error: UnicodeDecodeError, encoding: str) -> str:
    line = raw.count(b"\n", 0, error.start) + 1
    return (
        f"{path}: line {line}: found byte 0x{raw[error.start]:02x}; expected text in {encoding}. Correct the line, or "
        "pass its encoding with --encoding."
    )


def _non_ascii_lines(raw: bytes) -> tuple[list[int], list[int]]:
    """Return the numbers of the lines with characters beyond ASCII that are valid UTF-8, and of those that are not."""
    valid: list[int] = []
    invalid: list[int] = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.isascii():
            continue
        try:
            line.decode("utf-8")
            valid.append(number)
        except UnicodeDecodeError:
            invalid.append(number)
    return valid, invalid


def sniffed_delimiter(lines: Sequence[str]) -> str:
    """Return the delimiter that splits most lines into the same number of fields, and into the most fields."""

    def quality(candidate: str) -> tuple[float, int]:
        try:
            widths = [len(row) for row in csv.reader(lines, delimiter=candidate) if row]
        except csv.Error:
            return 0.0, 0
        if not widths:
            return 0.0, 0
        width, count = Counter(widths).most_common(1)[0]
        return (count / len(widths) if width > 1 else 0.0), width

    return max(DELIMITERS, key=quality)


def looks_delimited(path: Path) -> bool:
    """Return True if nearly all of the first lines of a file have the same number of fields, which is more than one."""
    with path.open("rb") as file:
        lines = file.read(100_000).decode("utf-8", "replace").splitlines()[:SNIFFED_LINES]
    filled = [line for line in lines if line.strip()]
    if len(filled) < 2:
        return False
    try:
        widths = [len(row) for row in csv.reader(filled, delimiter=sniffed_delimiter(filled), skipinitialspace=True)]
    except csv.Error:
        return False
    width, count = Counter(widths).most_common(1)[0]
    return width > 1 and count >= 0.9 * len(widths) and widths[0] == width


def numbers_between_blanks(path: Path) -> bool:
    """Return True if the first lines of a file are mostly numbers between blanks, as many in each line: no prose."""
    with path.open("rb") as file:
        lines = file.read(100_000).decode("utf-8", "replace").splitlines()[:SNIFFED_LINES]
    filled = [words for line in lines[:-1] if (words := line.split())]
    if len(filled) < 2 or len({len(words) for words in filled}) > 1 or len(filled[0]) < 2:
        return False
    return all(2 * sum(map(_is_number, words)) >= len(words) for words in filled[1:])


def cell_of(value: Any, path: Path, place: str, name: str) -> str:
    """Return a value of a record as the text that a CSV file would have for it. The written data.py does the same.

    Raise DataError for a value with parts. ``place``: its line or row, for the message. ``name``: its column.
    """
    if value is None:
        return ""
    if isinstance(value, list | tuple | dict | bytes | set):
        kinds = {"list": "a list", "dict": "an object", "bytes": "binary data"}
        kind = kinds.get(type(value).__name__, "several values")
        raise DataError(
            f"{path}: {place}: column {name!r}: found {kind}; expected a text, a number, true, false or null. Give "
            "each part a column of its own, or remove the column."
        )
    text = str(value).strip()
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(
            f"{path}: {place}: column {name!r}: found half of a surrogate pair (\\ud800 to \\udfff), which is no "
            "character; expected text. Remove it."
        )
    return text


def _rows(
    path: Path, text: str, delimiter: str
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], tuple[int, ...]]:
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    except TypeError:
        raise DataError(f"--delimiter: found {delimiter!r}; expected one character, such as ';'.") from None
    csv.field_size_limit(MAX_NBYTES)
    names: tuple[str, ...] = ()
    header = 1
    cells: list[tuple[str, ...]] = []
    numbers: list[int] = []
    try:
        for row in reader:
            if not row:
                continue
            if not names:
                names, header = _header(path, row, reader.line_num), reader.line_num
                continue
            if len(row) != len(names):
                if len(row) < len(names):
                    remedy = "Add the missing ones, and put quotes around a field of several lines,"
                elif cells and len(names) > 1:
                    remedy = f"Put quotes around fields that contain {delimiter!r},"
                else:
                    remedy = f"Name each column in line {header}, remove the lines above the names of the columns,"
                raise DataError(
                    f"{path}: line {reader.line_num}: found {len(row)} fields with the delimiter {delimiter!r}; "
                    f"expected {len(names)}, as in line {header}. {remedy} or pass --delimiter."
                )
            cells.append(tuple(cell.strip() for cell in row))
            numbers.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: {error}. Check the quotes in this line.") from None
    if not cells:
        raise DataError(f"{path}: found {'only a header' if names else 'no row'}; expected rows of data below it.")
    return names, tuple(cells), tuple(numbers)


def _header(path: Path, row: Sequence[str], line: int) -> tuple[str, ...]:
    names = tuple(name.strip() for name in row)
    if names[0].lower().startswith("sep="):
        raise DataError(
            f"{path}: line {line}: found {names[0]!r}, a line for Excel; expected the names of the columns. Remove it."
        )
    given = [i for i, name in enumerate(names) if name.strip()] or [len(names)]
    if len(names) > 2 and len(given) < 2:
        raise DataError(
            f"{path}: line {line}: found {next((n for n in names if n.strip()), '')!r:.60} and no other name; expected "
            "the names of the columns. Remove lines such as a title above them."
        )
    # pandas and R write the index of the rows as a first column without a name. inspect_table leaves it out.
    if blank := [
        i for i, name in enumerate(row, 1) if not name.strip() and i <= max(given) and (i > 1 or name or len(names) < 3)
    ]:
        raise DataError(
            f"{path}: line {line}: found no name of column {blank[0]}; expected a name for each column. Add one."
        )
    if twice := [name for name, count in Counter(names).items() if count > 1 and name]:
        header = " If the first row is one of data, add a row with names above it." if _is_number(twice[0]) else ""
        raise DataError(
            f"{path}: line {line}: found two columns {twice[0]!r}; expected unique names. Rename one.{header}"
        )
    if all(_is_number(name) for name in names):
        raise DataError(
            f"{path}: line {line}: found numbers only; expected the names of the columns. Add a first row with names."
        )
    return names


def _without_unnamed(
    path: Path, names: tuple[str, ...], cells: tuple[tuple[str, ...], ...], lines: Sequence[int]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], list[str]]:
    """Return names and cells without the nearly empty columns at the end that have no name, and a note about them."""
    named = max((i for i, name in enumerate(names, 1) if name.strip()), default=len(names))
    if named == len(names):
        return names, cells, []
    filled = [(line, "".join(row[named:])) for line, row in zip(lines, cells, strict=True) if any(row[named:])]
    if len(filled) > MAX_UNNAMED * len(cells):
        raise DataError(
            f"{path}: line 1: found no name of column {named + 1}; expected a name for each column. Add one."
        )
    shown = f"; line {filled[0][0]} has {filled[0][1]!r:.40} there" if filled else ""
    which = "1 column" if len(names) - named == 1 else f"{len(names) - named} columns"
    note = f"{which} without a name at the end {'is' if which == '1 column' else 'are'} left out{shown}."
    return names[:named], tuple(row[:named] for row in cells), [note]


def _check_header(path: Path, names: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Raise DataError if the first row looks like data: numbers and values above the same kinds of cells.

    Names such as 2021 are no evidence on their own, but names such as 0.25, and words that are cells of their column.
    """
    numbers = [i for i, name in enumerate(names) if _is_number(name)]
    fractions = [i for i in numbers if "." in names[i]]
    words = [i for i in range(len(names)) if i not in numbers and names[i] and any(r[i] == names[i] for r in cells)]
    if not fractions and not (words and (numbers or 2 * len(words) > len(names))):
        return
    place = (fractions or words)[0]
    raise DataError(
        f"{path}: line 1: found {names[place]!r} as the name of column {place + 1}, which looks like a value; expected "
        "the names of the columns. Add a first row with names, or rename the column."
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
