"""The baseline of a job with a task: limits of time and memory, and failures that never fail the look pod."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dljob.suggest import bounded_trial
from dljob.suggest.bounded_trial import MIN_NBYTES, RESERVE_NBYTES, bounded, memory_left
from dljob.suggest.recommendation.model import Baseline
from dljob.suggest.subject import Options, Subject, read_subject
from dljob.suggest.trial import TrialError

MEMORY = 2**30
SCORES = '"scores": {"linear model": {"validation": 0.9, "error": 0.1, "test": 0.8}}'
REST = '"test_part": "5e1f", "other_models": {"linear model": 0.8, "trees": NaN}'


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    (tmp_path / "data.csv").write_text("x,y\n" + "".join(f"{i * 37 % 23},{'ab'[i // 3 % 2]}\n" for i in range(40)))
    return read_subject(Options(tmp_path / "data.csv"))


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    """Return the folder of a container that has ``MEMORY`` bytes more than this process."""
    folder = tmp_path / "cgroup"
    folder.mkdir()
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.max").write_text(f"{MEMORY + RESERVE_NBYTES + used(folder)}\n")
    return folder


def used(folder: Path) -> int:
    """Return the memory of this process, by the difference of a known limit and what it leaves."""
    (folder / "memory.max").write_text(f"{2**20}\n")
    return 2**20 - RESERVE_NBYTES - memory_left(folder)


def judged(subject: Subject, cgroup: Path, script: str, limit_s: float = 60.0) -> Callable[[], Baseline]:
    """Return a function that runs ``script`` as the baseline, as in a look pod."""
    own = replace(subject, project=lambda settings, limit: {"baseline.py": script})
    return lambda: bounded(Path("data.csv"), os.environ, 1, cgroup / "runs", cgroup)(own, limit_s)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("bytearray(2 * 10**9)", "needed more than"),
        ("import os; os.kill(os.getpid(), 9)", "needed more than"),
        ("raise ValueError('no class has two rows')", "the baseline failed: ValueError: no class has two rows"),
        ("import of_a_module_that_is_missing", "the baseline failed: ModuleNotFoundError"),
        ("print('no JSON')", "the baseline failed: JSONDecodeError"),
        ("print('{\"scores\": {}}')", "the baseline failed: KeyError"),
        (f'print(\'{{ "scoring": "r2", {SCORES.replace("0.9", "NaN")}, {REST} }}\')', "no score on held-out folds"),
    ],
)
def test_a_failure_is_one_line(subject: Subject, cgroup: Path, script: str, expected: str) -> None:
    with pytest.raises(TrialError, match=expected) as error:
        judged(subject, cgroup, script)()
    assert len(str(error.value).splitlines()) == 1
    assert not (cgroup / "runs").exists()


def test_a_baseline_that_takes_too_long_is_stopped(subject: Subject, cgroup: Path) -> None:
    with pytest.raises(TrialError, match="took more than 1 s and was stopped"):
        judged(subject, cgroup, "while True: pass", limit_s=1.0)()


def test_scores_of_models_that_are_not_finite_are_not_compared(subject: Subject, cgroup: Path) -> None:
    found = judged(subject, cgroup, f'print(\'{{ "scoring": "r2", {SCORES}, {REST} }}\')')()
    assert found.scores["linear model"].validation == 0.9 and found.other_models == {"linear model": 0.8}


def test_a_baseline_during_which_the_container_ended_does_not_run_again(subject: Subject, cgroup: Path) -> None:
    (cgroup / "runs").touch()
    with pytest.raises(TrialError, match=r"ended its container, .* spec\.resources\.memory"):
        judged(subject, cgroup, "")()


def test_a_baseline_without_memory_is_not_started(subject: Subject, cgroup: Path) -> None:
    (cgroup / "memory.max").write_text(f"{used(cgroup) + RESERVE_NBYTES + MIN_NBYTES // 2}\n")
    with pytest.raises(TrialError, match=r"MiB of the pod's memory for the baseline; .* spec\.resources\.memory"):
        judged(subject, cgroup, "")()


def test_the_limit_of_cgroup_v1_is_read_too_and_no_limit_is_that_of_the_machine(tmp_path: Path) -> None:
    free_nbytes = memory_left(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1048576\n")
    assert memory_left(tmp_path) < 2**20 < free_nbytes


@pytest.mark.parametrize("error", [KeyError("MemAvailable"), PermissionError("/sys/fs/cgroup/memory.max")])
def test_unknown_memory_does_not_fail_the_look_pod(
    subject: Subject, cgroup: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Sandboxes of a RuntimeClass do not have all files of Linux."""

    def unknown(folder: Path) -> int:
        raise error

    monkeypatch.setattr(bounded_trial, "memory_left", unknown)
    with pytest.raises(TrialError, match=type(error).__name__):
        judged(subject, cgroup, "")()
