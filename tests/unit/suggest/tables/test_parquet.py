"""Parquet: what pandas, Spark and databases write becomes the cells of a table, or is one error that names the column."""

import datetime
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dljob.suggest.errors import DataError
from dljob.suggest.inspection.table import TableFacts
from dljob.suggest.reading.parquet import read_parquet
from dljob.suggest.reading.records import read_any_table
from dljob.suggest.subject import Options, read_subject

ROWS = 40
BASE = {"a": pa.array([i * 0.5 for i in range(ROWS)]), "target": pa.array(["x", "y"] * (ROWS // 2))}
NANOSECONDS = [1_700_000_000_000_000_000 + i * (86_400 * 10**9 + 1) for i in range(ROWS)]


def write(path: Path, **columns: Any) -> Path:
    """Write a Parquet file with BASE and other columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(BASE | columns), path, row_group_size=7)
    return path


def records_of_the_project(data: Path) -> list[dict[str, str]]:
    """Return the rows as the data.py of the project reads them."""
    subject = read_subject(Options(data))
    script = subject.project(subject.models(None)[0], None)["data.py"]
    assert len(script.splitlines()) <= 150
    found: Any = ModuleType("data")
    exec(script, found.__dict__)
    rows: list[dict[str, str]] = found.records(data)
    return rows


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        pytest.param(pa.array(["u", "v"] * 20).dictionary_encode(), ["u", "v"], id="category"),
        pytest.param(pa.array([Decimal("1.50"), None] * 20), ["1.50", ""], id="decimal"),
        pytest.param(pa.array([True, None] * 20), ["True", ""], id="boolean"),
        pytest.param(pa.array([datetime.date(2024, 5, 1), None] * 20), ["2024-05-01", ""], id="date"),
        pytest.param(pa.array([float("nan"), 2.5] * 20), ["nan", "2.5"], id="NaN"),
        pytest.param(
            pa.array(NANOSECONDS, pa.timestamp("ns")), ["2023-11-14 22:13:20", "2023-11-15 22:13:20"], id="nanoseconds"
        ),
        pytest.param(
            pa.array(NANOSECONDS, pa.timestamp("ns", tz="Europe/Berlin")),
            ["2023-11-14 23:13:20+01:00", "2023-11-15 23:13:20+01:00"],
            id="time zone",
        ),
        pytest.param(pa.nulls(ROWS), ["", ""], id="null"),
    ],
)
def test_types_become_texts_and_the_project_reads_the_same(tmp_path: Path, column: Any, expected: list[str]) -> None:
    path = write(tmp_path / "a.parquet", c=column)
    assert read_parquet(path).column("c")[:2] == expected
    own = ["" if cell == "nan" else cell for cell in expected]
    assert [row["c"] for row in records_of_the_project(path)[:2]] == own


def test_the_readme_names_the_package(tmp_path: Path) -> None:
    subject = read_subject(Options(write(tmp_path / "a.parquet")))
    page = subject.project(subject.models(None)[0], None)["README.md"]
    assert (
        "pip install pyarrow" in page and "python predict.py new.parquet" in page and "the trainer has pyarrow" in page
    )


def test_index_of_pandas_is_neither_a_column_nor_the_target(tmp_path: Path) -> None:
    """Fixed bug: pandas writes the index of a filtered frame as the last column, which was then the default target."""
    path = write(tmp_path / "a.parquet", __index_level_0__=pa.array([i * i for i in range(ROWS)]))
    table = read_parquet(path)
    assert table.names == ("a", "target")
    assert any("'__index_level_0__' is left out" in note for note in table.notes)


def test_folder_of_files_is_one_table(tmp_path: Path) -> None:
    """Spark and Dask write such folders. Fixed bug: they were taken for folders of images."""
    for i in range(3):
        write(tmp_path / "data.parquet" / f"part-{i}.parquet")
    (tmp_path / "data.parquet" / "_SUCCESS").write_text("")
    facts = read_subject(Options(tmp_path / "data.parquet")).facts
    assert isinstance(facts, TableFacts) and facts.rows == 3 * ROWS
    assert len(records_of_the_project(tmp_path / "data.parquet")) == 3 * ROWS


def test_folders_may_hold_the_values_of_a_column(tmp_path: Path) -> None:
    for year in (2023, 2024):
        write(tmp_path / f"year={year}" / "a.parquet")
    assert set(read_parquet(tmp_path).column("year")) == {"2023", "2024"}


def other_columns(folder: Path) -> Path:
    write(folder / "a.parquet")
    write(folder / "b.parquet", more=BASE["a"])
    return folder


def other_types(folder: Path) -> Path:
    write(folder / "a.parquet", c=BASE["a"])
    write(folder / "b.parquet", c=BASE["target"])
    return folder


def twice(folder: Path) -> Path:
    parquet.write_table(pa.Table.from_arrays([BASE["a"], BASE["a"]], names=["a", "a"]), folder / "a.parquet")
    return folder / "a.parquet"


def without_rows(folder: Path) -> Path:
    parquet.write_table(pa.table({name: column[:0] for name, column in BASE.items()}), folder / "a.parquet")
    return folder / "a.parquet"


def cut(folder: Path) -> Path:
    path = write(folder / "a.parquet")
    path.write_bytes(path.read_bytes()[:300])
    return path


def beside_others(folder: Path) -> Path:
    write(folder / "a.parquet")
    (folder / "notes.doc").write_text("about the data")
    return folder


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda f: write(f / "a.parquet", c=pa.array([[1]] * ROWS)), "row 1: column 'c': found a list"),
        (
            lambda f: write(f / "a.parquet", c=pa.array([None] * 39 + [{"k": 1}])),
            "row 40: column 'c': found an object",
        ),
        (lambda f: write(f / "a.parquet", c=pa.array([b"x"] * ROWS)), "column 'c': found binary data"),
        (
            lambda f: write(f / "a.parquet", c=pa.array([10**15] * ROWS, pa.timestamp("s"))),
            "column 'c': found values of type timestamp",
        ),
        (other_columns, "b.parquet: found a column 'more', unlike a.parquet"),
        (other_types, "b.parquet: column 'c': found the type string, but double in a.parquet"),
        (twice, "found two columns 'a'"),
        (without_rows, "found a table without rows"),
        (cut, "found no readable Parquet file"),
        (beside_others, "Pass a folder that holds Parquet files alone"),
    ],
)
def test_what_is_no_table_is_one_error_with_its_place(
    tmp_path: Path, make: Callable[[Path], Path], expected: str
) -> None:
    path = make(tmp_path)
    with pytest.raises(DataError) as error:
        read_parquet(path)
    assert expected in str(error.value) and str(error.value).startswith(str(path))


def test_a_small_file_with_far_too_many_cells_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of one repeated value takes bytes in Parquet, and gigabytes as texts."""
    monkeypatch.setattr("dljob.suggest.reading.parquet.MAX_NBYTES", 2 * 2 * ROWS - 1)
    with pytest.raises(DataError, match=r"found 80 cells; expected at most 79\. Pass a random sample"):
        read_parquet(write(tmp_path / "a.parquet"))


TEXT = "x" * 20_000
HEAP = pa.default_memory_pool()
POOL = pa.proxy_memory_pool(HEAP)
"""Arrow's memory while a test reads a file. It must live as long as what it has allocated."""


@pytest.mark.parametrize(
    ("kind", "name", "encoding"),
    [
        (pa.string(), "c", "RLE_DICTIONARY"),
        (pa.string(), "c.d", "RLE_DICTIONARY"),
        (pa.binary(), "c", "RLE_DICTIONARY"),
        (pa.dictionary(pa.int32(), pa.string()), "c", "RLE_DICTIONARY"),
        (pa.large_string(), "c", "PLAIN"),
        (pa.string(), "c", "DELTA_BYTE_ARRAY"),
        (pa.string(), "c", "DELTA_LENGTH_BYTE_ARRAY"),
    ],
)
def test_repeated_long_texts_are_an_error_before_they_take_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, encoding: str
) -> None:
    """Fixed bug: a file of some kilobytes became gigabytes of texts."""
    limit = 50 * len(TEXT)
    monkeypatch.setattr("dljob.suggest.reading.parquet.MAX_NBYTES", limit)
    monkeypatch.setattr("dljob.suggest.reading.parquet.MEASURED_ROWS", 8, raising=False)
    texts = [TEXT.encode() if kind == pa.binary() else TEXT, None] * (ROWS // 2)
    coded = encoding == "RLE_DICTIONARY"
    how: dict[str, Any] = {"use_dictionary": coded, "column_encoding": None if coded else {name: encoding}}

    def written(times: int) -> Path:
        path = tmp_path / f"{times}.parquet"
        table = pa.table({name: pa.array(texts * times, kind), "target": pa.array([1] * times * ROWS)})
        parquet.write_table(table, path, row_group_size=2 * ROWS, compression="zstd", **how)
        return path

    if kind != pa.binary():  # which is no text
        assert sum(map(len, read_parquet(written(2)).column(name))) == 40 * len(TEXT)
    large = written(20)
    assert large.stat().st_size < limit / 10
    pa.set_memory_pool(POOL)
    try:
        with pytest.raises(DataError, match=r"found more than 1 MiB of texts.*Pass a random sample"):
            read_parquet(large)
    finally:
        pa.set_memory_pool(HEAP)
    assert POOL.max_memory() < 2 * limit, "the texts take 8 times the limit"


def test_repeated_texts_of_a_folder_and_of_lists_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dljob.suggest.reading.parquet.MAX_NBYTES", 100 * len(TEXT))
    for i in range(3):
        write(tmp_path / "folder" / f"{i}.parquet", c=pa.array([TEXT] * ROWS))
    with pytest.raises(DataError, match="found more than 2 MiB of texts"):
        read_parquet(tmp_path / "folder")
    with pytest.raises(DataError, match="found more than 2 MiB of texts"):
        read_parquet(write(tmp_path / "list.parquet", c=pa.array([[TEXT] * 3] * ROWS)))
    with pytest.raises(DataError, match="column 'c': found a list"):
        read_parquet(write(tmp_path / "short.parquet", c=pa.array([[TEXT] * 2] * ROWS)))
    decimals = write(tmp_path / "decimal.parquet", c=pa.array([Decimal("1.50"), None] * 20))
    assert read_parquet(decimals).column("c")[:2] == ["1.50", ""]


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        read_any_table(write(tmp_path / "a.parquet"))


def test_folder_of_other_tables_is_an_error_that_names_one(tmp_path: Path) -> None:
    """Fixed bug: the message asked for folders with images."""
    for i in range(2):
        (tmp_path / f"{i}.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"folder with 2 tables, such as 0\.csv; expected one file"):
        read_subject(Options(tmp_path))
