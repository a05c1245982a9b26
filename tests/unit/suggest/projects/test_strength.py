"""The baseline's choice of the regularization strength of a linear model, on a table with few rows."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from sklearn import datasets

from dljob.cli.entry import main
from support.generated_data import Write, binary, chosen, real, table
from support.projects import script

DEFAULT = "1.0"


def flowers(folder: Path) -> Path:
    """Write every third row of iris, on which several strengths have the same accuracy."""
    found = datasets.load_iris()
    with (folder / "data.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "d", "target"])
        writer.writerows([*row, f"c{goal}"] for row, goal in zip(found.data[::3], found.target[::3], strict=True))
    return folder / "data.csv"


def baseline(write: Write, folder: Path) -> dict[str, Any]:
    project = folder / "project"
    assert main(["suggest", str(write(folder)), "--write", str(project), "--no-baseline"]) == 0
    found: dict[str, Any] = json.loads(script(project, "baseline.py"))
    return found


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(flowers, id="flowers"),
        pytest.param(table({"a": real, "b": real, "target": binary}, rows=40), id="forty rows", marks=pytest.mark.long),
        pytest.param(table({"a": real, "target": chosen("x", "y")}), id="noise", marks=pytest.mark.long),
    ],
)
def test_the_chosen_strength_is_the_likeliest_and_no_worse_than_the_default(write: Write, tmp_path: Path) -> None:
    found = baseline(write, tmp_path)
    judged = found["strengths"]
    assert judged["scoring"] == "neg_log_loss"
    best, _ = judged["scores"][str(found["strength"])]
    default, error = judged["scores"][DEFAULT]
    assert best == max(mean for mean, _ in judged["scores"].values()) >= default - error


@pytest.mark.long
def test_a_class_with_one_row_leaves_the_choice_to_the_score_that_is_reported(tmp_path: Path) -> None:
    """The likelihood needs every class in each training part."""
    found = baseline(table({"a": real, "target": lambda i, d: "c" if i == 9 else binary(i, d)}), tmp_path)
    assert found["strengths"]["scoring"] == found["scoring"]
