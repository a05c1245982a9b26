"""Columns of dates and numbers that are not written alike: they are read, or a finding says what to write."""

from pathlib import Path

import pytest

from dljob.suggest.inspection.columns import Kind, inspect_column
from dljob.suggest.inspection.table import inspect_table
from dljob.suggest.reading.table import read_table

DAYS = [f"2023-{1 + i % 12:02}-{1 + i % 28:02}" for i in range(100)]


def findings(folder: Path, cells: list[str]) -> list[str]:
    path = folder / "data.csv"
    lines = ["x|noise|goal", *(f"{cell}|{i * 37 % 101}.5|{'yes' if i % 3 else 'no'}" for i, cell in enumerate(cells))]
    path.write_text("\n".join(lines), encoding="utf-8")
    return list(inspect_table(read_table(path), "goal", None).findings)


def test_a_few_words_among_dates_count_as_missing(tmp_path: Path) -> None:
    """Fixed bug: one cell "unknown" made a column of dates one of categories."""
    cells = [*DAYS[:98], "unknown", "0000-00-00"]
    column = inspect_column("x", cells)
    assert (column.kind, column.format, column.invalid, column.first_invalid) == (Kind.DATE, "%Y-%m-%d", 2, 98)
    assert any("2 cells that are no dates, such as 'unknown' in line 100" in text for text in findings(tmp_path, cells))


@pytest.mark.parametrize("cell", ["3/31/23", "31/3/23", "31 Mar 2023", "March 31, 2023", "03/31/2023 14:05"])
def test_more_forms_of_dates_are_read(cell: str) -> None:
    assert inspect_column("x", [cell, cell.replace("31", "30")]).kind is Kind.DATE


def test_the_day_is_first_where_most_dates_need_it() -> None:
    cells = [*(f"{1 + i % 28:02}/{1 + i % 12:02}/2023" for i in range(99)), "soon"]
    assert inspect_column("x", cells).format == "%d/%m/%Y"


def test_dates_that_allow_two_readings_are_found(tmp_path: Path) -> None:
    unclear = [f"{1 + i % 12:02}/{1 + i % 11:02}/2023" for i in range(100)]
    assert any("may also have the day first" in text for text in findings(tmp_path, unclear))
    assert not any("may also have" in text for text in findings(tmp_path, [*unclear[:99], "12/31/2023"]))


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (
            [day if i % 2 else f"{day[8:]}.{day[5:7]}.2023" for i, day in enumerate(DAYS)],
            "has dates in several formats, such as '01.01.2023' and '2023-02-02'. It is read as categories. Write all",
        ),
        ([f"{60 + i % 40}.{i % 9} kg" for i in range(100)], "has numbers with the unit 'kg', such as '60.0 kg'"),
        (["unknown" if i % 5 == 0 else str(18 + i % 60) for i in range(100)], "but also 'unknown' in 20 rows"),
    ],
)
def test_what_categories_look_like_is_a_finding(tmp_path: Path, cells: list[str], expected: str) -> None:
    assert any(expected in text for text in findings(tmp_path, cells))


@pytest.mark.parametrize(
    "cells",
    [
        [f"{i % 30}{'ab'[i % 2]}" for i in range(100)],
        [str(i % 40) if i % 2 else f"T {i}" for i in range(100)],
        [["0", "1", "unknown"][i % 3] for i in range(100)],
    ],
)
def test_codes_and_few_numbers_are_categories_without_a_finding(tmp_path: Path, cells: list[str]) -> None:
    assert not any("Column 'x' has numbers" in text for text in findings(tmp_path, cells))


@pytest.mark.parametrize("cell", ["<NA>", "NaT", "#DIV/0!", "\\N", "n.a."])
def test_other_signs_of_missing_values(cell: str) -> None:
    column = inspect_column("x", [*(f"{i % 7}.5" for i in range(9)), cell])
    assert (column.kind, column.missing) == (Kind.NUMBER, 1)
