"""Tests of the export of a run report to TensorBoard. A recorder stands in for the writer of event files."""

from pathlib import Path

import pytest

from dlcontract import RunPhase
from dltrain.integrations import tensorboard
from dltrain.protocol.rank_messages import Evaluated, Logged, Step
from dltrain.record.run_report.history import History
from support.trainer.plans import make_plan


class Recorder:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int, float]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> None:
        self.scalars.append((tag, scalar_value, global_step, walltime))


def test_curves_of_a_report_become_scalars() -> None:
    plan = make_plan()
    history = History(plan, 0.0)
    history.begin_attempt(plan, plan, 0.0)
    step = Step(rank=0, step=2, steps=9, loss=0.5, step_s=0.25, samples_per_s=480, world_size=1, reported=True)
    for message in (step, Evaluated(rank=0, step=2, accuracy=0.75), Logged(rank=0, step=2, values={"val/loss": 1.5})):
        history.record(message, 0, 7.0)
    recorder = Recorder()
    tensorboard.export(history.document(RunPhase.RUNNING, 1, 8.0), recorder)
    assert recorder.scalars == [
        ("run/loss", 0.5, 2, 7.0), ("run/step_s", 0.25, 2, 7.0), ("run/samples_per_s", 480.0, 2, 7.0),
        ("run/world_size", 1, 2, 7.0), ("evaluation/accuracy", 0.75, 2, 7.0), ("logged/val/loss", 1.5, 2, 7.0),
    ]  # fmt: skip


def test_invalid_report_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    assert tensorboard.main([str(path), str(tmp_path)]) == 2
    assert f"found {path}" in capsys.readouterr().err
    assert tensorboard.main([]) == 2
