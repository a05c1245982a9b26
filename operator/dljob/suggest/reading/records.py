"""Read tables by the format of their file, and JSON Lines as tables of cells."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dljob.suggest.errors import DataError
from dljob.suggest.reading.parquet import is_parquet_folder, read_parquet
from dljob.suggest.reading.table import CSV, JSON_LINES, PARQUET, Table, cell_of, decoded, read_bytes, read_table

SUFFIXES = {
    ".csv": CSV,
    ".tsv": CSV,
    ".txt": CSV,
    ".data": CSV,
    ".tab": CSV,
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json": JSON_LINES,
    ".parquet": PARQUET,
}


def form_of(path: Path) -> str | None:
    """Return the format of the table in a file, by its suffix, or in a folder of Parquet files. None: no table."""
    return PARQUET if is_parquet_folder(path) else SUFFIXES.get(path.suffix.lower())


def read_any_table(
    path: Path, delimiter: str | None = None, encoding: str | None = None, *, one_column: bool = False
) -> Table:
    """Return the table in a file, whose suffix says its format. Raise DataError for an option of another format.

    ``delimiter``: only for CSV files. ``encoding``: only for CSV and JSON Lines. None: found in the file.
    ``one_column``: as in ``read_table``.
    """
    form = form_of(path)
    if form == CSV:
        return read_table(path, delimiter, encoding, one_column=one_column)
    if delimiter is not None:
        raise DataError(f"--delimiter: found {delimiter!r} for {path}; expected it for CSV files only. Remove it.")
    if form == JSON_LINES:
        return read_json_lines(path, encoding)
    if encoding is not None:
        raise DataError(f"--encoding: found {encoding!r} for {path}; expected it for text files only. Remove it.")
    return read_parquet(path)


def read_json_lines(path: Path, encoding: str | None = None) -> Table:
    """Return the table in a JSON Lines file: one object on each line, whose keys are the columns.

    A key that a line lacks is a missing value. Raise DataError for an empty file, or for the first line that holds no
    object, or an object with lists or objects in it.
    """
    text, encoding, notes = decoded(path, read_bytes(path), encoding)
    if text.lstrip().startswith("["):
        raise DataError(
            f"{path}: line 1: found a JSON array; expected one JSON object on each line (JSON Lines). Convert it with "
            f"jq -c '.[]' {path} > {path.stem}.jsonl."
        )
    found: list[tuple[int, Mapping[str, Any]]] = []
    # Only line feeds end a line: a JSON text may contain the other characters at which splitlines() splits.
    for line_number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if line.strip() == "{" and not found:
                raise DataError(
                    f"{path}: line {line_number}: found a JSON document of many lines; expected one JSON object on "
                    f"each line (JSON Lines). Convert its list of objects with jq -c '.KEY[]' {path} > "
                    f"{path.stem}.jsonl."
                ) from None
            raise DataError(
                f"{path}: line {line_number}: found {line.strip()[:40]!r}, which is no JSON ({error}); expected one "
                "JSON object on each line. Correct the line."
            ) from None
        if not isinstance(record, dict):
            raise DataError(
                f"{path}: line {line_number}: found {line.strip()[:40]!r}; expected a JSON object such as "
                '{"text": "…", "label": "…"}. Correct the line.'
            )
        stripped = {name.strip(): value for name, value in record.items()}
        if len(stripped) < len(record):
            raise DataError(
                f"{path}: line {line_number}: found keys that differ in blanks at their ends only; expected unique "
                "names. Rename one."
            )
        found.append((line_number, stripped))
    return _table(path, found, encoding, notes)


def _table(path: Path, records: list[tuple[int, Mapping[str, Any]]], encoding: str, notes: tuple[str, ...]) -> Table:
    names = tuple(dict.fromkeys(name for _, record in records for name in record))
    if not records or not names:
        raise DataError(f"{path}: found no record; expected one for each row of the table. Check the path.")
    if (blank := next((name for name in names if not name.strip()), None)) is not None:
        raise DataError(f"{path}: found a column with the name {blank!r}; expected a name. Rename it.")
    cells = tuple(
        tuple(cell_of(record.get(name), path, f"line {number}", name) for name in names) for number, record in records
    )
    return Table(path, names, cells, tuple(number for number, _ in records), encoding, ",", notes, JSON_LINES)
