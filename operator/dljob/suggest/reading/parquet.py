"""Read Parquet files, and folders of Parquet files such as Spark writes, as tables of cells."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dljob.suggest.errors import DataError
from dljob.suggest.reading.table import MAX_NBYTES, PARQUET, Table, cell_of, read_bytes

SUFFIX = ".parquet"
INDEX = re.compile(r"__index_level_\d+__")
"""Name of the column in which pandas stores the index of a data frame."""
MIN_CELL_NBYTES = 2
"""Bytes that a cell takes in a CSV file, at least. A column of one repeated value takes nearly none in Parquet."""
CELL_OVERHEAD_NBYTES = 8
"""Bytes that a cell takes in an uncompressed page beside its text, at most: a length, or an index and its level."""
AS_DICTIONARY = {"PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"}
"""Encodings of which pyarrow can read each different text once."""
MEASURED_ROWS = 1024
"""Number of rows whose texts are decoded at once to measure a column with another encoding."""


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
        _check_texts(path, files, parquet, pyarrow)
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


def _check_texts(path: Path, files: Sequence[Path], parquet: Any, pyarrow: Any) -> None:
    """Raise DataError if a table has more bytes of texts than a CSV file may have.

    A file has each different text of a column once, so that some kilobytes may be gigabytes of texts. None of them is
    decoded here more than once.
    """
    for sizes in (_different_nbytes(files, parquet), _text_nbytes(files, parquet, pyarrow)):
        found = 0
        for nbytes in sizes:
            found += nbytes
            if found > MAX_NBYTES:
                raise DataError(
                    f"{path}: found more than {MAX_NBYTES / 2**20:,.0f} MiB of texts, counting a repeated one each "
                    "time; expected at most this. Pass a random sample of the rows, or remove columns of long texts."
                )


def _different_nbytes(files: Sequence[Path], parquet: Any) -> Iterator[int]:
    """Yield the least bytes of the different texts in each column of a group of rows."""
    for file in files:
        with parquet.ParquetFile(file) as opened:
            for chunk in _chunks_of_texts(opened):
                yield max(0, chunk.total_uncompressed_size - CELL_OVERHEAD_NBYTES * chunk.num_values)


def _text_nbytes(files: Sequence[Path], parquet: Any, pyarrow: Any) -> Iterator[int]:
    """Yield the bytes of the texts in all cells, for one group of rows after the other."""
    from pyarrow import compute

    for file in files:
        with parquet.ParquetFile(file) as opened:
            names = {field.name for field in opened.schema_arrow if _is_text(field.type, pyarrow.types)}
            chunks = list(_chunks_of_texts(opened))
        columns = {chunk.path_in_schema for chunk in chunks}
        # Texts in lists and objects are decoded some rows at a time, too.
        others = {c.path_in_schema for c in chunks if set(c.encodings) - AS_DICTIONARY} | (columns - names)
        coded = sorted(columns - others)
        with parquet.ParquetFile(file, read_dictionary=coded) as opened:
            for group in range(opened.num_row_groups if coded else 0):
                for column in opened.read_row_group(group, columns=coded).columns:
                    for chunk in column.chunks:
                        lengths = compute.binary_length(chunk.dictionary)
                        yield compute.sum(compute.take(lengths, chunk.indices)).as_py() or 0
            if others:
                for batch in opened.iter_batches(MEASURED_ROWS, columns=sorted(others)):
                    yield batch.nbytes


def _is_text(kind: Any, types: Any) -> bool:
    """Return True for a column of texts or binary data, also if its type is a dictionary. ``kind``: its Arrow type."""
    if types.is_dictionary(kind):
        kind = kind.value_type
    large = types.is_large_string(kind) or types.is_large_binary(kind)
    return bool(large or types.is_string(kind) or types.is_binary(kind) or "_view" in str(kind))


def _chunks_of_texts(opened: Any) -> Iterator[Any]:
    """Yield the metadata of each column of texts or binary data, in each group of rows."""
    for group in map(opened.metadata.row_group, range(opened.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.physical_type == "BYTE_ARRAY":
                yield chunk


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
