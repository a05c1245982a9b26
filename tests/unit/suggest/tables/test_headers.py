"""First lines that name no columns: the error says so, instead of a model with a value as the name of its target."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from dljob.suggest.errors import DataError
from dljob.suggest.inspection.table import TableFacts
from dljob.suggest.reading.records import read_any_table
from dljob.suggest.reading.table import read_table
from dljob.suggest.subject import Options, read_subject

ROWS = [f"{i % 7}.5,{i % 5},{'yes' if i % 2 else 'no'}" for i in range(40)]


def read(path: Path, *lines: str) -> tuple[str, ...]:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_table(path).names


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(ROWS, "found '0.5' as the name of column 1", id="numbers and a class"),
        pytest.param([f"{i % 5},{'yes' if i % 2 else 'no'}" for i in range(40)], "found 'no' as the name", id="counts"),
        pytest.param(["p,x,s", *(["p,b,s", "e,x,t"] * 20)], "found 'p' as the name of column 1", id="words only"),
        pytest.param(["5.1,5.1,x", *ROWS], "add a row with names above it", id="equal numbers"),
        pytest.param(["sep=;", *(row.replace(",", ";") for row in ROWS)], "line 1: found 'sep='", id="for Excel"),
        pytest.param(["Report of 2024,,", "a,b,c", *ROWS], "line 1: found 'Report of 2024' and no other", id="title"),
    ],
)
def test_a_first_row_without_names_is_an_error(tmp_path: Path, lines: list[str], expected: str) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path / "data.csv", *lines)
    assert expected in str(error.value) and "line 1" in str(error.value)


@pytest.mark.parametrize(
    ("lines", "line", "remedy"),
    [
        pytest.param(["# of 2024", "# by me", "a,b,c", *ROWS], 3, "remove the lines above the names", id="comments"),
        pytest.param(["Sales, 2024", "a,b,c", *ROWS], 2, "remove the lines above the names", id="title"),
        pytest.param(
            ["b,c", *ROWS], 2, "Name each column in line 1", id="names without that of the index, as R writes"
        ),
        pytest.param(["", "a,b,c", *ROWS, "1.5,2"], 43, "expected 3, as in line 2. Add the missing", id="cut off"),
        pytest.param(["a,b,c", *ROWS, "1,5,2,no"], 42, "Put quotes around fields that contain ','", id="no quotes"),
    ],
)
def test_a_row_of_another_width_is_an_error_with_its_likely_remedy(
    tmp_path: Path, lines: list[str], line: int, remedy: str
) -> None:
    """Fixed bug: quotes were the advice for lines above the names of the columns and for missing fields, too."""
    with pytest.raises(DataError) as error:
        read(tmp_path / "data.csv", *lines)
    assert f"line {line}: found " in str(error.value) and remedy in str(error.value)


@pytest.mark.parametrize("header", ["0,1,target", "2021,2022,sold", "a,no,target", "b1,b2,yes?"])
def test_names_that_are_whole_numbers_or_words_are_accepted(tmp_path: Path, header: str) -> None:
    assert read(tmp_path / "data.csv", header, *ROWS) == tuple(header.split(","))


def test_numbers_between_blanks_are_no_text_of_a_language(tmp_path: Path) -> None:
    """Fixed bug: a table with blanks between its columns became a language model of digits."""
    path = tmp_path / "data.txt"
    path.write_text("a b target\n" + "".join(f"{i % 7}.25 {i % 5}.5 {i % 2}\n" for i in range(1500)), encoding="utf-8")
    with pytest.raises(DataError, match="--delimiter ' '"):
        read_subject(Options(path))
    assert isinstance(read_subject(Options(path, delimiter=" ")).facts, TableFacts)


def test_columns_without_a_name_at_the_end_are_left_out_if_they_are_empty(tmp_path: Path) -> None:
    """Fixed bug: lines that end with commas were an error. Spreadsheets write such lines."""
    path = tmp_path / "data.csv"
    assert read(path, "a,b,c,,", *(f"{row},," for row in ROWS[1:]), f"{ROWS[0]},note,") == ("a", "b", "c")
    table = read_table(path)
    assert {len(row) for row in table.cells} == {3}
    assert table.notes == ("2 columns without a name at the end are left out; line 41 has 'note' there.",)
    with pytest.raises(DataError, match="found no name of column 4"):
        read(path, "a,b,c,", *(f"{row},7" for row in ROWS))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_blanks_at_the_ends_of_names_do_not_count(tmp_path: Path, suffix: str) -> None:
    """Fixed bug: ``--target y`` found no column, because the file has ``y`` with a blank behind it."""
    path, rows = tmp_path / f"data.{suffix}", [(i % 7, "u" if i % 7 > 3 else "v") for i in range(60)]
    if suffix == "csv":
        path.write_text("\n".join(["a , y ", *(f"{a},{y}" for a, y in rows)]), encoding="utf-8")
    elif suffix == "jsonl":
        path.write_text("\n".join(json.dumps({"a ": a, " y ": y}) for a, y in rows), encoding="utf-8")
    else:
        parquet.write_table(pyarrow.table({"a ": [a for a, _ in rows], " y ": [y for _, y in rows]}), path)
    subject = read_subject(Options(path, target="y"))
    assert isinstance(subject.facts, TableFacts) and [column.name for column in subject.facts.columns] == ["a"]
    settings = subject.models(None)[0]
    module: dict[str, Any] = {}
    exec(subject.project(settings, None)["data.py"], module)
    found = module["read"](path)
    assert len(found) == 60 and found[0] == {"a": "0", "y": "v"}


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_names_that_differ_in_blanks_only_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.{suffix}"
    if suffix == "csv":
        path.write_text("\n".join(["y ,a,y", *["1,2,3"] * 20]), encoding="utf-8")
    elif suffix == "jsonl":
        path.write_text('{"y ": 1, "y": 2}\n' * 20, encoding="utf-8")
    else:
        parquet.write_table(pyarrow.table({"y ": [1], "y": [2]}), path)
    with pytest.raises(DataError, match="unique"):
        read_any_table(path)
