"""Columns of numbers with units or thousands separators: read only if their cells allow one reading."""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cli.entry import main
from dljob.suggest.errors import DataError
from dljob.suggest.inspection.amounts import COMMA, POINT, amounts_of
from dljob.suggest.inspection.columns import Kind, inspect_column, number
from dljob.suggest.inspection.table import inspect_table
from dljob.suggest.reading.table import read_table


@pytest.mark.parametrize(
    ("cells", "form", "values"),
    [
        (["$1,200.50", "$85", "$1,000,000"], POINT, [1200.5, 85, 1e6]),
        (["1.200,50 €", "85,00 €", "1.000.000 €"], COMMA, [1200.5, 85, 1e6]),
        (["€ 1 200,50", "€ 85"], COMMA, [1200.5, 85]),
        (["1\u00a0200,50\u00a0€", "1\u202f000\u202f000 €"], COMMA, [1200.5, 1e6]),
        (["CHF 1'200.50", "CHF 85.00"], POINT, [1200.5, 85]),
        (["USD 5", "USD 7"], POINT, [5, 7]),
        (["1,200.50", "85", "NA"], POINT, [1200.5, 85]),
        (["1,234,567", "1,234", "85"], POINT, [1234567, 1234, 85]),
        (["1.200,50", "85,5"], COMMA, [1200.5, 85.5]),
        (["-$5.20", "$-5.20", "($5.20)", "−$5.20", "+$5.20"], POINT, [-5.2, -5.2, -5.2, -5.2, 5.2]),
        (["1,200.5%", "12%"], POINT, [1200.5, 12]),
        (["1.234,5 %", "12 %"], COMMA, [1234.5, 12]),
        (["$0.125", "$1.250"], POINT, [0.125, 1.25]),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_amounts_are_numbers(cells: list[str], form: str, values: list[float]) -> None:
    column = inspect_column("price", cells)
    assert (column.kind, column.amount, column.invalid) == (Kind.NUMBER, form, 0)
    assert [number(cell, column.form) for cell in cells if cell != "NA"] == values


@pytest.mark.parametrize(
    "cells",
    [
        ["555 123 456", "555 123 457"],
        ["030 123 456", "030 123 457"],
        ["(555) 123-4567", "(555) 123-4568"],
        ["+49 171 123 456", "+49 171 123 457"],
        ["192.168.100.101", "192.168.100.102"],
        ["1.200.300", "1.200.301"],
        ["$001", "$002"],
        ["1-200", "1-300"],
        ["$5 to $9", "$7 to $9"],
        ["A$B1", "A$B2"],
        ["EURO5", "EURO6"],
        ["12:30", "12:45"],
        ["1,00,000 x", "2,00,000 x"],
    ],
    ids=lambda given: given[0],
)
def test_codes_and_telephone_numbers_are_no_amounts(cells: list[str]) -> None:
    assert amounts_of(cells) is None
    assert inspect_column("code", cells).kind is Kind.CATEGORY


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["$1,234", "$850"], ("'$1,234'", "1234", "1.234")),
        (["1.234 €", "850 €"], ("'1.234 €'", "1234", "1.234")),
        (["$5", "7 €"], ("several units", "'$5'", "'7 €'")),
        (["5%", "$7.10"], ("several units",)),
        (["$5", "$7", "on request"], ("amounts such as '$5'", "but also 'on request'")),
    ],
    ids=lambda given: given[0],
)
def test_cells_with_two_readings_are_not_read(cells: list[str], words: Sequence[str]) -> None:
    column = inspect_column("price", cells)
    assert column.kind is Kind.CATEGORY and column.amount is None
    assert all(word in column.unclear for word in words)


def test_plain_columns_are_read_as_before() -> None:
    assert inspect_column("a", ["1,5", "2,5"]).form == ","
    assert inspect_column("a", ["12%", "13%"]).form == "."
    assert inspect_column("a", ["1,234", "850"]).first_grouped == 0


def test_numbered_rows_stay_identifiers() -> None:
    cells = [f"{1_234_000 + i:,}" for i in range(60)]
    assert inspect_column("row", cells).kind is Kind.IDENTIFIER
    assert inspect_column("price", [f"${cell}" for cell in cells]).kind is Kind.NUMBER, "prices have a unit"


def write_table(path: Path, price: str = "${:,.2f}") -> Path:
    rows = (f"{price.format(900 + i * i * 7.3)};C{i:04};{i * i * 3.1 + i % 5:.1f}" for i in range(60))
    path.write_text("\n".join(["price;code;y", *rows]), encoding="utf-8")
    return path


def test_findings_say_how_amounts_are_read(tmp_path: Path) -> None:
    found = inspect_table(read_table(write_table(tmp_path / "data.csv")), "y", None)
    assert [column.name for column in found.columns] == ["price"]
    assert any("'$900.00' in line 2, read as 900" in text for text in found.findings)
    assert "identifier" in found.left_out["code"]


def test_findings_say_why_amounts_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    lines = ["price;age;y", *(f"${1000 + i * 37:,};{i % 9};{i * 3.1:.1f}" for i in range(60))]
    path.write_text("\n".join(lines), encoding="utf-8")
    found = inspect_table(read_table(path), "y", None)
    assert "1000 or 1" in found.left_out["price"] and "Write plain numbers" in found.left_out["price"]
    with pytest.raises(DataError, match="'price': found numbers such as"):
        inspect_table(read_table(path), "price", None)


def test_finding_says_how_the_target_is_read(tmp_path: Path) -> None:
    found = inspect_table(read_table(write_table(tmp_path / "data.csv", "{:,.2f} €")), "price", None)
    assert (found.task, found.amount, found.decimal) == ("regression", POINT, ".")
    assert any("'price' has amounts such as '900.00 €'" in text for text in found.findings)


def scripts_data(folder: Path) -> Any:
    """Import the ``data.py`` of a project."""
    spec = importlib.util.spec_from_file_location("project_data", folder / "data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("amounts")
    data = write_table(folder / "data.csv")
    assert main(["suggest", str(data), "--target", "price", "--write", str(folder / "p"), "--no-baseline"]) == 0
    return scripts_data(folder / "p")


def test_script_reads_the_target_as_the_command_does(project: Any) -> None:
    rows = project.read(project.__file__.replace("p/data.py", "data.csv"))
    fitted = project.Preprocessing.fit(rows)
    assert fitted.state["target"]["mean"] == pytest.approx(sum(900 + i * i * 7.3 for i in range(60)) / 60, abs=0.01)
    assert abs(float(fitted.targets(rows).mean())) < 1e-5


NUMBERS = st.decimals(-(10**9), 10**9, places=2)


@given(NUMBERS, st.sampled_from(["${}", "{} USD", "{}", "US$ {}", "{} %"]), st.booleans())
def test_script_and_command_read_the_same_values(project: Any, value: Any, unit: str, comma: bool) -> None:
    text = f"{value:,.2f}"
    form = COMMA if comma else POINT
    cell = unit.format(text.translate(str.maketrans(",.", ".,")) if comma else text)
    assert number(cell, form) == project.amount(cell, form) == float(value)


@pytest.mark.parametrize("cell", ["", "5 to 9 USD", "unknown"])
def test_script_reads_other_cells_as_missing(project: Any, cell: str) -> None:
    assert math.isnan(project.amount(cell, POINT)) and math.isnan(number(cell, POINT))
