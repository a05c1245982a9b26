"""Tests of the predicted remaining time of a job."""

from datetime import UTC, datetime, timedelta

import pytest

from dljob.api import Condition, ConditionStatus, DLJobStatus, LastCheckpoint
from dljob.job.remaining import left_part, lost_s, remaining_p90_s, run_p90_s, run_time, start_s, start_without_data_s
from dljob.scheduling import UNKNOWN


def status(step: int | None = None, measured_s: float | None = None, total_s: float = 1000.0) -> DLJobStatus:
    """Return the status of a job with 100 steps of 10 s each (p90: 15 s)."""
    document = {
        "plan": {
            "number": 1, "digest": "d", "summary": "", "groups": [], "nodes": 1, "ranks": 1, "collective": "Ring",
            "predicted": {
                "stepSeconds": 10.0, "stepSecondsP90": 15.0, "totalSeconds": total_s, "samplesPerSecond": 1.0,
            },
        },
    }  # fmt: skip
    if step is not None:
        document["progress"] = {"step": step, "steps": 100, "percent": step}
    if measured_s is not None:
        document["measured"] = {"stepSeconds": measured_s, "samplesPerSecond": 1.0}
    return DLJobStatus.model_validate(document)


def test_remaining_time() -> None:
    assert remaining_p90_s(DLJobStatus()) is None
    assert remaining_p90_s(status()) == 1500.0, "no step was made yet"
    assert remaining_p90_s(status(total_s=0.0)) is None
    assert remaining_p90_s(status(step=80)) == 300.0
    assert remaining_p90_s(status(step=80, measured_s=20.0)) == 600.0, "the job is slower than predicted"
    assert remaining_p90_s(status(step=100)) == 0.0


@pytest.mark.parametrize(
    ("parts", "factor"),
    [
        ({"interruption_seconds": 500.0}, 1.5),
        ({"evaluation_seconds": 500.0}, 1.5),
        ({"checkpoint_seconds": 500.0}, 1.5),
        ({"evaluation_seconds": 250.0, "checkpoint_seconds": 150.0, "interruption_seconds": 100.0}, 1.5),
        ({"evaluation_seconds": 250.0, "fetch_seconds": 250.0}, 1.25),
        ({"fetch_seconds": 500.0}, 1.0),
    ],
)
def test_what_comes_beside_the_steps_lengthens_the_remaining_time(parts: dict[str, float], factor: float) -> None:
    """Fixed bug: only interruptions did. The data is fetched before the first step."""
    longer = status(step=80, total_s=1500.0)
    assert longer.plan is not None
    predicted = longer.plan.predicted.model_copy(update=parts)
    assert predicted.per_step_s(10.0, 100) == pytest.approx(10.0 * factor)
    assert predicted.per_step_s(0.0, 100) == parts.get("checkpoint_seconds", 0.0) / 100, "they do not slow down"
    longer = longer.model_copy(update={"plan": longer.plan.model_copy(update={"predicted": predicted})})
    assert remaining_p90_s(longer) == pytest.approx(300.0 * factor)


def test_a_job_that_starts_again_fetches_its_data_again() -> None:
    fetches = status(step=80, total_s=1300.0)
    assert fetches.plan is not None
    saved = {"step": 75, "time": "2026-11-23T06:00:00Z"}
    fetches = DLJobStatus.model_validate(fetches.manifest() | {"lastCheckpoint": saved})
    predicted = fetches.plan.predicted.model_copy(update={"fetch_seconds": 300.0})
    assert run_time(predicted, fetches).p50 == 300.0 + 0.25 * 1000.0


@pytest.mark.parametrize(
    ("startup", "whole_s", "without_s"),
    [
        (None, None, None),
        ({"admissionSeconds": 2.0, "podsSeconds": 70.0}, None, None),
        ({"admissionSeconds": 2.0, "totalSeconds": 102.0}, 100.0, 100.0),
        ({"admissionSeconds": 2.0, "fetchSeconds": 75.0, "totalSeconds": 102.0}, 100.0, 25.0),
        ({"fetchSeconds": 200.0, "totalSeconds": 100.0}, 100.0, 0.0),
    ],
    ids=["unknown", "not yet", "no data", "data", "clocks differ"],
)
def test_measured_start(startup: dict[str, float] | None, whole_s: float | None, without_s: float | None) -> None:
    """The time to fetch data counts once: it is a part of the predicted run time, and of what a restart takes."""
    found = DLJobStatus.model_validate({} if startup is None else {"startup": startup})
    assert (start_s(found), start_without_data_s(found)) == (whole_s, without_s)


def test_run_time_of_a_job_without_a_prediction_is_unknown() -> None:
    nothing = status(total_s=0.0)
    assert nothing.plan is not None
    unknown = nothing.plan.predicted.model_copy(update={"step_seconds": 0.0, "step_seconds_p90": 0.0})
    assert run_p90_s(unknown) is None
    assert run_time(unknown, nothing) is UNKNOWN


def test_job_that_reports_no_steps_may_lose_all_time_since_it_started() -> None:
    began = datetime(2026, 11, 23, 6, 0, tzinfo=UTC)
    running = Condition(type="Running", status=ConditionStatus.TRUE, reason="Running", last_transition_time=began)
    silent = status().model_copy(update={"conditions": (running,)})
    assert lost_s(silent, began + timedelta(hours=2)) == 7200.0
    assert lost_s(silent, began - timedelta(seconds=1)) == 0.0, "clocks differ"
    assert lost_s(status(), began) == 0.0, "it does not run"
    assert lost_s(status(step=3), began) == 30.0


def test_upload_of_a_script_limits_what_is_lost() -> None:
    began = datetime(2026, 11, 23, 6, 0, tzinfo=UTC)
    running = Condition(type="Running", status=ConditionStatus.TRUE, reason="Running", last_transition_time=began)
    saved = LastCheckpoint(time=began + timedelta(hours=1), name="checkpoint")
    silent = status().model_copy(update={"conditions": (running,), "last_checkpoint": saved})
    assert lost_s(silent, began + timedelta(hours=2)) == 3600.0
    early = silent.model_copy(update={"last_checkpoint": saved.model_copy(update={"time": began - timedelta(hours=9)})})
    assert lost_s(early, began + timedelta(hours=2)) == 7200.0, "an earlier run has written it"
    reports = status(step=60).model_copy(update={"last_checkpoint": saved})
    assert lost_s(reports, saved.time + timedelta(seconds=200)) == 200.0, "its step is unknown, its time is not"
    assert lost_s(reports, saved.time + timedelta(hours=9)) == 600.0, "at most all steps"
    known = reports.model_copy(update={"last_checkpoint": saved.model_copy(update={"step": 50})})
    assert lost_s(known, saved.time + timedelta(hours=9)) == 100.0
    assert left_part(reports, running=False) == 1.0 and left_part(known, running=False) == 0.5
