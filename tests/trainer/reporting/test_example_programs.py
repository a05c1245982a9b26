"""Tests of the checkpoints from which the example programs with training libraries resume.

Small classes stand in for the libraries, which are not part of the test environment. ``hack/test programs`` runs the
programs with the libraries.
"""

import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).resolve().parents[3] / "examples/programs"
Run = Callable[[str], list[Any]]


class Made:
    """An object of a library: takes any arguments, and records from which checkpoint a training resumes."""

    resumed: list[Any]
    process_index = 0

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        pass

    def train(self, *, resume_from_checkpoint: str | None) -> None:
        self.resumed.append(resume_from_checkpoint)

    def fit(self, *arguments: Any, ckpt_path: Path | None) -> None:
        self.resumed.append(ckpt_path)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a program with checkpoints in ``tmp_path``, and returns what it resumes from."""
    resumed: list[Any] = []
    library = type("Library", (Made,), {"resumed": resumed})
    for name in ("transformers", "lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
        module = types.ModuleType(name)
        module.__getattr__ = lambda _: library  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("huggingface", "lightning"):
        monkeypatch.delitem(sys.modules, f"dltrain.integrations.{name}", raising=False)
    monkeypatch.setenv("DLJOB_CHECKPOINT_DIR", str(tmp_path))

    def ran(program: str) -> list[Any]:
        runpy.run_path(str(PROGRAMS / f"{program}.py"))
        for name in ("huggingface", "lightning"):
            sys.modules.pop(f"dltrain.integrations.{name}", None)
        return resumed

    return ran


def test_trainer_of_hugging_face_resumes_from_the_newest_complete_checkpoint(run: Run, tmp_path: Path) -> None:
    """Fixed bug: the program resumed from a checkpoint whose writing was interrupted."""
    run("hf_trainer")
    for step in (80, 100, 120):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}/model.safetensors").touch()
    for step in (80, 100):
        (tmp_path / f"checkpoint-{step}/trainer_state.json").touch()
    assert run("hf_trainer") == [None, str(tmp_path / "checkpoint-100")]


def test_lightning_resumes_from_the_checkpoint_of_a_stop_if_it_is_newer(run: Run, tmp_path: Path) -> None:
    """Fixed bug: the program resumed from last.ckpt, although the callback had saved stopped.ckpt after it."""
    run("lightning_module")
    for name, time_s in (("epoch=0-step=20.ckpt", 20), ("last.ckpt", 21), ("stopped.ckpt", 29)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time_s, time_s))
    run("lightning_module")
    os.utime(tmp_path / "last.ckpt", (40, 40))
    assert run("lightning_module") == [None, tmp_path / "stopped.ckpt", tmp_path / "last.ckpt"]
