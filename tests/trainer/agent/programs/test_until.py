"""Tests of jobs that are good enough before their last step, with real agents and ranks."""

import os
import re
import shutil
from pathlib import Path

import pytest

from dlcontract import CheckpointRef, ModelRef, RunPhase, Until
from dltrain.record.run_report import files
from support.trainer.pods import Job, leave
from support.trainer.ranks import SPEAKING

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]
NO_TORCH = {"DLTRAIN_IMPORT_AHEAD": "off"}
MLP = ModelRef(name="mlp")
SCRIPT = SPEAKING.replace("faults/speaking_rank", "scripts/reporting_script")


@pytest.mark.long
def test_built_in_model_stops_at_its_target_with_a_checkpoint_and_stays_complete(two: Job) -> None:
    plan = two.plan(model=MLP, steps=None, epochs=300, until=Until(metric="accuracy", at_least=0.3))
    two.start(plan)
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))
    outcome = report.outcome
    assert report.phase is RunPhase.SUCCEEDED and outcome is not None, report.failure
    assert outcome.stopped is not None and outcome.stopped.reason == "TargetReached", outcome
    assert "spec.until.atLeast is 0.3" in outcome.stopped.message
    assert outcome.accuracy is not None and outcome.accuracy >= 0.3
    assert 0 < outcome.steps < report.steps and report.failure is None and report.restarts == {}
    assert outcome.checkpoint is not None and Path(outcome.checkpoint, "model.safetensors").exists()
    assert report.last_checkpoint is not None and report.last_checkpoint.step == outcome.steps
    document = files.read(plan)
    assert document is not None and document.outcome is not None and document.outcome.stopped == outcome.stopped
    assert leave(two) == [0, 0]
    two.report_file.unlink()
    for pod in two.pods:
        pod.start()
    again = two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    assert again.outcome == outcome, "restarted pods do not train on"


@pytest.mark.long
def test_script_with_five_lines_stops_with_a_checkpoint(two: Job) -> None:
    script = str(Path(__file__).resolve().parents[4] / "examples/scripts/train_five_lines.py")
    plan = two.plan(["python", script], steps=None, epochs=2000, until=Until(metric="loss", at_most=0.68))
    two.start(plan)
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))
    outcome = report.outcome
    assert report.phase is RunPhase.SUCCEEDED and outcome is not None and outcome.stopped is not None, report.failure
    assert outcome.checkpoint is not None and Path(outcome.checkpoint, "model.safetensors").exists()
    assert outcome.steps < report.steps and report.restarts == {}


def test_reporting_script_stops_at_its_target(two: Job) -> None:
    model = ModelRef(command=("python", SCRIPT, "100000", "0.05"), framework="Torchrun")
    two.start(two.plan(model=model, until=Until(metric="loss", at_most=0.1)), **NO_TORCH)
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))
    assert report.phase is RunPhase.SUCCEEDED and report.outcome is not None, report.failure
    assert report.outcome.stopped is not None and report.outcome.stopped.reason == "TargetReached"
    assert report.outcome.loss is not None and report.outcome.loss <= 0.1 and report.outcome.steps < 100000
    assert report.failures == 0 and report.restarts == {}


def test_ranks_of_a_script_stop_at_the_same_step(two: Job) -> None:
    model = ModelRef(command=("python", SCRIPT, "100000", "0.05", "heed=1"), framework="Torchrun")
    two.start(two.plan(model=model, until=Until(metric="loss", at_most=0.1)), **NO_TORCH)
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))
    assert report.phase is RunPhase.SUCCEEDED and report.outcome is not None, report.failure
    assert report.outcome.stopped is not None and report.outcome.stopped.reason == "TargetReached"
    steps = [
        re.findall(rf"\[rank {rank}\] rank {rank} stops at step (\d+)", pod.text()) for rank, pod in enumerate(two.pods)
    ]
    assert len(steps[0]) == 1 and steps[0] == steps[1], steps
    assert abs(report.outcome.steps - int(steps[0][0])) <= 1


@pytest.mark.long
def test_suspended_script_that_heeds_requests_gets_no_signal(two: Job) -> None:
    model = ModelRef(command=("python", SCRIPT, "100000", "0.05", "heed=1"), framework="Torchrun")
    two.start(two.plan(model=model, grace_s=30.0), **NO_TORCH)
    two.until(lambda r: r.step >= 3)
    assert leave(two) == [143, 143]
    steps = [re.findall(r"stops at step (\d+)", pod.text()) for pod in two.pods]
    assert len(steps[0]) == 1 and steps[0] == steps[1], steps


@pytest.mark.long
def test_job_without_improvement_stops_and_needs_no_checkpoints(two: Job) -> None:
    """The loss does not become a thousand."""
    plan = two.plan(
        model=MLP, steps=None, epochs=300, checkpoint=CheckpointRef(enabled=False),
        until=Until(metric="loss", at_least=1000, patience=5),
    )  # fmt: skip
    two.start(plan)
    report = two.until(lambda r: r.phase in (RunPhase.SUCCEEDED, RunPhase.FAILED))
    assert report.phase is RunPhase.SUCCEEDED and report.outcome is not None, report.failure
    assert report.outcome.stopped is not None and report.outcome.stopped.reason == "NoImprovement"
    assert report.outcome.checkpoint is None and report.outcome.steps < report.steps
