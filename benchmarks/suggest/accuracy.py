"""Train the projects that ``dljob suggest`` writes on bundled data, and compare them with models without deep learning.

    hack/env python -m benchmarks.suggest.accuracy [--seeds 5] [--data digits,wine] [--json FILE]

For each data set, the command writes a project as a user gets it, with the baseline. ``train.py`` and ``baseline.py``
train on the same rows and are judged by the same others. Tables are cut into as many parts as there are seeds, and each
part is held out once, as in cross-validation. Of images and documents, each seed holds out another fifth.

The goals come from ten-fold cross-validation of seven simple models (logistic regression, SVM, nearest neighbours,
forests, boosting, naive Bayes, MLP): within 0.5 points of 99.0 % on digits, and within a standard error of 97.7 % on
breast cancer, 98.3 % on wine, 97.3 % on iris, and of an R² of 0.48 on diabetes. The standard error is that of the mean.

Two data sets are documents that Python itself ships: docstrings, whose class is their package, and the topics of
``help()``, from which a language model learns within three minutes. Their goals are the baselines of the same run: at
most a standard error below the linear model, and fewer bits for each byte than pairs of bytes take.
Exit code 1 if a goal is missed.
"""

import argparse
import ast
import csv
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from benchmarks.lib.goals import Figure, table
from sklearn import datasets
from sklearn.model_selection import KFold, StratifiedKFold

from dljob.cli.entry import main as dljob

GOALS = {"digits": 0.990, "breast cancer": 0.977, "wine": 0.983, "iris": 0.973, "diabetes": 0.48}
DIGITS_MARGIN = 0.005
LOADERS = {
    "breast cancer": datasets.load_breast_cancer,
    "wine": datasets.load_wine,
    "iris": datasets.load_iris,
    "diabetes": datasets.load_diabetes,
}
DOCSTRINGS, TOPICS = "docstrings", "help topics"
MIN_WORDS = 5
PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
OPTIONS = {TOPICS: ["--within", "3m"]}
MAX_CLASSES = 20
LIMIT_S = 600


def write_data(name: str, folder: Path) -> Path:
    """Write a data set as a user has it: a CSV file, or the images of both parts of the bundled digits."""
    if name == "digits":
        with np.load(str(files("dltrain.data") / "digits.npz")) as bundled:
            x = np.concatenate([bundled["x"], bundled["x_test"]])
            y = np.concatenate([bundled["y"], bundled["y_test"]])
        np.savez(folder / "digits.npz", x=x.reshape(-1, 8, 8), y=y)
        return folder / "digits.npz"
    if name == DOCSTRINGS:
        path = folder / "docstrings.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in docstrings()), encoding="utf-8")
        return path
    if name == TOPICS:
        path = folder / "topics.txt"
        path.write_text("\n\n".join(topics.values()), encoding="utf-8")
        return path
    found = LOADERS[name]()
    names = getattr(found, "target_names", None)
    path = folder / f"{name.replace(' ', '-')}.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*found.feature_names, "target"])
        for row, goal in zip(found.data.tolist(), found.target.tolist(), strict=True):
            writer.writerow([*row, goal if names is None else names[int(goal)]])
    return path


def docstrings() -> Iterator[dict[str, str]]:
    """Yield the docstrings of some packages of the standard library, with the package as their class."""
    folder = Path(sysconfig.get_path("stdlib"))
    for package in PACKAGES:
        for path in sorted((folder / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef | ast.Module):
                    text = ast.get_docstring(node) or ""
                    if len(text.split()) >= MIN_WORDS:
                        yield {"text": text, "label": package}


def write_folds(data: Path, folder: Path, count: int) -> list[Path]:
    """Cut a table into ``count`` parts with the same mix of classes. Return the training file of each cut.

    The test file lies beside it.
    """
    with data.open(encoding="utf-8", newline="") as file:
        names, *rows = list(csv.reader(file))
    goal = [row[-1] for row in rows]
    split = StratifiedKFold if len(set(goal)) < MAX_CLASSES else KFold
    found = []
    for k, (train, test) in enumerate(split(count, shuffle=True, random_state=0).split(rows, goal)):
        (folder / str(k)).mkdir()
        for name, indices in (("train.csv", train), ("test.csv", test)):
            with (folder / str(k) / name).open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([names, *(rows[i] for i in indices)])
        found.append(folder / str(k) / "train.csv")
    return found


def goal(name: str, scores: dict[str, list[float]], error: float) -> float:
    """Return the least score of the project that meets its goal."""
    if name == DOCSTRINGS:
        return statistics.mean(scores["linear model"]) - error
    return GOALS[name] - (DIGITS_MARGIN if name == "digits" else error)


def script(folder: Path, name: str, seed: int, data: Path | None) -> tuple[str, float]:
    """Run a script of a project. Return its output and the CPU seconds that it took."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env=os.environ | {"SEED": str(seed)} | ({"DLJOB_DATASET": str(data)} if data else {}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    after = os.times()
    if done.returncode:
        raise RuntimeError(f"{folder.name}/{name}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout, after.children_user - before.children_user + after.children_system - before.children_system


def measure(name: str, seeds: int) -> dict[str, Any]:
    """Return the scores of one data set: of the project and of each baseline, by seed."""
    with tempfile.TemporaryDirectory() as folder:
        data, project = write_data(name, Path(folder)), Path(folder) / "project"
        parts: list[Path] | list[None] = [None] * seeds
        options = OPTIONS.get(name, [])
        if name in LOADERS:
            parts = write_folds(data, Path(folder), seeds)
            data, options = parts[0], ["--test", str(parts[0].with_name("test.csv"))]
        began = time.monotonic()
        if dljob(["suggest", str(data), "--write", str(project), *options]):
            raise RuntimeError(f"dljob suggest failed for {name}")
        found: dict[str, Any] = {"suggest_s": time.monotonic() - began, "scores": {"project": []}, "cpu_s": []}
        for seed, part in enumerate(parts):
            _, cpu_s = script(project, "train.py", seed, part)
            found["cpu_s"].append(cpu_s)
            metrics = json.loads((project / "model" / "metrics.json").read_text(encoding="utf-8"))
            found["scores"]["project"].append(metrics.get("r2", metrics.get("bits_per_byte", metrics.get("accuracy"))))
            for model, score in json.loads(script(project, "baseline.py", seed, part)[0])["scores"].items():
                found["scores"].setdefault(model, []).append(score["test"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", default=",".join([*GOALS, DOCSTRINGS, TOPICS]), help="names, separated by commas")
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    given = parser.parse_args()
    found, figures = {}, []
    for name in given.data.split(","):
        own = found[name] = measure(name, given.seeds)
        for model, scores in own["scores"].items():
            mean = statistics.mean(scores)
            error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
            label, judged = f"{name}: {model} (± {error:.3f})", model == "project"
            if name == TOPICS:
                high = statistics.mean(own["scores"]["pairs of bytes"]) if judged else None
                figures.append(Figure(label, mean, "bits", high=high))
            else:
                figures.append(Figure(label, mean, low=goal(name, own["scores"], error) if judged else None))
        figures.append(
            Figure(
                f"{name}: CPU time of train.py", statistics.mean(own["cpu_s"]), "s", high=180 if name == TOPICS else 60
            )
        )
        if given.json:
            given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(figures))
    return int(any(figure.missed for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
