"""Run scripts of a project before it is handed over: its baseline, and a short training that measures the pace."""

import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from dljob.suggest.project.render import with_baseline
from dljob.suggest.recommendation.model import Baseline, Score, Settings
from dljob.suggest.subject import Subject

BASELINE_LIMIT_S = 300.0
GRACE_S = 30.0
"""After this time beyond its limit, a training that does not stop itself is ended."""


_LIMITED = """
import contextlib, resource, runpy, sys
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
own = int(sys.argv[1]) if hard == resource.RLIM_INFINITY else min(int(sys.argv[1]), hard)
resource.setrlimit(resource.RLIMIT_DATA, (own, hard))
with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Run a script with a limit of its memory. If the kernel needs memory in spite of it, it ends this process first."""
_NO_MEMORY = ("MemoryError", "bad_alloc", "Cannot allocate memory", "can't start new thread")


@dataclass(frozen=True)
class Pace:
    """Time and memory of a training, measured in its first steps."""

    training_s: float
    """Seconds that all steps of the training would take, without start and evaluation."""
    peak_nbytes: int


class TrialError(Exception):
    """A script that failed. The message says in one line why."""


def write(
    folder: Path, subject: Subject, settings: Settings, limit_s: float | None, judged: Baseline | None = None
) -> None:
    """Write the project for ``settings``, which compares itself with ``judged``, to a folder.

    Raise OSError if that is impossible.
    """
    folder.mkdir(parents=True, exist_ok=True)
    project = subject.project(settings, limit_s)
    for name, text in (project if judged is None else with_baseline(project, judged)).items():
        # The path of the data in the README may have bytes that are not UTF-8. Scripts have it escaped.
        (folder / name).write_text(text, encoding="utf-8", errors="replace")
    if subject.copied is not None and subject.arrays is None:
        shutil.copyfile(subject.copied, folder / subject.copied.name)
    if subject.arrays is not None:
        packed = io.BytesIO()
        np.savez_compressed(packed, **subject.arrays)
        (folder / "images.npz").write_bytes(packed.getvalue())


def baseline(
    subject: Subject,
    environment: Mapping[str, str],
    limit_s: float = BASELINE_LIMIT_S,
    memory_nbytes: int | None = None,
) -> Baseline:
    """Run the baseline of the project in a process of its own. Raise TrialError if it fails or exceeds a limit.

    ``environment``: environment variables of the process. ``limit_s``: time limit in seconds. ``memory_nbytes``: limit
    of its memory in bytes; None: no limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), subject, subject.models(None)[0], None)
        own = _own(subject, environment)
        found = json.loads(_run(Path(folder), "baseline.py", "the baseline", own, limit_s, memory_nbytes))
    scores = {name: Score(**score) for name, score in found["scores"].items()}
    others = {name: value for name, value in found["other_models"].items() if isfinite(value)}
    if not all(isfinite(each.validation) and isfinite(each.error) for each in scores.values()):
        raise TrialError("the baseline has no score on held-out folds of the training part, as with very few rows")
    return Baseline(found["scoring"], scores, found.get("strength", 1.0), found["test_part"], others)


def can_train() -> bool:
    """Return True if PyTorch and dltrain are installed here."""
    return all(find_spec(name) is not None for name in ("torch", "dltrain", "mpi4py", "safetensors"))


def pace(subject: Subject, settings: Settings, environment: Mapping[str, str], limit_s: float) -> Pace:
    """Train the project for up to ``limit_s`` seconds, and return the measured time and memory.

    Raise TrialError if the training fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), subject, settings, None)
        limited = {**_own(subject, environment), "TIME_LIMIT_S": f"{limit_s:g}"}
        _run(Path(folder), "train.py", "a short training", limited, limit_s + GRACE_S)
        found: Mapping[str, Any] = json.loads((Path(folder) / "model" / "metrics.json").read_text(encoding="utf-8"))
    return Pace(found["steps_seconds"] / found["steps"] * found["steps_planned"], found["peak_kib"] * 1024)


def _own(subject: Subject, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment of a script that runs before the project has its copy of the data."""
    if subject.copied is None or subject.arrays is not None:
        return environment
    return {**environment, "DLJOB_DATASET": str(subject.copied)}


def _run(
    folder: Path,
    script: str,
    what: str,
    environment: Mapping[str, str],
    limit_s: float,
    memory_nbytes: int | None = None,
) -> str:
    command = [script] if memory_nbytes is None else ["-c", _LIMITED, str(memory_nbytes), script]
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TrialError(f"{what} took more than {limit_s:.0f} s and was stopped") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        if memory_nbytes is not None and (done.returncode < 0 or any(text in last for text in _NO_MEMORY)):
            raise TrialError(f"{what} needed more than {memory_nbytes >> 20} MiB of memory and was stopped")
        raise TrialError(f"{what} failed: {last:.300}")
    return done.stdout
