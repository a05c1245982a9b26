"""Run the scripts of a project that ``dljob suggest`` wrote, as a user does.

They run in forks of a process that has imported torch, because the import would take most of a test's time. With
``fresh``, they run in an interpreter of their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dljob.suggest.recommendation.model import Baseline
from dljob.suggest.subject import Subject
from dljob.suggest.trial import TrialError
from support.trainer.ranks import run_apart

LIMIT_S = 300
NOT_RUN = "the baseline took more than 120 s and was stopped"


def no_baseline(subject: Subject, limit_s: float) -> Baseline:
    """Act as a baseline that takes too long. Tests that need no baseline use it, because it needs no time."""
    raise TrialError(NOT_RUN)


def script(folder: Path, name: str, *arguments: str, fresh: bool = False, **variables: str) -> str:
    """Run a script of a project to its end. Return what it prints."""
    done = _run(folder, name, arguments, variables, fresh=fresh)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def failed(folder: Path, name: str, *arguments: str, **variables: str) -> str:
    """Run a script of a project that ends with an error. Return the error."""
    done = _run(folder, name, arguments, variables)
    assert done.returncode != 0, done.stdout
    return done.stderr


def _run(
    folder: Path, name: str, arguments: tuple[str, ...], variables: dict[str, str], *, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(p).resolve()) for p in ("operator/contract", "trainer-image")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | variables
    if not fresh:
        return run_apart(name, *arguments, env=environment, cwd=folder, timeout_s=LIMIT_S)
    return subprocess.run(
        [sys.executable, name, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def shorten(folder: Path, epochs: int) -> None:
    """Train fewer epochs: for tests that check whether the scripts work together."""
    text = (folder / "train.py").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if "EPOCHS = int" in line)
    short = f"{line.rsplit(',', 1)[0]}, {epochs}"
    (folder / "train.py").write_text(text.replace(line, short), encoding="utf-8")


def analysis(folder: Path) -> dict[str, Any]:
    """Return the analysis in the run report of a project's training, without the results of other tasks."""
    report = json.loads((folder / "model" / "report.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = report["analysis"]["analysis"]
    of_task: dict[str, Any] = found[found["task"]]
    return found | of_task


def metrics(folder: Path) -> dict[str, float]:
    """Return what the training of a project measured."""
    found: dict[str, float] = json.loads((folder / "model" / "metrics.json").read_text(encoding="utf-8"))
    return found
