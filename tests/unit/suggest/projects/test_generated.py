"""Generated data sets of all kinds, traps among them: each is inspected, gets a project, and the project trains."""

import re
from pathlib import Path

import pytest

from dljob.cli.entry import main
from support.generated_data import CASES, Case
from support.projects import metrics, script, shorten


def test_there_are_enough_data_sets() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: re.sub(r"\W+", "-", case.name))
def test_project_trains(case: Case, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = case.write(tmp_path / "data")
    project = tmp_path / "project"
    assert main(["suggest", str(data), "--write", str(project), *case.options]) == 0
    shorten(project, 2)
    script(project, "train.py")
    found = metrics(project)
    assert all(value == value for value in found.values())
    assert {"accuracy", "r2"} & set(found)
