"""Real trainings keep what was predicted: peak memory is no higher, and a limit of time ends them with an evaluation."""

import json
import random
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from dljob.cli.entry import main
from support.generated_data import sources, story, texts
from support.projects import metrics, script, shorten

MAX_EPOCHS = 100_000


def suggest(capsys: pytest.CaptureFixture[str], data: Path, project: Path, *options: str) -> int:
    """Write a project. Return the memory that the command predicts, in bytes."""
    assert main(["suggest", str(data), "--write", str(project), "--no-baseline", "--json", *options]) == 0
    found: int = json.loads(capsys.readouterr().out)["models"][0]["predicted"]["memory_nbytes"]
    return found


def write_large(kind: str, folder: Path) -> Path:
    """Write data that take more memory than the libraries do."""
    draw = random.Random(1)
    if kind == "table":
        path = folder / "data.csv"
        lines = [",".join([*(f"x{j}" for j in range(30)), "city", "target"])]
        for i in range(60_000):
            cells = [f"{draw.random():.5f}" for _ in range(30)]
            lines.append(",".join([*cells, f"c{i % 40}", f"{i % 2}"]))
        path.write_text("\n".join(lines), encoding="utf-8")
        return path
    if kind in ("Parquet", "small Parquet"):
        rows = 60_000 if kind == "Parquet" else 60
        columns = {f"x{j}": np.random.default_rng(j).random(rows) for j in range(30)}
        cities = [f"c{i % 40}" for i in range(rows)]
        parquet.write_table(
            pyarrow.table(columns | {"city": cities, "target": np.arange(rows) % 2}), folder / "a.parquet"
        )
        return folder / "a.parquet"
    if kind == "images":
        x = np.random.default_rng(1).integers(0, 255, (20_000, 24, 24, 3), dtype=np.uint8)
        np.savez(folder / "data.npz", x=x, y=np.arange(20_000) % 4)
        return folder / "data.npz"
    if kind == "documents":
        path = folder / "data.jsonl"
        records = ({"text": story(draw.randint(60, 600)) + f" {i}", "label": i % 3} for i in range(20_000))
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path
    path = folder / "data.txt"
    lines = sources().splitlines()
    path.write_text("\n".join(f"{i} {line}" for i in range(100) for line in lines), encoding="utf-8")
    return path


@pytest.mark.long
@pytest.mark.parametrize("kind", ["table", "Parquet", "small Parquet", "images", "documents", "language"])
def test_peak_memory_is_no_higher_than_predicted(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted = suggest(capsys, write_large(kind, tmp_path), tmp_path / "project")
    script(tmp_path / "project", "train.py", TIME_LIMIT_S="30")
    measured = metrics(tmp_path / "project")["peak_kib"] * 1024
    assert measured <= predicted


@pytest.mark.parametrize(
    "name",
    [
        "texts in JSON Lines",
        pytest.param("folders of texts", marks=pytest.mark.long),
        pytest.param("a text file", marks=pytest.mark.long),
    ],
)
def test_limit_ends_the_training_with_an_evaluation(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    data = next(case for case in texts() if case.name == name).write(folder)
    suggest(capsys, data, tmp_path / "project")
    shorten(tmp_path / "project", MAX_EPOCHS)
    script(tmp_path / "project", "train.py", TIME_LIMIT_S="6")
    found = metrics(tmp_path / "project")
    assert 0 < found["steps"] < found["steps_planned"]
    assert 0 <= found["accuracy"] <= 1
