"""Tests of scripts that call ``dltrain.report`` and run without torch, with real agents."""

import os
import shutil
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dlcontract import ModelRef, Plan, RunPhase
from dltrain.protocol.volume_layout import job_directory
from dltrain.record.run_report import files
from support.trainer.pods import TERM, Job, job
from support.trainer.ranks import SPEAKING

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"),
]
NO_TORCH = {"DLTRAIN_IMPORT_AHEAD": "off"}
SCRIPT = SPEAKING.replace("faults/speaking_rank", "scripts/reporting_script")


def reporting(made: Job, *arguments: str, **fields: Any) -> Plan:
    model = ModelRef(command=("python", SCRIPT, *arguments), framework="Torchrun")
    return made.plan(model=model, **fields)


def test_reports_of_a_script_are_the_progress_of_the_job(two: Job) -> None:
    plan = reporting(two, "40", "0.05", "hold=20")
    two.start(plan, **NO_TORCH)
    early = two.until(lambda r: r.step == 20 and r.step_s)
    assert early.phase is RunPhase.RUNNING and early.steps == 40 and early.world_size == 2 and early.ranks == ()
    assert early.samples_per_s == pytest.approx(60 / (early.step_s or 0))
    (job_directory(plan) / "go").touch()
    report = two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    assert (report.step, report.loss, report.accuracy, report.metrics) == (40, 1 / 40, 0.25, {"bleu": 30.0})
    assert report.outcome is not None and (report.outcome.steps, report.outcome.accuracy) == (40, 0.25)
    assert report.outcome.loss == 1 / 40 and report.failure is None
    families = {f.name: f for f in text_string_to_metric_families(two.pods[1].get("/metrics")[1])}
    assert [(s.labels, s.value) for s in families["dljob_trainer_loss"].samples] == [({"rank": "1"}, 1 / 40 + 1)]
    assert families["dljob_trainer_step_seconds"].samples and not families["dljob_trainer_step_compute_seconds"].samples
    document = files.read(plan)
    assert document is not None and document.points[-1].step == 40 and document.points[-1].compute_s is None
    assert [entry.accuracy for entry in document.evaluations] == [0.25] and document.ranks[1].steps == 40


def test_lowest_rank_that_reports_represents_the_job(two: Job) -> None:
    two.start(reporting(two, "8", "0.02", "reporter=1"), **NO_TORCH)
    report = two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    assert report.step == 8 and report.loss is not None, report


def test_restarted_script_continues_its_count(two: Job) -> None:
    plan = reporting(two, "30", "0.1", "fail_step=8")
    two.start(plan, **NO_TORCH)
    report = two.until(lambda r: r.phase is RunPhase.SUCCEEDED)
    assert report.restarts == {"RankFailed": 1} and report.step == 30
    assert "[rank 0] rank 0 starts at step 8" in two.pods[0].text()
    document = files.read(plan)
    assert document is not None and document.totals.steps_repeated <= 1
    assert [point.step for point in document.points] == sorted({point.step for point in document.points})


def test_silent_rank_of_a_reporting_script_is_hung_and_shows_its_stack(two: Job) -> None:
    two.start(reporting(two, "100000", "0.1", "silent_rank=1", backoff_limit=0), **NO_TORCH, DLTRAIN_HANG_MIN_S="0.5")
    failure = two.until(lambda r: r.phase is RunPhase.FAILED).failure
    assert failure is not None and (failure.reason, failure.rank, failure.host) == ("Hung", 1, "test-cpu-1")
    assert " in hang\n" in failure.log_tail and "dltrain.busy" in failure.message


def test_script_that_never_reports_is_never_hung() -> None:
    command = ("python", SCRIPT, "30", "0.1", "reporter=none")
    with job(1) as one:
        model = ModelRef(command=command, framework="Torchrun")
        one.start(one.plan(model=model), **NO_TORCH, DLTRAIN_HANG_MIN_S="0.05")
        report = one.until(lambda r: r.phase is RunPhase.SUCCEEDED)
        assert (report.restarts, report.step, report.failure) == ({}, 0, None)


@pytest.mark.long
def test_reporting_script_gets_sigterm_when_its_pod_stops(two: Job) -> None:
    catching = "import signal, sys, time, dltrain\n" + (
        "signal.signal(signal.SIGTERM, lambda *_: (print('got SIGTERM', flush=True), sys.exit(0)))\n"
        "for step in range(1, 100000): dltrain.report(step=step, loss=1); time.sleep(0.05)\n"
    )
    model = ModelRef(command=("python", "-c", catching), framework="Torchrun")
    two.start(two.plan(model=model), **NO_TORCH)
    report = two.until(lambda r: r.step >= 3)
    assert report.steps in (0, 10), "the plan's number, or none"
    for pod in two.pods:
        pod.signal(TERM)
    for rank, pod in enumerate(two.pods):
        pod.wait()
        assert f"[rank {rank}] got SIGTERM" in pod.text()
