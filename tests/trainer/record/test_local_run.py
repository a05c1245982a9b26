"""A run without an agent has a run report and, on a terminal, a progress bar."""

import io
from pathlib import Path

import pytest

from dlcontract import DatasetRef, Failure, ModelRef, Plan, Rank, RankMeasure
from dltrain.protocol.rank_messages import Evaluated, Failed, Step
from dltrain.record.local_run import LocalRun
from dltrain.record.run_report.document import Document


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plan() -> Plan:
    rank = Rank(rank=0, pod="p-0", host="h", group="g", device="cpu", local_rank=0, share=4)
    dataset = DatasetRef(name="digits")
    model = ModelRef(name="mlp")
    return Plan(
        job="j", namespace="n", uid="u", number=1, ranks=(rank,), global_batch=4, model=model, dataset=dataset, epochs=1
    )


STEP = Step(
    rank=0, step=3, steps=12, loss=0.5, step_s=10.0, samples_per_s=1, world_size=1,
    measure=RankMeasure(rank=0, device="cpu", share=4),
)  # fmt: skip


def test_bar_replaces_the_lines_on_a_terminal_only() -> None:
    terminal = Terminal()
    run = LocalRun(plan(), None, terminal)
    assert run.take(STEP, "line")
    assert "25 % [######..................] step 3/12  loss 0.5  10000.0 ms/step  1:30 left" in terminal.getvalue()
    assert not run.take(Evaluated(rank=0, step=3, accuracy=0.5), "line") and terminal.getvalue().endswith("\n")
    assert not LocalRun(plan(), None, io.StringIO()).take(STEP, "line")


def test_a_failed_run_has_a_report(tmp_path: Path) -> None:
    run = LocalRun(plan(), tmp_path / "new", io.StringIO())
    run.take(STEP, "")
    run.take(Failed(rank=0, failure=Failure(reason="Diverged", message="no number")), "")
    document = Document.parse((tmp_path / "new/report.json").read_bytes())
    assert document.phase == "Failed" and document.faults[0].failure.reason == "Diverged" and document.step == 3


def test_an_unwritable_folder_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    run = LocalRun(plan(), tmp_path / "file/folder", io.StringIO())
    run.take(Failed(rank=0, failure=Failure(reason="Diverged", message="no number")), "")
    assert "expected a writable folder" in capsys.readouterr().err


def test_a_run_that_ends_early_has_a_report(tmp_path: Path) -> None:
    """Fixed bug: after an interrupt or a ``break``, the report lacked the last half minute, or there was none."""
    run = LocalRun(plan(), tmp_path, io.StringIO())
    run.take(STEP, "")
    run.end()
    document = Document.parse((tmp_path / "report.json").read_bytes())
    assert (document.phase, document.step) == ("Stopped", 3)
    run = LocalRun(plan(), tmp_path, io.StringIO())
    run.take(Failed(rank=0, failure=Failure(reason="Diverged", message="no number")), "")
    run.end()
    assert Document.parse((tmp_path / "report.json").read_bytes()).phase == "Failed"
