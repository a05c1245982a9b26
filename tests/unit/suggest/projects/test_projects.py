"""The written projects: they are readable, their manifest is valid, and they train, judge and predict as they are."""

import ast
import csv
import hashlib
import json
import math
import os
import pty
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pytest
import yaml

from dlcontract import JOB_VARIABLE, UID_VARIABLE
from dljob.cli.entry import main
from dljob.client.model_copy import source
from dljob.job.plan.recommendation import parse_job
from dljob.suggest.inspection.table import TableFacts
from dljob.suggest.project.render import shared
from dljob.suggest.recommendation.model import Baseline
from dljob.suggest.subject import Options, read_subject
from dljob.suggest.trial import write
from support.generated_data import CASES, class_files
from support.projects import analysis, failed, metrics, script, shorten

MAX_LINES = 150
CALLS = ("dltrain.init(", "t.wrap(", "t.loader(", "t.steps(", "t.log(", "dltrain.evaluate(")


def write_table(path: Path, task: str) -> Path:
    """Write 80 rows with a number, a category, a date, missing values and an identifier."""
    draw = random.Random(3)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "size", "city", "since", "target"])
        for i in range(80):
            size, city = draw.random(), draw.choice(["Bonn", "Köln", ""])
            label = ("large" if size > 0.5 else "small") if task == "classification" else f"{3 * size + 1:.4f}"
            shown = "" if i == 7 else f"{size:.4f}"
            writer.writerow([i, shown, city, f"2024-0{1 + i % 9}-11", label])
    return path


def write_images(path: Path) -> Path:
    draw = np.random.default_rng(1)
    y = np.arange(60) % 2
    x = draw.integers(0, 100, (60, 8, 8)) + 150 * y[:, None, None]
    np.savez(path, x=x, y=y)
    return path


def suggest(data: Path, folder: Path, *options: str) -> None:
    assert main(["suggest", str(data), "--write", str(folder), "--no-baseline", *options]) == 0


@pytest.fixture(params=["classification", "regression", "images"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "images":
        data = write_images(tmp_path / "data.npz")
    else:
        data = write_table(tmp_path / "data.csv", request.param)
    suggest(data, tmp_path / "project")
    return tmp_path / "project"


def test_scripts_are_short_and_complete(project: Path) -> None:
    for path in project.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        compile(text, path.name, "exec")
        assert len(text.splitlines()) <= MAX_LINES, path.name
        assert "$" not in text, path.name
    train = (project / "train.py").read_text(encoding="utf-8")
    assert all(call in train for call in CALLS)


def test_manifest_has_the_scripts_and_a_valid_job(project: Path) -> None:
    scripts, job = yaml.safe_load_all((project / "job.yaml").read_text(encoding="utf-8"))
    for name, text in scripts["data"].items():
        assert text == (project / name).read_text(encoding="utf-8")
    assert parse_job(job).spec.model.given


@pytest.mark.parametrize(
    "project",
    [
        "classification",
        pytest.param("regression", marks=pytest.mark.long),
        pytest.param("images", marks=pytest.mark.long),
    ],
    indirect=True,
)
def test_project_trains_judges_and_predicts(project: Path) -> None:
    images = (project / "images.npz").exists()
    shorten(project, 3 if images else 40)
    baseline = json.loads(script(project, "baseline.py"))
    assert set(baseline["scores"]) == {"linear model", "trees"}
    script(project, "train.py", fresh=True)
    data = project.parent / ("data.npz" if images else "data.csv")
    if images:
        from PIL import Image

        data = project / "new.png"
        Image.fromarray(np.full((8, 8), 240, dtype=np.uint8)).save(data)
    predictions = script(project, "predict.py", str(data)).splitlines()
    assert len(predictions) == (2 if images else 81)
    assert metrics(project).get("r2", metrics(project).get("accuracy")) > 0.7
    check_report(project, baseline)
    written = (project / "baseline.json").read_text("utf-8")
    lines = script(project, "baseline.py", "--predict", str(data)).splitlines()
    assert len(lines) == len(predictions) and lines[0] in ("target", "file,class")
    assert (project / "baseline.json").read_text("utf-8") == written
    if "accuracy" in metrics(project):
        own = {line.split(",")[int(images)] for line in lines[1:]}
        assert own <= ({"0", "1"} if images else {"large", "small"})


def check_report(project: Path, baseline: dict[str, Any]) -> None:
    """Check the analysis in the run report against the metrics and the baseline of the project."""
    found, measured = analysis(project), metrics(project)
    counts = [count for row in found.get("confusion", [[16]]) for count in row]
    assert found["samples"] == sum(counts) > 10
    others = {name: score["test"] for name, score in baseline["scores"].items()}
    page = (project / "model" / "report.html").read_text("utf-8")
    assert {each["name"]: each["value"] for each in found["other_models"]} == pytest.approx(others)
    assert all(f"{name}</td>" in page for name in others)
    if found["task"] == "regression":
        assert (found["r2"], found["mae"]) == (measured["r2"], measured["mean_absolute_error"])
        assert all(1 <= target <= 4 for target, _ in found["points"]), "the units of the table"
        wrong = json.loads((project / "model" / "most_wrong.json").read_text("utf-8"))[0]
        assert float(wrong["row"]["target"]) == pytest.approx(float(wrong["target"]), rel=1e-4)
        largest = max(abs(residual) for _, residual in found["quantiles"])
        assert abs(float(wrong["prediction"]) - float(wrong["target"])) == pytest.approx(largest, rel=1e-3)
    else:
        assert found["accuracy"] == measured["accuracy"] and found["calibration"]["bins"]
        names = {"0", "1"} if (project / "images.npz").exists() else {"large", "small"}
        assert {each["name"] for each in found["figures"]} == names


@pytest.mark.long
def test_only_a_baseline_on_the_same_test_part_is_compared(tmp_path: Path) -> None:
    suggest(write_table(tmp_path / "data.csv", "classification"), project := tmp_path / "project")
    shorten(project, 2)
    script(project, "baseline.py")
    script(project, "train.py", SEED="1")
    assert analysis(project)["other_models"] == []
    script(project, "train.py")
    assert len(analysis(project)["other_models"]) == 2


def test_a_score_that_is_not_finite_is_not_compared(tmp_path: Path) -> None:
    judged = {"test_part": hashlib.sha256(b"").hexdigest(), "other_models": {"linear model": math.nan, "trees": 0.75}}
    (tmp_path / "baseline.json").write_text(json.dumps(judged), encoding="utf-8")
    found: dict[str, Any] = {"__file__": str(tmp_path / "train.py"), "Path": Path}
    found |= {"hashlib": hashlib, "json": json, "math": math}
    exec(Template(shared("other_models")).substitute(test_bytes="b''"), found)
    assert found["other_models"]() == {"trees": 0.75}


def test_project_keeps_the_scores_of_the_baseline_for_the_job_too(tmp_path: Path) -> None:
    subject = read_subject(Options(write_table(tmp_path / "data.csv", "classification")))
    judged = Baseline("accuracy", {}, test_part="5e1f", other_models={"trees": 0.75})
    write(tmp_path / "project", subject, subject.models(None)[0], None, judged)
    text = (tmp_path / "project" / "baseline.json").read_text("utf-8")
    assert json.loads(text) == {"test_part": "5e1f", "other_models": {"trees": 0.75}}
    scripts, job = yaml.safe_load_all((tmp_path / "project" / "job.yaml").read_text(encoding="utf-8"))
    assert scripts["data"]["baseline.json"] == text and set(scripts["data"]) > {"train.py", "model.py", "data.py"}
    assert parse_job(job).spec.model.given


def test_get_model_copies_the_model_of_a_projects_job(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: the job left its model beside its folder on the volume, which ``dljob get-model --all`` copies."""
    _, job = yaml.safe_load_all((project / "job.yaml").read_text(encoding="utf-8"))
    job["metadata"]["uid"], job["status"] = "0c8ad8a4", {"phase": "Complete"}
    own = {JOB_VARIABLE: job["metadata"]["name"], UID_VARIABLE: job["metadata"]["uid"]}
    given = {item["name"]: item["value"] for item in job["spec"]["trainer"]["env"]}
    for name, value in {**own, **given}.items():
        monkeypatch.setenv(name, value)
    line = next(line for line in (project / "train.py").read_text("utf-8").splitlines() if line.startswith("OUTPUT ="))
    found: dict[str, Any] = {"os": os, "Path": Path, "__file__": str(project / "train.py")}
    exec(line, found)
    assert found["OUTPUT"] == Path(source(job, whole=True)[1]) / "suggested-model"
    monkeypatch.delenv("MODEL_DIR")
    exec(line, found)
    assert found["OUTPUT"] == project / "model"


def test_hints_are_the_size_of_the_model(project: Path) -> None:
    _, job = yaml.safe_load_all((project / "job.yaml").read_text(encoding="utf-8"))
    code = (
        "import data, model, os\n"
        "images = os.path.exists('images.npz')\n"
        "rows = None if images else data.parts('../data.csv', 0)[0]\n"
        "p = None if images else data.Preprocessing.fit(rows)\n"
        "n = model.Network(2) if images else model.Network(p.inputs(rows).shape[1], len(p.state.get('classes', [0])))\n"
        "print(sum(q.numel() for q in n.parameters()))\n"
    )
    (project / "count.py").write_text(code, encoding="utf-8")
    parameters = int(script(project, "count.py"))
    assert job["spec"]["model"]["hints"]["parameters"] == pytest.approx(parameters, rel=0.2)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param("größe,b\n1,2\n".encode("cp1252"), "can't decode byte 0xf6", id="windows-1252"),
        pytest.param("größe,b\n1,2\n".encode("utf-16"), "text in utf-8-sig with the delimiter ','", id="utf-16"),
        pytest.param(b"", "found no row", id="empty"),
        pytest.param("größe,b\n".encode(), "found no row", id="header"),
        pytest.param("größe;b\n1;2\n".encode(), "found no column 'größe', but 'größe;b'", id="delimiter"),
        pytest.param("größe,c\n1,2\n".encode(), "found no column 'b', but 'größe', 'c'", id="column"),
        pytest.param(
            "größe,b\n1,2\n1,2,3\n".encode(), "(line 3: number of cells: found 3; expected 2)", id="more cells"
        ),
        pytest.param(
            "größe,b\n1,2\n\n1\n".encode(), "(line 4: number of cells: found 1; expected 2)", id="fewer cells"
        ),
        pytest.param(None, "No such file", id="no file"),
    ],
)
def test_the_scripts_name_why_new_rows_cannot_be_read(raw: bytes | None, expected: str, tmp_path: Path) -> None:
    """Fixed bug: they named a missing column, or ended with a traceback, if the encoding was another or a row missing."""
    if raw is not None:
        (tmp_path / "new.csv").write_bytes(raw)
    for new_rows in readers_of_new_rows(tmp_path):
        with pytest.raises(SystemExit) as error:
            new_rows(tmp_path / "new.csv")
        assert expected in str(error.value) and str(error.value).startswith(str(tmp_path / "new.csv"))


def test_the_scripts_name_cells_that_they_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fixed bug: they predicted from 'unknown' in a column of numbers as from a missing cell, without a word."""
    (tmp_path / "new.csv").write_text("b,größe\n1,1\n2,unknown\n9,\n1,-\n0,1 m\n", encoding="utf-8")
    for new_rows in readers_of_new_rows(tmp_path):
        assert len(new_rows(tmp_path / "new.csv")) == 5
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{tmp_path / 'new.csv'}: column 'größe': found 'unknown', in 2 rows no number")


def test_the_header_of_a_table_may_follow_an_empty_line(tmp_path: Path) -> None:
    """Fixed bug: dljob suggest read such a table, but the scripts found no column in it."""
    (tmp_path / "new.csv").write_text("\n\nb,größe\n1,2\n", encoding="utf-8")
    for new_rows in readers_of_new_rows(tmp_path):
        assert new_rows(tmp_path / "new.csv") == [{"b": "1", "größe": "2"}]


def readers_of_new_rows(folder: Path) -> Iterator[Callable[[Path], list[dict[str, str]]]]:
    """Yield the function that reads new rows from each script of a project that predicts."""
    lines = ["größe,b,target", *(f"{i / 2},{i % 3},{i % 2}" for i in range(40))]
    (folder / "data.csv").write_text("\n".join(lines), encoding="utf-8")
    subject = read_subject(Options(folder / "data.csv"))
    project = subject.project(subject.models(None)[0], None)
    for name in ("predict.py", "baseline.py"):
        found: dict[str, Any] = {"csv": csv, "sys": sys}
        exec(project["data.py"], found)
        tree = ast.parse(project[name])
        own = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "new_rows"]
        exec(compile(ast.Module(own, []), name, "exec"), found)
        yield found["new_rows"]


def test_the_baseline_prints_words_in_a_terminal(tmp_path: Path) -> None:
    suggest(write_table(tmp_path / "data.csv", "regression"), tmp_path / "project")
    terminal, output = pty.openpty()
    try:
        subprocess.run([sys.executable, "baseline.py"], cwd=tmp_path / "project", stdout=output, check=True)
        lines = os.read(terminal, 10_000).decode().splitlines()
    finally:
        os.close(terminal)
        os.close(output)
    assert [line.partition(": r2 ")[0] for line in lines] == ["linear model", "trees"]
    assert all("on the test part" in line and "±" in line for line in lines)


@pytest.mark.parametrize("missing", ["data.csv", "test.csv"])
def test_the_scripts_name_data_that_is_missing(missing: str, tmp_path: Path) -> None:
    """Fixed bug: train.py ended with a traceback if the data had been moved."""
    paths = {name: tmp_path / name for name in ("data.csv", "test.csv")}
    for path in paths.values():
        path.touch()
    values = {"data": repr(str(paths["data.csv"])), "test_data": repr(str(paths["test.csv"])), "in_dataset": ""}
    code = Template(shared("paths")).substitute(values)
    exec(code, {"os": os, "Path": Path})
    paths[missing].unlink()
    with pytest.raises(SystemExit, match=f"{missing}: found no data; .* DLJOB_DATASET"):
        exec(code, {"os": os, "Path": Path})


def test_predict_names_the_file_that_a_model_lacks(project: Path) -> None:
    """Fixed bug: it ended with a traceback for a copy of a job's checkpoint, which has no preprocessing."""
    (project / "model").mkdir()
    (project / "model" / "model.safetensors").touch()
    error = failed(project, "predict.py", "new")
    assert error.startswith(f"{project / 'model'}: found no preprocessing.json; expected ") and error.count("\n") == 1
    (project / "model").rename(project / "suggested-model")  # as dljob get-model writes it
    assert failed(project, "predict.py", "new").startswith(
        f"{project / 'suggested-model'}: found no preprocessing.json; "
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing.csv"], "no such file"),
        (["data.parquet"], "found no readable Parquet file"),
        (["data.xlsx"], "Excel"),
        (["data.csv", "--target", "price"], "--target"),
        (["data.csv", "--image-size", "-5"], "--image-size: found -5"),
        (["data.csv", "--within", "20"], "--within: found '20'"),
        (["data.csv", "--within", "1s"], "expected at least"),
        (["data.csv", "--test", "data.jsonl"], "the same format"),
        (["data.csv", "--task", "image-classification"], "folder for each class"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    write_table(tmp_path / "data.csv", "classification")
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    (tmp_path / "data.xlsx").write_bytes(b"PK")
    assert main(["suggest", str(tmp_path / arguments[0]), *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_existing_files_are_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_table(tmp_path / "data.csv", "regression")
    assert main(["suggest", str(data), "--write", str(tmp_path), "--no-baseline"]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_project_is_not_written_into_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fixed bug: README.md of the project became a document, and its folder a class, when train.py ran."""
    data = class_files()(tmp_path / "texts")
    assert main(["suggest", str(data), "--write", str(data / "project"), "--no-baseline"]) == 2
    assert "--write: found" in capsys.readouterr().err and not (data / "project").exists()


def test_other_tables_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    """Excel writes it. Fixed bug: the first column of --test FILE, and of a table for predict.py, was not found."""
    data = write_table(tmp_path / "data.csv", "regression")
    other = tmp_path / "other.csv"
    other.write_text(data.read_text(encoding="utf-8").replace("2024-0", "2023-0"), encoding="utf-8-sig")
    subject = read_subject(Options(data, test=other))
    assert isinstance(subject.facts, TableFacts) and subject.facts.test_rows
    found: dict[str, Any] = {}
    exec(subject.project(subject.models(None)[0], None)["data.py"], found)
    assert set(found["records"](other)[0]) == {"id", "size", "city", "since", "target"}


def test_times_with_and_without_fractions_are_dates(tmp_path: Path) -> None:
    """Parquet with milliseconds has such times. Fixed bug: the column was taken for an identifier, and left out."""
    (tmp_path / "data").mkdir()
    data = next(case for case in CASES if case.name.startswith("times with")).write(tmp_path / "data")
    subject = read_subject(Options(data))
    found: dict[str, Any] = {}
    exec(subject.project(subject.models(None)[0], None)["data.py"], found)
    days = found["numbers"](found["COLUMNS"]["at"], [row["at"] for row in found["records"](data)])
    assert np.isfinite(days).all() and days[1, 0] - days[0, 0] == pytest.approx(1 + 0.5 / 86400)
