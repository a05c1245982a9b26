"""Tests of the measured duration of a job's start, which counts towards the deadlines of later jobs."""

from dataclasses import replace
from typing import Any

import pytest

from dlcontract import RankMeasure, Report, RunPhase
from dljob.api import DLProfileStatus
from dljob.calibrate.learned import Learned
from dljob.job.profiles import learned, updated_profile
from dljob.planner.search import objective
from dljob.reconcile.desired import RunMeasurements
from support.builders import DIGITS, NOW, Json, after, plan_of, report, seen, settled
from support.job_lifecycle import step
from support.planner_questions import DIGITS as REQUEST
from support.planner_questions import THREE, decided

MARKS: Json = {"agents_up_unix_s": NOW.timestamp() + 60, "first_step_unix_s": NOW.timestamp() + 70}
DATA: Json = {"uri": "https://a.example/d.npz", "samples": 1437, "sampleBytes": 256}


def ended(spec: Json, *, fetched_s: float | None = None, **changes: Any) -> RunMeasurements:
    """Return the measurements of a run whose first step came 70 s after its plan."""
    first = seen({**DIGITS, **spec})
    found = settled(after(first, step(first)))
    found = replace(found, pods=tuple(replace(pod, fetched_s=fetched_s) for pod in found.pods))
    found = replace(found, report=report(found, startup=MARKS, **changes))
    found = after(found, step(found))
    ranks = [
        {"rank": r.rank, "device": r.device, "share": r.share, "compute_s": 0.1} for r in plan_of(found).plan.ranks
    ]
    done = report(found, RunPhase.SUCCEEDED, ranks=ranks, startup=MARKS, **changes)
    measured = step(replace(found, report=done)).measurements
    assert measured is not None
    return measured


@pytest.mark.parametrize(
    ("spec", "fetched_s", "changes", "start_s"),
    [
        ({}, None, {}, 70.0),
        ({"dataset": DATA}, 45.0, {}, 25.0),
        ({"dataset": {**DATA, "distribution": "Sharded", "size": "1Gi"}}, None, {}, None),
        ({}, None, {"restarts": {"Crashed": 1}}, None),
        ({}, None, {"failures": 1}, None),
    ],
    ids=["as it is", "without the data", "ranks fetch shards", "restarted", "failed"],
)
def test_only_an_undisturbed_start_is_measured(
    spec: Json, fetched_s: float | None, changes: Json, start_s: float | None
) -> None:
    assert ended(spec, fetched_s=fetched_s, **changes).start_s == start_s


def test_profile_has_the_mean_start_of_its_runs() -> None:
    run = Report(
        uid="u", plan_number=1, plan_digest="d", term=1, phase=RunPhase.SUCCEEDED, unix_s=0.0,
        ranks=(RankMeasure(rank=0, device="cpu", share=8, compute_s=0.1),),
    )  # fmt: skip
    status = DLProfileStatus()
    geometric_s = 40.0 * (90 / 40) ** (1 / 3)
    for start_s, mean_s in ((40.0, 40.0), (None, 40.0), (90.0, geometric_s), (1e9, geometric_s)):
        status = updated_profile(status, "digits-cnn", "cpu", run, NOW, start_s=start_s)
        assert status.start_seconds == pytest.approx(mean_s, rel=1e-3)
        assert learned(status).start_s == status.start_seconds
    assert DLProfileStatus.model_validate(status.manifest()) == status


@pytest.mark.parametrize(
    ("starts_s", "counted_s"),
    [({}, 20.0), ({"cpu": 8.0}, 20.0), ({"cpu": 90.0}, 90.0), ({"cpu": 90.0, "t4": 120.0}, 120.0)],
)
def test_deadline_counts_the_measured_start(starts_s: dict[str, float], counted_s: float) -> None:
    """A start that was fast once can be slower, so that it counts as 20 s at least."""
    known = {("digits-cnn", device): Learned(start_s=start_s) for device, start_s in starts_s.items()}
    known[("other", "cpu")] = Learned(start_s=1000.0)
    p90_s = decided(REQUEST, THREE, known).chosen.prediction.total_p90_s
    for slack_s, late in ((-1.0, True), (1.0, False)):
        request = replace(REQUEST, deadline_s=p90_s + counted_s + slack_s)
        assert (decided(request, THREE, known).warning is not None) is late
    assert objective.start_s(replace(REQUEST, measured_start_s=counted_s)) == counted_s
