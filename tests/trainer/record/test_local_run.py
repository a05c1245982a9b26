"""A run without an agent has a run report and, on a terminal, a progress bar."""

import io
from pathlib import Path

import pytest

from dlcontract import CheckpointRef, DatasetRef, Failure, ModelRef, Outcome, Plan, Rank, RankMeasure, RunPhase
from dltrain.protocol.rank_messages import Evaluated, Failed, Finished, Step
from dltrain.record.local_run import LocalRun
from dltrain.record.run_report.document import Document


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plan(job: str = "j", epochs: int = 1) -> Plan:
    rank = Rank(rank=0, pod="p-0", host="h", group="g", device="cpu", local_rank=0, share=4)
    dataset = DatasetRef(name="digits")
    model = ModelRef(name="mlp")
    return Plan(
        job=job, namespace="n", uid="u", number=1, ranks=(rank,), global_batch=4, model=model, dataset=dataset,
        epochs=epochs, checkpoint=CheckpointRef(enabled=True),
    )  # fmt: skip


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
    run.take(STEP, "")
    run.take(Failed(rank=0, failure=Failure(reason="Diverged", message="no number")), "")
    run.end()
    assert Document.parse((tmp_path / "report.json").read_bytes()).phase == "Failed"


def step(number: int) -> Step:
    return STEP.model_copy(update={"step": number, "loss": 1 / number})


def first_run(folder: Path) -> Document:
    """Write the report of a run that ends after 6 steps, and return it."""
    run = LocalRun(plan(), folder, io.StringIO())
    for number in range(1, 7):
        run.take(step(number), "")
    run.take(Evaluated(rank=0, step=4, accuracy=0.5), "")
    run.take(Evaluated(rank=0, step=6, accuracy=0.7), "")
    run.end()
    return report(folder)


def report(folder: Path) -> Document:
    return Document.parse((folder / "report.json").read_bytes())


def test_report_of_a_resumed_run_has_the_whole_training(tmp_path: Path) -> None:
    """Fixed bug: the report had only the steps after the resume."""
    before = first_run(tmp_path)
    run = LocalRun(plan(epochs=2), tmp_path, io.StringIO())
    run.resumed()
    for number in range(6, 9):
        run.take(step(number), "")
    run.take(Finished(rank=0, outcome=Outcome(steps=8, seconds=1.0)), "")
    found = report(tmp_path)
    assert found.phase == "Succeeded" and found.step == 8 and found.started_unix_s == before.started_unix_s
    assert [point.step for point in found.points] == list(range(1, 9))
    assert [entry.accuracy for entry in found.evaluations] == [0.5], "the repeated step has no evaluation"
    assert found.totals.steps_repeated == 1 and len(found.plans) == 2
    assert [entry.size for entry in found.attempts] == [1, 0, 1, 0]


def test_report_of_a_run_that_was_killed_shows_when_it_trained(tmp_path: Path) -> None:
    before = first_run(tmp_path)
    killed = before.model_copy(update={"phase": RunPhase.RUNNING, "attempts": before.attempts[:-1]})
    (tmp_path / "report.json").write_text(killed.to_json())
    run = LocalRun(plan(), tmp_path, io.StringIO())
    run.resumed()
    run.take(step(7), "")
    run.end()
    found = report(tmp_path)
    assert [entry.size for entry in found.attempts] == [1, 0, 1, 0]
    assert found.attempts[1].unix_s == before.updated_unix_s


def test_run_resumed_after_its_last_step_keeps_the_report(tmp_path: Path) -> None:
    before = first_run(tmp_path)
    run = LocalRun(plan(), tmp_path, io.StringIO())
    run.resumed()
    run.take(Finished(rank=0, outcome=Outcome(steps=6, seconds=0.0)), "")
    found = report(tmp_path)
    assert found.points == before.points and found.evaluations == before.evaluations and found.phase == "Succeeded"


@pytest.mark.parametrize("job", ["j", "other"])
def test_run_from_the_beginning_has_a_new_report(job: str, tmp_path: Path) -> None:
    first_run(tmp_path)
    run = LocalRun(plan(job), tmp_path, io.StringIO())
    if job == "other":
        run.resumed()
    run.take(step(2), "")
    run.end()
    found = report(tmp_path)
    assert (found.job, [point.step for point in found.points]) == (job, [2])


def test_run_that_fails_before_its_first_step_keeps_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as with a wrong argument. A later run may resume."""
    before = first_run(tmp_path)
    capsys.readouterr()
    run = LocalRun(plan(), tmp_path, io.StringIO())
    run.take(Failed(rank=0, failure=Failure(reason="BadInput", message="no model")), "")
    run.end()
    assert report(tmp_path) == before and "run report" not in capsys.readouterr().err


def test_damaged_report_does_not_end_a_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{")
    run = LocalRun(plan(), tmp_path, io.StringIO())
    run.resumed()
    run.take(step(3), "")
    run.end()
    assert [point.step for point in report(tmp_path).points] == [3]
