"""Tests of the termination grace period: a checkpoint fits into it, and running pods keep the one that they have."""

from dataclasses import replace
from typing import Any

import pytest

from dlcontract import CheckpointMark
from dljob.api import LastCheckpoint
from dljob.job.observed import Observed
from dljob.job.plan.grace import MARGIN, MAX_RAISED_S, REST_S, measured_write_s
from dljob.perf.resources.memory import STORE_CLIENT_NBYTES
from dljob.reconcile import reconcile
from dljob.status import find
from support.builders import CONFIG, DIGITS, NOW, Json, after, changed, nodes, plan_of, planned, rendered, report, seen
from support.builders import settled as settle

LARGE: Json = {"hints": {"parameters": 10**9, "flopsPerSample": 1e9}}
"""Its parameters and the momentum take 8 GB, which take 40 s at the bandwidth that the planner assumes."""
BIG_NODES = nodes({"name": "n", "count": 3, "cpu": 8, "memory": "256Gi"})
COMMAND = {"command": ["python", "train.py"]}


def observed(model: Json | None = None, **run_policy: Any) -> Observed:
    spec = {**DIGITS, "runPolicy": run_policy}
    return seen({**spec, "model": model, "trainer": COMMAND} if model else spec, BIG_NODES)


def in_template(job: Observed) -> int:
    [found] = [each for each in rendered(job) if each["kind"] == "StatefulSet"]
    seconds: int = found["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    return seconds


def test_predicted_checkpoint_fits_into_the_grace_period_with_a_margin() -> None:
    plan = planned(observed(LARGE)).plan
    assert plan.grace_s >= MARGIN * 40 + plan.expected.step_p90_s + REST_S
    assert plan.grace_s <= MAX_RAISED_S and in_template(observed(LARGE)) == plan.grace_s


def test_checkpoint_in_an_object_store_takes_longer_and_the_plan_says_what_it_assumes() -> None:
    there = seen({**DIGITS, "model": LARGE, "trainer": COMMAND, "checkpoint": {"uri": "s3://models"}}, BIG_NODES)
    here = planned(observed(LARGE))
    found = planned(there)
    assert found.plan.grace_s >= MARGIN * 80 + found.plan.expected.step_p90_s + REST_S > here.plan.grace_s
    assert found.warning is not None and "takes 80.0 s, at 100 MB/s to the object store" in found.warning
    assert here.warning is None or "object store" not in here.warning
    assert found.memory_nbytes == here.memory_nbytes + STORE_CLIENT_NBYTES
    assert found.plan.checkpoint.uri == "s3://models" and not found.plan.checkpoint.on_volume


def test_small_checkpoint_leaves_the_default() -> None:
    assert planned(observed()).plan.grace_s == in_template(observed()) == 60


@pytest.mark.parametrize(
    ("overrides", "grace_s"),
    [
        ([], 45.0),
        ([{"manager": "me", "spec": {"terminationGracePeriodSeconds": 300}}], 300.0),
        ([{"manager": "a", "spec": {"terminationGracePeriodSeconds": 300}}, {"manager": "b", "spec": {}}], 300.0),
        ([{"manager": "me", "spec": {"terminationGracePeriodSeconds": "soon"}}], 45.0),
        ([{"manager": "me", "spec": {"terminationGracePeriodSeconds": None}}], 30.0),
        ([{"manager": "me", "spec": {"terminationGracePeriodSeconds": 0}}], 1.0),
    ],
)
def test_grace_period_of_the_plan_follows_the_pod_template(overrides: list[Json], grace_s: float) -> None:
    """Fixed bug: with a null, pods had the 30 s of Kubernetes, and ranks began checkpoints for 45 s."""
    job = seen({**DIGITS, "runPolicy": {"terminationGracePeriodSeconds": 45}, "podTemplateOverrides": overrides})
    assert planned(job).plan.grace_s == grace_s


def test_grace_period_is_bounded() -> None:
    huge = {"hints": {"parameters": 10**10, "flopsPerSample": 1e9}}
    many = nodes({"name": "n", "count": 3, "cpu": 8, "memory": "2000Gi"})
    assert planned(replace(observed(huge), view=many)).plan.grace_s == MAX_RAISED_S


@pytest.mark.parametrize(
    ("run_policy", "more", "grace_s"),
    [
        ({"terminationGracePeriodSeconds": 30}, {}, 30),
        ({"terminationGracePeriodSeconds": 300}, {}, 300),
        ({}, {"podTemplateOverrides": [{"manager": "me", "spec": {"terminationGracePeriodSeconds": 45}}]}, 45),
        ({}, {"checkpoint": {"enabled": False}}, 60),
    ],
)
def test_value_of_the_user_stays(run_policy: Json, more: Json, grace_s: int) -> None:
    job = observed(LARGE, **run_policy)
    job = replace(job, job=replace(job.job, spec={**job.job.spec, **more}))
    assert planned(job).plan.grace_s == in_template(job) == grace_s


def test_value_of_the_user_that_is_too_short_is_a_warning_of_the_plan() -> None:
    status = reconcile(observed(LARGE, terminationGracePeriodSeconds=30), CONFIG, NOW).status
    assert status is not None
    condition = find(status.conditions, "Planned")
    assert condition is not None and "spec.runPolicy.terminationGracePeriodSeconds: found 30 s" in condition.message


def running(job: Observed, written_s: float) -> Observed:
    """Return the job while it trains, after a checkpoint that took ``written_s``."""
    job = settle(after(job, reconcile(job, CONFIG, NOW)))
    mark = CheckpointMark(step=8, unix_s=NOW.timestamp(), path="/x", duration_s=written_s)
    job = replace(job, report=report(job, last_checkpoint=mark))
    return after(job, reconcile(job, CONFIG, NOW))


def test_measured_time_changes_no_running_pod() -> None:
    job = running(observed(), written_s=100)
    assert job.job.status["lastCheckpoint"]["writeSeconds"] == 100
    desired = reconcile(job, CONFIG, NOW)
    assert not [item for item in desired.objects if item["kind"] == "StatefulSet"] and desired.scales == ()
    assert plan_of(after(job, desired)).plan.grace_s == 60


def test_next_plan_follows_the_measured_time() -> None:
    job = changed(running(observed(), written_s=100), optimizer={"learningRate": 0.01})
    assert planned(replace(job, view=BIG_NODES)).plan.grace_s >= MARGIN * 100


@pytest.mark.parametrize(("name", "written_s", "counted"), [(None, 1, True), ("c", 1, False), ("c", 100, True)])
def test_short_upload_of_a_script_may_have_been_only_a_few_files(
    name: str | None, written_s: float, counted: bool
) -> None:
    saved = LastCheckpoint(time=NOW, name=name, write_seconds=written_s)
    assert measured_write_s(saved, 40.0) == (written_s if counted else None)
    assert measured_write_s(None, 40.0) is measured_write_s(LastCheckpoint(time=NOW, name=name), 40.0) is None


def test_grace_period_of_the_same_spec_is_not_lowered() -> None:
    job = running(observed(LARGE), written_s=1)
    before = plan_of(job).plan.grace_s
    assert before > 60 and planned(replace(job, view=BIG_NODES)).plan.grace_s == before
