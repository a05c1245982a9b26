"""Train the projects that ``dljob suggest`` writes on bundled data, and compare them with models without deep learning.

    hack/env python -m benchmarks.suggest.accuracy [--seeds 5] [--data digits,wine] [--json FILE]

For each data set, the command writes a project as a user gets it, with the baseline. Each seed holds out another fifth
of the rows: ``train.py`` and ``baseline.py`` train on the same rows and are judged by the same others. The goals come
from ten-fold cross-validation of seven simple models (logistic regression, SVM, nearest neighbours, forests, boosting,
naive Bayes, MLP): within 0.5 points of 99.0 % on digits, and within a standard error of 97.7 % on breast cancer, 98.3 %
on wine, 97.3 % on iris, and of an R² of 0.48 on diabetes. The standard error is that of the mean over the seeds.
Exit code 1 if a goal is missed.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.lib.goals import Figure, table
from sklearn import datasets

from dljob.cli.entry import main as dljob

GOALS = {"digits": 0.990, "breast cancer": 0.977, "wine": 0.983, "iris": 0.973, "diabetes": 0.48}
DIGITS_MARGIN = 0.005
LOADERS = {
    "breast cancer": datasets.load_breast_cancer,
    "wine": datasets.load_wine,
    "iris": datasets.load_iris,
    "diabetes": datasets.load_diabetes,
}
LIMIT_S = 600


def write_data(name: str, folder: Path) -> Path:
    """Write a data set as a user has it: a CSV file, or the images of both parts of the bundled digits."""
    if name == "digits":
        with np.load(str(files("dltrain.data") / "digits.npz")) as bundled:
            x = np.concatenate([bundled["x"], bundled["x_test"]])
            y = np.concatenate([bundled["y"], bundled["y_test"]])
        np.savez(folder / "digits.npz", x=x.reshape(-1, 8, 8), y=y)
        return folder / "digits.npz"
    found = LOADERS[name]()
    names = getattr(found, "target_names", None)
    path = folder / f"{name.replace(' ', '-')}.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*found.feature_names, "target"])
        for row, goal in zip(found.data.tolist(), found.target.tolist(), strict=True):
            writer.writerow([*row, goal if names is None else names[int(goal)]])
    return path


def script(folder: Path, name: str, seed: int) -> tuple[str, float]:
    """Run a script of a project. Return its output and the CPU seconds that it took."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env=os.environ | {"SEED": str(seed)},
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
        began = time.monotonic()
        if dljob(["suggest", str(data), "--write", str(project)]):
            raise RuntimeError(f"dljob suggest failed for {name}")
        found: dict[str, Any] = {"suggest_s": time.monotonic() - began, "scores": {"project": []}, "cpu_s": []}
        for seed in range(seeds):
            _, cpu_s = script(project, "train.py", seed)
            found["cpu_s"].append(cpu_s)
            metrics = json.loads((project / "model" / "metrics.json").read_text(encoding="utf-8"))
            found["scores"]["project"].append(metrics.get("r2", metrics.get("accuracy")))
            for model, score in json.loads(script(project, "baseline.py", seed)[0])["scores"].items():
                found["scores"].setdefault(model, []).append(score["test"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", default=",".join(GOALS), help="names of data sets, separated by commas")
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    given = parser.parse_args()
    found, figures = {}, []
    for name in given.data.split(","):
        own = found[name] = measure(name, given.seeds)
        for model, scores in own["scores"].items():
            mean = statistics.mean(scores)
            error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
            margin = DIGITS_MARGIN if name == "digits" else error
            low = GOALS[name] - margin if model == "project" else None
            figures.append(Figure(f"{name}: {model} (± {error:.3f})", mean, low=low))
        figures.append(Figure(f"{name}: CPU time of train.py", statistics.mean(own["cpu_s"]), "s", high=60))
        if given.json:
            given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(figures))
    return int(any(figure.missed for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
