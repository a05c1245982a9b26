"""Tests of the administrator's defaults over the life of a job: they are those of its plan, whatever changes later."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dlcontract import RunPhase
from dljob.api.overrides import OverridePolicy
from dljob.calibrate import Learned, LearnedPoint
from dljob.job.defaults import parse_defaults
from dljob.job.observed import ClassSeen, Observed
from dljob.reconcile import Desired, parse_observed, reconcile
from dljob.render import RenderConfig
from support.builders import CONFIG, DIGITS, NOW, Json, after, changed, nodes, plan_of, report, seen, settled
from support.job_lifecycle import OUTCOME, condition_of, status, verdict

TAINT = {"key": "dedicated", "value": "training", "effect": "NoSchedule"}
POOL = nodes(
    {"name": "p", "count": 3, "cpu": 2, "memory": "4Gi", "labels": {"pool": "training"}, "taints": [TAINT]},
    {"name": "n", "count": 3, "cpu": 2, "memory": "4Gi"},
)
FIRST: Json = {
    "scheduling": {
        "nodeSelector": {"pool": "training"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "disruption": "Avoid",
        "runtimeClassName": "gvisor",
    },
    "runPolicy": {"ttlSecondsAfterFinished": 60},
}
SECOND: Json = {
    "scheduling": {"nodeSelector": {"pool": "elsewhere"}, "priorityClassName": "batch"},
    "runPolicy": {"ttlSecondsAfterFinished": 1, "activeDeadlineSeconds": 1},
    "prices": {"usdPerKwh": 3},
}


def config(defaults: Json, **more: Any) -> RenderConfig:
    return replace(CONFIG, job_defaults=parse_defaults(defaults), **more)


def step(observed: Observed, settings: RenderConfig, seconds: float = 0.0) -> Desired:
    return reconcile(observed, settings, NOW + timedelta(seconds=seconds))


def running(settings: RenderConfig, spec: Json | None = None) -> Observed:
    observed = seen(spec, POOL)
    observed = settled(after(observed, step(observed, settings)))
    observed = replace(observed, report=report(observed))
    return after(observed, step(observed, settings))


def template(desired: Desired) -> Json:
    [found] = [item for item in desired.objects if item["kind"] == "StatefulSet"]
    pod: Json = found["spec"]["template"]["spec"]
    return pod


def restarts(desired: Desired) -> list[object]:
    sets = [item for item in desired.objects if item["kind"] == "StatefulSet"]
    return [*sets, *desired.scales, *desired.deletes]


@pytest.mark.parametrize("later", [SECOND, {}], ids=["changed", "removed"])
def test_changed_defaults_do_not_change_a_running_job(later: Json) -> None:
    observed = running(config(FIRST))
    before, now = step(observed, config(FIRST)), step(observed, config(later), 30)
    assert restarts(now) == []
    assert now.objects == before.objects
    assert status(now).plan == status(before).plan
    assert not now.events


def test_new_defaults_do_not_change_a_job_that_was_planned_without() -> None:
    """The upgrade to the first release with defaults, or their first use."""
    observed = running(CONFIG)
    before, now = step(observed, CONFIG), step(observed, config(SECOND), 30)
    assert restarts(now) == [] and now.objects == before.objects and not now.events
    assert plan_of(observed).defaults is None


def test_a_new_job_gets_the_defaults_and_says_so() -> None:
    desired = step(seen(view=POOL), config(FIRST))
    pod = template(desired)
    assert pod["nodeSelector"] == {"pool": "training"} and pod["runtimeClassName"] == "gvisor"
    assert pod["tolerations"] == [{"key": "dedicated", "operator": "Exists"}]
    plan = status(desired).plan
    assert plan is not None and plan.defaults is not None
    assert "scheduling.nodeSelector: pool=training" in plan.defaults
    message = condition_of(desired, "Planned").message
    assert "administrator's defaults" in message and "runPolicy.ttlSecondsAfterFinished: 60" in message
    assert [event.message for event in desired.events if event.reason == "Planned"] == [message]


def test_values_of_the_job_take_precedence() -> None:
    own = {"nodeSelector": {"pool": "mine"}, "tolerations": [{"key": "x", "operator": "Exists"}], "disruption": "Allow"}
    view = nodes({"count": 3, "name": "m", "cpu": 2, "memory": "4Gi", "labels": {"pool": "mine"}})
    desired = step(seen({**DIGITS, "scheduling": own}, view), config(FIRST))
    pod = template(desired)
    assert pod["nodeSelector"] == {"pool": "mine"}
    assert [item["key"] for item in pod["tolerations"]] == ["x", "dedicated"]
    assert not any(item["kind"] == "PodDisruptionBudget" for item in desired.objects)


def test_without_defaults_nothing_is_stored_or_shown() -> None:
    desired = step(seen(view=POOL), CONFIG)
    assert desired.plan is not None and desired.plan.defaults is None
    assert all("defaults" not in text for text in desired.plan.data().values())
    assert "defaults" not in (status(desired).plan or DIGITS).manifest()  # type: ignore[union-attr]


def test_a_job_whose_spec_changes_gets_the_new_defaults() -> None:
    observed = changed(running(config(FIRST)), epochs=6)
    labelled = nodes({"name": "e", "count": 3, "cpu": 2, "memory": "4Gi", "labels": {"pool": "elsewhere"}})
    observed = replace(observed, view=labelled)
    second = config({**SECOND, "runPolicy": {}})
    observed = replace(settled(after(observed, step(observed, second))), report=None)
    desired = step(observed, second)
    assert template(desired)["nodeSelector"] == {"pool": "elsewhere"}
    assert template(desired)["priorityClassName"] == "batch" and "runtimeClassName" not in template(desired)


def test_a_resumed_job_keeps_its_defaults() -> None:
    observed = running(config(FIRST))
    asleep = changed(observed, suspend=True)
    asleep = settled(after(asleep, step(asleep, config(SECOND))))
    asleep = after(asleep, step(asleep, config(SECOND)))
    desired = step(changed(asleep, suspend=False), config(SECOND))
    assert template(desired)["runtimeClassName"] == "gvisor"
    assert template(desired)["nodeSelector"] == {"pool": "training"}


def test_a_finished_job_is_deleted_after_the_time_of_its_plan() -> None:
    observed = running(config(FIRST))
    observed = replace(observed, report=report(observed, RunPhase.SUCCEEDED, outcome=OUTCOME))
    ended = after(observed, step(observed, config(SECOND)))
    assert not step(ended, config(SECOND), 30).delete_job, "the new default would be one second"
    assert step(ended, config(SECOND), 61).delete_job


def test_a_finished_job_of_before_the_defaults_is_never_deleted() -> None:
    observed = running(CONFIG)
    observed = replace(observed, report=report(observed, RunPhase.SUCCEEDED, outcome=OUTCOME))
    ended = after(observed, step(observed, CONFIG))
    for later in (ended, changed(ended, globalBatchSize=90)):
        assert not step(later, config(SECOND), 10**6).delete_job


def test_a_plan_after_measurements_keeps_the_defaults_of_the_first() -> None:
    """Otherwise a measurement would move a job because an administrator changed a default."""
    later = config(SECOND | {"runPolicy": {}})
    observed = running(config(FIRST), {**DIGITS, "nodes": {"min": 1, "max": 3}, "epochs": 2000})
    assert plan_of(observed).nodes == 3
    slow = report(observed, step=500, steps=100_000, step_s=2.0)
    observed = replace(observed, report=slow)
    measured = Learned((LearnedPoint(32, 1e-3, 50), LearnedPoint(96, 2e-3, 50)), link_latency_s=0.5)
    observed = replace(observed, learned={("digits-cnn", "cpu"): measured})
    for seconds in (600, 630, 660, 690, 720):
        desired = step(observed, later, seconds)
        observed = settled(after(observed, desired))
    assert plan_of(observed).nodes == 1 and plan_of(observed).replans == 1, condition_of(desired, "Planned")
    assert plan_of(observed).defaults == config(FIRST).job_defaults


@pytest.mark.parametrize("policy", OverridePolicy)
def test_override_policy_does_not_limit_defaults(policy: OverridePolicy) -> None:
    settings = config(FIRST, overrides=policy)
    observed = seen(view=POOL)
    parsed = parse_observed(observed, policy, settings.job_defaults)
    assert parsed.refusal is None
    assert template(reconcile(observed, settings, NOW, parsed))["runtimeClassName"] == "gvisor"


def test_an_override_of_the_job_takes_precedence_over_the_runtime_class() -> None:
    spec = {**DIGITS, "podTemplateOverrides": [{"manager": "me", "spec": {"runtimeClassName": "kata"}}]}
    assert template(step(seen(spec, POOL), config(FIRST)))["runtimeClassName"] == "kata"


def test_messages_name_the_defaults_that_cause_a_problem() -> None:
    nowhere = step(seen(view=POOL), config(SECOND))
    assert verdict(nowhere, "Planned") == ("False", "TooFewNodes")
    assert "administrator's defaults apply: scheduling.nodeSelector: pool=elsewhere" in (
        condition_of(nowhere, "Planned").message
    )
    missing = config({"checkpoint": {"volume": {"storageClassName": "imaginary"}}})
    desired = step(seen(view=POOL, classes=(ClassSeen("real", default=True),)), missing)
    assert verdict(desired, "VolumeReady") == ("False", "StorageClassNotFound")
    assert "'imaginary', the administrator's default" in condition_of(desired, "VolumeReady").message
    late = config({"runPolicy": {"activeDeadlineSeconds": 20}})
    desired = step(running(late), late, 30)
    assert verdict(desired, "Failed") == ("True", "DeadlineExceeded")
    assert "administrator's default" in condition_of(desired, "Failed").message


TOLERATED = {"tolerations": FIRST["scheduling"]["tolerations"]}


@pytest.mark.parametrize(
    ("scheduling", "most"),
    [({}, 3), (TOLERATED, 6), ({**TOLERATED, "nodeSelector": {"pool": "training"}}, 3)],
    ids=["none", "tolerations", "both"],
)
def test_defaults_limit_the_nodes_of_the_plan(scheduling: Json, most: int) -> None:
    settings = config({"scheduling": scheduling})
    for nodes_min, planned in ((most, "True"), (most + 1, "False")):
        desired = step(seen({**DIGITS, "nodes": {"min": nodes_min, "max": 10}}, POOL), settings)
        assert verdict(desired, "Planned")[0] == planned
