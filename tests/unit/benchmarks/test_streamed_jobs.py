"""Tests of the simulated trainers of ``benchmarks.cluster.streamed_jobs``: what they do with plans, stops and forecasts."""

from datetime import UTC, datetime
from typing import Any

import pytest
from benchmarks.cluster.shared_pool import HOURS, LONGEST, STREAM_JOBS, scaled
from benchmarks.cluster.streamed_jobs import START_S, Course, Foreseen, manifest
from benchmarks.scheduling.workload import Job, stream

from dljob.api.spec.spec import DLJobSpec
from support.builders import planned, seen

PLAN = planned(seen()).plan
NOW_S, UNIX_S = 1000.0, datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def course() -> Course:
    return Course(stream(0, 1)[0], NOW_S)


def status(ready: str, **fields: Any) -> dict[str, Any]:
    return {"phase": "Running", "ready": ready, **fields}


def test_job_makes_steps_only_after_its_start_and_none_while_it_moves() -> None:
    job = course()
    job.note(status("2/2"), NOW_S, UNIX_S)
    job.begin(PLAN, NOW_S)
    job.advance(NOW_S, NOW_S + START_S)
    assert job.done == 0
    job.advance(NOW_S + START_S, NOW_S + START_S + 10 * job.step_s)
    assert job.done == pytest.approx(10)
    job.note(status("1/2"), NOW_S + 100, UNIX_S)
    assert job.plan is None
    job.advance(NOW_S + 100, NOW_S + 200)
    assert job.done == pytest.approx(10), "a planned stop loses no step, and a stopped job makes none"
    job.note(status("1/1"), NOW_S + 130, UNIX_S)
    job.begin(PLAN, NOW_S + 130)
    assert job.moves_s == [30.0] and job.started_s == NOW_S


def test_only_the_first_forecast_counts() -> None:
    job = course()
    first = {"earliestStart": "2026-01-01T00:02:00Z", "forecastStart": "2026-01-01T00:05:00Z"}
    job.note(status("0/0", queue={}), NOW_S, UNIX_S)
    assert job.foreseen is None
    job.note(status("0/0", queue=first), NOW_S + 1, UNIX_S)
    job.note(status("0/0", queue={"forecastStart": "2026-01-01T00:15:00Z"}), NOW_S + 2, UNIX_S)
    assert job.foreseen == Foreseen(NOW_S + 1, 120.0, 300.0, 300.0)


def test_time_with_a_part_of_the_pods_is_noted() -> None:
    job = course()
    for at_s, ready in ((0, "0/3"), (1, "1/3"), (5, "2/3"), (6, "3/3"), (50, "1/3"), (52, "0/0")):
        job.note(status(ready), NOW_S + at_s, UNIX_S)
    assert job.longest_partly_s == 4.0


def test_scaled_stream_has_the_same_jobs_but_for_the_longest() -> None:
    minutes, part = 48.0, 48 / 60 / HOURS
    jobs, whole = scaled(0, 40, minutes), stream(0, 40, STREAM_JOBS / 40)
    assert len(jobs) == 40 and max(job.arrival_s for job in jobs) <= 60 * minutes

    def fastest_s(job: Job) -> float:
        return min(use.seconds for use in job.uses)

    longest_s = LONGEST * 60 * minutes
    for job, before in zip(jobs, whole, strict=True):
        assert fastest_s(job) == pytest.approx(min(longest_s, part * fastest_s(before)), rel=0.05, abs=1.0)
    assert any(part * fastest_s(job) > longest_s for job in whole)


def test_manifests_are_valid() -> None:
    for job in stream(0, 40):
        DLJobSpec.model_validate(manifest(job)["spec"])
