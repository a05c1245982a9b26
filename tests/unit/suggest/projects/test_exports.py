"""``predict.py --export`` writes a program that computes what predict.py does, without the project."""

import csv
import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dljob.cli.entry import main
from support.generated_data import CASES
from support.projects import script, shorten

CASE = {case.name: case for case in CASES}


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a trained project of the data set with the name in the parameter."""
    (tmp_path / "data").mkdir()
    case = CASE[request.param]
    data = case.write(tmp_path / "data")
    assert main(["suggest", str(data), "--write", str(tmp_path / "project"), "--no-baseline", *case.options]) == 0
    shorten(tmp_path / "project", 1)
    script(tmp_path / "project", "train.py")
    return tmp_path / "project"


def exported(project: Path) -> tuple[Any, dict[str, Any]]:
    """Return the exported program, and the preprocessing in its file."""
    path = script(project, "predict.py", "--export").strip()
    assert Path(path) == project / "model" / "model.pt2"
    files = {"preprocessing.json": ""}
    program = torch.export.load(path, extra_files=files).module()
    return program, json.loads(files["preprocessing.json"] or "{}")


def data_of(project: Path) -> Any:
    found = ModuleType("data")
    exec(compile((project / "data.py").read_text(encoding="utf-8"), "data.py", "exec"), found.__dict__)
    return found


def predicted(project: Path, *arguments: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(script(project, "predict.py", *arguments))))[1:]


def check_classes(rows: list[list[str]], logits: torch.Tensor, classes: list[str], column: int) -> None:
    probabilities, numbers = logits.softmax(1).max(1)
    assert [row[column] for row in rows] == [classes[int(i)] for i in numbers]
    assert [float(row[column + 1]) for row in rows] == pytest.approx(probabilities.tolist(), abs=1e-4)


@pytest.mark.parametrize("project", ["comma", pytest.param("regression", marks=pytest.mark.long)], indirect=True)
def test_the_program_of_a_table_predicts_the_same(project: Path) -> None:
    program, state = exported(project)
    path, data = project.parent / "data" / "data.csv", data_of(project)
    logits = program(torch.from_numpy(data.Preprocessing(state).inputs(data.records(path))))
    rows = predicted(project, str(path))
    if "classes" in state:
        check_classes(rows, logits, state["classes"], 0)
        alone = torch.from_numpy(data.Preprocessing(state).inputs([{}]))
        assert program(alone).shape == (1, len(state["classes"]))
    else:
        own = state["target"]
        values = (logits.squeeze(1).double() * own["deviation"] + own["mean"]).tolist()
        assert [float(row[0]) for row in rows] == pytest.approx(values, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("project", ["image folder"], indirect=True)
def test_the_program_of_images_predicts_the_same(project: Path) -> None:
    program, state = exported(project)
    data = data_of(project)
    files = sorted((project.parent / "data").rglob("*.png"))[:3]
    x = data.Preprocessing(state).inputs(np.stack([data.scaled(file) for file in files]))
    check_classes(predicted(project, *map(str, files)), program(torch.from_numpy(x)), state["classes"], 1)


@pytest.mark.long
@pytest.mark.parametrize("project", ["texts in JSON Lines"], indirect=True)
def test_the_program_of_texts_predicts_the_same(project: Path) -> None:
    program, state = exported(project)
    texts = ["a goal of the team", "the price of a share", "bank"]
    logits = program(*map(torch.from_numpy, data_of(project).Preprocessing(state).inputs(texts)))
    check_classes(predicted(project, *texts), logits, state["classes"], 0)


@pytest.mark.long
@pytest.mark.parametrize("project", ["a text file"], indirect=True)
def test_the_program_of_a_language_model_continues_in_the_same_way(project: Path) -> None:
    program, _ = exported(project)
    found = list(b"def ")
    for _ in range(12):
        found.append(int(program(torch.tensor([found]))[0, -1].argmax()))
    expected = script(project, "predict.py", "def ", "--bytes", "12", "--temperature", "0")
    assert expected.rstrip("\n") == bytes(found).decode("utf-8", "replace").rstrip("\n")
