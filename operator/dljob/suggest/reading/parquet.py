"""Read Parquet files, and folders of Parquet files such as Spark writes, as tables of cells."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dljob.suggest.errors import DataError
from dljob.suggest.reading.table import MAX_NBYTES, PARQUET, Table, cell_of, read_bytes

SUFFIX = ".parquet"
INDEX = re.compile(r"__index_level_\d+__")
"""Name of the column in which pandas stores the index of a data frame."""
MIN_CELL_NBYTES = 2
"""Bytes that a cell takes in a CSV file, at least. A column of one repeated value takes nearly none in Parquet."""


def parquet_files(path: Path) -> list[Path]:
    """Return the Parquet files in a folder and below it, without those that pyarrow ignores, too."""
    found = (file for file in sorted(path.rglob("*")) if file.suffix.lower() == SUFFIX and file.is_file())
    return [file for file in found if not any(p.startswith((".", "_")) for p in file.relative_to(path).parts)]


def is_parquet_folder(path: Path) -> bool:
    """Return True for a folder with Parquet files in it."""
    return path.is_dir() and bool(parquet_files(path))


def read_parquet(path: Path) -> Table:
    """Return the table in a Parquet file, or in all Parquet files of a folder.

    Raise DataError without the package pyarrow, for another file, and for a column of lists, objects or binary data.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path}: found a Parquet file, but no Python package pyarrow; expected this package. Run pip install "
            "pyarrow, or convert the file to CSV."
        ) from None
    files = parquet_files(path) if path.is_dir() else [path]
    if path.is_dir() and sum(file.stat().st_size for file in files) > MAX_NBYTES:
        raise DataError(f"{path}: found more than {MAX_NBYTES >> 20} MiB; expected at most this. Pass fewer files.")
    schemas = [_schema(file, parquet, pyarrow) for file in files]
    _check_columns(path, files, schemas)
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if other := _other_type(files, schemas):
            raise DataError(other) from None
        raise DataError(_unreadable(path, error)) from None
    if not table.num_rows or not table.num_columns:
        raise DataError(f"{path}: found a table without rows; expected rows of data. Check the path.")
    table = table.rename_columns([name.strip() for name in table.column_names])
    names = [name for name in table.column_names if not INDEX.fullmatch(name)]
    if (blank := next((name for name in names if not name.strip()), None)) is not None:
        raise DataError(f"{path}: found a column with the name {blank!r}; expected a name. Rename it.")
    columns = [_cells(path, name, table.column(name), pyarrow) for name in names]
    notes = [
        f"Column {name!r} is left out: it is the index of the rows that pandas writes."
        for name in table.column_names
        if name not in names
    ]
    rows = tuple(range(1, table.num_rows + 1))
    return Table(path, tuple(names), tuple(zip(*columns, strict=True)), rows, "utf-8", ",", tuple(notes), PARQUET)


def _unreadable(path: Path, error: Exception) -> str:
    remedy = "Pass a folder that holds Parquet files alone." if path.is_dir() else "Write it again."
    return f"{path}: found no readable Parquet file ({' '.join(str(error).split())[:200]}); expected one. {remedy}"


def _schema(file: Path, parquet: Any, pyarrow: Any) -> tuple[int, dict[str, str]]:
    """Return the number of rows of a file, and name → type of its columns."""
    read_bytes(file, content=False)
    try:
        with parquet.ParquetFile(file) as opened:
            fields, rows = list(opened.schema_arrow), opened.metadata.num_rows
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(_unreadable(file, error)) from None
    if twice := [name for name, count in Counter(field.name.strip() for field in fields).items() if count > 1]:
        raise DataError(f"{file}: found two columns {twice[0]!r}; expected unique names. Rename one.")
    return rows, {field.name: str(field.type) for field in fields}


def _check_columns(path: Path, files: Sequence[Path], schemas: Sequence[tuple[int, dict[str, str]]]) -> None:
    """Raise DataError if files have different columns, or far more cells than a table may have."""
    first = schemas[0][1]
    for file, (_, own) in zip(files, schemas, strict=True):
        if other := sorted(set(own) ^ set(first)):
            raise DataError(
                f"{file}: found {'a' if other[0] in own else 'no'} column {other[0]!r}, unlike {files[0].name}; "
                "expected the same columns in all files of the folder. Pass a folder of files that belong together."
            )
    cells = sum(rows * len(own) for rows, own in schemas)
    if MIN_CELL_NBYTES * cells > MAX_NBYTES:
        raise DataError(
            f"{path}: found {cells:,} cells; expected at most {MAX_NBYTES // MIN_CELL_NBYTES:,}. Pass a random sample "
            "of the rows."
        )


def _other_type(files: Sequence[Path], schemas: Sequence[tuple[int, dict[str, str]]]) -> str:
    """Return what is wrong with the first file with another type of a column than the first one, or an empty text."""
    first = schemas[0][1]
    for file, (_, own) in zip(files, schemas, strict=True):
        for name, kind in own.items():
            if kind != first[name]:
                return (
                    f"{file}: column {name!r}: found the type {kind}, but {first[name]} in {files[0].name}; expected "
                    "one type in all files of the folder. Write the file again."
                )
    return ""


def _cells(path: Path, name: str, column: Any, pyarrow: Any) -> list[str]:
    """Return the cells of a column as texts."""
    if pyarrow.types.is_timestamp(column.type) and column.type.unit == "ns":
        # Python's times have microseconds. The written data.py reads such columns in the same way.
        column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)
    try:
        values = column.to_pylist()
    except (ValueError, OverflowError) as error:  # such as the year 20000
        raise DataError(
            f"{path}: column {name!r}: found values of type {column.type} that Python cannot represent "
            f"({' '.join(str(error).split())[:100]}); expected numbers, texts or dates. Convert or remove the column."
        ) from None
    return [cell_of(value, path, f"row {row}", name) for row, value in enumerate(values, 1)]
