"""Targets that are easily misread: each is read as it is meant, or a finding or an error says how it is read."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from dljob.suggest.errors import DataError
from dljob.suggest.inspection.table import TableFacts, inspect_table
from dljob.suggest.reading.table import read_table

ROWS = 120


def facts(
    folder: Path, goal: Sequence[object], header: str = "a,b,result", task: str | None = None, target: str | None = None
) -> TableFacts:
    """Return the facts about a table with two columns of random numbers and the column ``goal``."""
    draw, path = random.Random(4), folder / "data.csv"
    lines = [header, *(f"{draw.random():.4f},{draw.random():.4f},{value}" for value in goal)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return inspect_table(read_table(path), target, task)


def has(found: TableFacts, words: str) -> bool:
    return any(words in text for text in found.findings)


def cycle(*values: object) -> list[object]:
    return [values[i % len(values)] for i in range(ROWS)]


@pytest.mark.parametrize(
    ("header", "expected", "why"),
    [
        ("x,y,price", "price", "is the last one"),
        ("name,category,price", "price", "is the last one"),
        ("x1,x2,y", "y", "has a usual name of targets"),
        ("y,x1,x2", "y", "has a usual name of targets"),
        ("x1,label,x2", "label", "has a usual name of targets"),
    ],
)
def test_a_column_between_others_with_a_name_of_features_is_no_target(
    tmp_path: Path, header: str, expected: str, why: str
) -> None:
    """Fixed bug: of coordinates x and y and a price, the target was y."""
    found = facts(tmp_path, [f"{i * i % 71}.5" for i in range(ROWS)], header)
    assert found.target == expected and has(found, f"The target is the column {expected!r}, which {why}.")


def test_classes_that_differ_in_case_or_blanks_are_found(tmp_path: Path) -> None:
    assert has(facts(tmp_path, cycle("yes", "no", "Yes")), "'yes' and 'Yes' differ in case or blanks only")
    assert has(facts(tmp_path, cycle("not  yet", "no", "not yet")), "differ in case or blanks only")
    assert not has(facts(tmp_path, cycle("yes", "no")), "differ in case")


def test_dates_as_a_target_are_an_error_instead_of_classes(tmp_path: Path) -> None:
    """Fixed bug: a column of 84 dates was a classification with 84 classes."""
    dates = cycle("2023-01-01", "2023-02-03", "2023-05-06")
    with pytest.raises(DataError, match="column 'result': found dates such as '2023-01-01'"):
        facts(tmp_path, dates)
    assert len(facts(tmp_path, dates, task="classification").classes) == 3


def test_a_word_among_classes_that_are_numbers_is_no_regression(tmp_path: Path) -> None:
    """Fixed bug: of classes 0 and 1 with a few cells "unknown", an error asked for numbers."""
    found = facts(tmp_path, [*cycle(0, 1)[:-3], "unknown", "unknown", "unknown"])
    assert found.classes == {"0": 59, "1": 58, "unknown": 3}
    assert has(found, "Class 'unknown' is no number, unlike the others")


def test_many_whole_numbers_as_classes_are_found(tmp_path: Path) -> None:
    words = "The 8 whole numbers of the target are read as classes"
    assert has(facts(tmp_path, cycle(*range(8))), words)
    assert not has(facts(tmp_path, cycle(*range(8)), task="classification"), words)
    assert not has(facts(tmp_path, cycle(*range(4))), "whole numbers")


def test_whole_numbers_that_hardly_repeat_are_no_classes(tmp_path: Path) -> None:
    assert facts(tmp_path, [i * 37 % 101 for i in range(16)]).task == "regression"


def test_a_skewed_target_gets_the_advice_of_a_logarithm(tmp_path: Path) -> None:
    draw = random.Random(2)
    skewed = [f"{draw.lognormvariate(5, 3):.2f}" for _ in range(ROWS)]
    assert has(facts(tmp_path, skewed), "predict the logarithm")
    assert not has(facts(tmp_path, [*(f"{i}.5" for i in range(ROWS - 1)), "1e9"]), "logarithm")


def test_a_class_with_the_name_of_a_missing_value_is_found(tmp_path: Path) -> None:
    found = facts(tmp_path, cycle("None", "Mild", "Severe"))
    assert has(found, "40 rows without a target are left out; the first is line 2, with 'None'")
    assert has(found, "'None' counts as a missing target. If it is a class, write another word.")
    assert not has(facts(tmp_path, cycle("", "Mild", "Severe")), "counts as a missing target")


def test_one_row_without_a_target_is_in_the_singular(tmp_path: Path) -> None:
    assert has(facts(tmp_path, ["", *cycle("u", "v")]), "1 row without a target is left out; the first is line 2.")


def test_a_class_of_one_row_is_found_in_small_tables_too(tmp_path: Path) -> None:
    """Fixed bug: only classes with less than a tenth of an equal share were named."""
    assert has(facts(tmp_path, ["w", *cycle("u", "v")[:20]]), "Class 'w' has one row. The test part cannot judge it.")


@pytest.mark.parametrize(
    ("goal", "expected"),
    [
        pytest.param([f"1.{i}e300" for i in range(ROWS)], "found '1.0e300'; expected a number of at most", id="all"),
        pytest.param([*(f"{i}.5" for i in range(ROWS - 1)), "-2e120"], "found '-2e120'; expected a number", id="one"),
        pytest.param([f"1.{i}e-300" for i in range(ROWS)], "found numbers such as '1.0e-300'", id="tiny"),
        pytest.param([10**25 + i for i in range(ROWS)], "equal, or nearly, as 64-bit floats", id="equal as floats"),
    ],
)
def test_targets_whose_squares_are_infinite_or_zero_are_refused(
    tmp_path: Path, goal: list[object], expected: str
) -> None:
    """Fixed bug: the deviation became infinite or 0, all scaled targets were equal, and every model looked perfect."""
    with pytest.raises(DataError) as error:
        facts(tmp_path, goal, task="regression")
    assert expected in str(error.value)


def test_large_targets_within_the_limit_are_numbers(tmp_path: Path) -> None:
    assert facts(tmp_path, [f"1.{i}e90" for i in range(ROWS)]).task == "regression"
