"""Columns that give the target away, and rows that belong together: each is a finding, and ordinary columns are not."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dljob.suggest.inspection.table import TableFacts, inspect_table
from dljob.suggest.reading.table import read_table

ROWS = 300
DRAW = random.Random(3)
LABELS = [DRAW.choice(["yes", "no"]) for _ in range(ROWS)]
THREE = [DRAW.choice("abc") for _ in range(ROWS)]
NUMBERS = [DRAW.gauss(100, 10) for _ in range(ROWS)]
Cell = Callable[[int], object]


def facts(folder: Path, cell: Cell, goal: list[object], name: str = "column", **options: object) -> TableFacts:
    """Return the facts about a table with the column ``name``, a random column and the target ``goal``."""
    draw, path = random.Random(4), folder / "data.csv"
    lines = [f"{name},noise,goal", *(f"{cell(i)},{draw.random():.4f},{value}" for i, value in enumerate(goal))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return inspect_table(read_table(path), "goal", None)


def about(found: TableFacts, words: str) -> list[str]:
    return [text for text in found.findings if words in text]


@pytest.mark.parametrize(
    ("cell", "goal"),
    [
        pytest.param(lambda i: random.Random(i).choice("abc" if LABELS[i] == "yes" else "def"), LABELS, id="codes"),
        pytest.param(lambda i: (1 if LABELS[i] == "yes" else -1) * (5 + i % 7), LABELS, id="a threshold"),
        pytest.param(lambda i: "" if i % 90 == 0 else int(LABELS[i] == "yes"), LABELS, id="copy with gaps"),
        pytest.param(lambda i: f"2024-01-{1 + i % 28:02}" if LABELS[i] == "yes" else "", LABELS, id="date if yes"),
        pytest.param(lambda i: i % 5 if LABELS[i] == "yes" else "", LABELS, id="number if yes"),
        pytest.param(lambda i: 10 * "abc".index(THREE[i]) + i % 5, THREE, id="an interval for each class"),
        pytest.param(lambda i: f"{1.1 * NUMBERS[i]:.2f}", [f"{v:.2f}" for v in NUMBERS], id="another currency"),
        pytest.param(lambda i: f"{NUMBERS[i] ** 9:.6e}", [f"{v:.4f}" for v in NUMBERS], id="a power"),
    ],
)
def test_a_column_that_alone_predicts_the_target_is_found(tmp_path: Path, cell: Cell, goal: list[object]) -> None:
    found = facts(tmp_path, cell, goal)
    assert len(about(found, "'column' alone predicts the target")) == 1
    assert "column" in {column.name for column in found.columns}
    assert not about(found, "'noise' alone")


@pytest.mark.parametrize(
    ("cell", "goal"),
    [
        pytest.param(lambda i: random.Random(i).gauss(1.5 * (LABELS[i] == "yes"), 1), LABELS, id="a good number"),
        pytest.param(lambda i: f"city {i // 2}", LABELS, id="categories of two rows"),
        pytest.param(lambda i: f"{NUMBERS[i] + random.Random(i).gauss(0, 1):.2f}", NUMBERS, id="correlation 0.995"),
        pytest.param(lambda i: i % 7, ["rare" if i == 3 else "no" for i in range(ROWS)], id="one row of a class"),
        pytest.param(lambda i: "" if i % 9 == 0 else i % 7, LABELS, id="gaps at random"),
    ],
)
def test_an_ordinary_column_is_no_leak(tmp_path: Path, cell: Cell, goal: list[object]) -> None:
    assert not about(facts(tmp_path, cell, goal), "alone predicts")


def test_enormous_numbers_can_be_compared(tmp_path: Path) -> None:
    assert about(facts(tmp_path, lambda i: f"{NUMBERS[i]:.6f}e95", [f"{v:.6f}e90" for v in NUMBERS]), "alone")


def test_rows_of_one_patient_in_both_parts_are_found(tmp_path: Path) -> None:
    found = facts(tmp_path, lambda i: f"P{i % 60:03}", LABELS, "patient_id")
    assert about(found, "'patient_id' looks like an identifier of groups: 60 in 300 rows")
    assert not about(facts(tmp_path, lambda i: f"P{i % 60:03}", LABELS, "paid"), "identifier of groups")


def test_rows_in_time_order_are_found(tmp_path: Path) -> None:
    def hour(i: int) -> str:
        return f"2024-01-{1 + i // 24:02} {i % 24:02}:00:00"

    assert about(facts(tmp_path, hour, LABELS), "in the order of the dates in 'column'")
    assert about(facts(tmp_path, lambda i: hour(ROWS - i), LABELS), "in the order of the dates")
    assert not about(facts(tmp_path, lambda i: hour(i * 7 % ROWS), LABELS), "in the order of the dates")


@pytest.mark.parametrize(("name", "left_out"), [("CustomerID", True), ("PassengerId", True), ("valid", False)])
def test_identifiers_in_camel_case_are_left_out(tmp_path: Path, name: str, left_out: bool) -> None:
    found = facts(tmp_path, lambda i: 10_000 + 3 * i, LABELS, name)
    assert (name in found.left_out) is left_out
