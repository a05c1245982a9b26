"""Read the table of a separate test part, which the written project reads like the table of the training part."""

from pathlib import Path

from dljob.suggest.errors import DataError
from dljob.suggest.reading.records import form_of, read_any_table
from dljob.suggest.reading.table import CSV, PARQUET, SNIFFED_LINES, Table, decoded, read_bytes, sniffed_delimiter

UTF_8 = ("utf-8", "utf-8-sig")


def read_test(path: Path, table: Table) -> Table:
    """Return the test part in a file of the same format, encoding and delimiter as the training part ``table``.

    Raise DataError for another file.
    """
    form = form_of(path)
    if form != table.form:
        raise DataError(f"--test: found {path}; expected a file of the same format as {table.path}. Convert it.")
    if not path.exists():
        raise DataError(f"--test: {path}: found no such file; expected a table for the evaluation. Correct the path.")
    if form == PARQUET:
        return read_any_table(path)
    raw = read_bytes(path)
    if table.encoding not in UTF_8 and not raw.isascii() and _is_utf_8(raw):
        raise DataError(_other(path, "encoding", "utf-8", table.encoding, table.path))
    try:
        delimiter = table.delimiter if form == CSV else None
        return read_any_table(path, delimiter, table.encoding, one_column=len(table.names) == 1)
    except DataError:
        text, encoding, _ = decoded(path, raw, None)
        if encoding != table.encoding and not {encoding, table.encoding} <= {*UTF_8}:
            raise DataError(_other(path, "encoding", encoding, table.encoding, table.path)) from None
        delimiter = sniffed_delimiter(text.splitlines()[:SNIFFED_LINES])
        if form == CSV and delimiter != table.delimiter:
            raise DataError(_other(path, "delimiter", repr(delimiter), repr(table.delimiter), table.path)) from None
        raise


def _is_utf_8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _other(path: Path, what: str, found: str, expected: str, table: Path) -> str:
    return f"{path}: found the {what} {found}; expected {expected}, as in {table}. Convert one of the files."
