"""Laws of upgrades: another release of the operator with other fields and rules restarts no running job."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dlcontract import PLAN_KEY, Plan
from dljob.api import DLJobSpec
from dljob.job.observed import Observed
from dljob.job.plan.stored import OPERATOR_KEY, StoredPlan, spec_digest
from dljob.reconcile import failed, parse_observed, reconcile
from dljob.status import find, is_true, previous
from support.builders import CONFIG, DIGITS, NOW, after, job, plan_of, report, seen, settled


class NextSpec(DLJobSpec):
    """A spec of a later release."""

    oversubscription: float = 1.5
    mascots: tuple[str, ...] = ("gopher",)


def running() -> Observed:
    observed = settled(after(observed := seen(), reconcile(observed, CONFIG, NOW)))
    observed = replace(observed, report=report(observed))
    return after(observed, reconcile(observed, CONFIG, NOW))


def stored_with(observed: Observed, key: str, **fields: Any) -> dict[str, str]:
    """Return the data of the plan's ConfigMap with more fields in one document."""
    assert observed.plan is not None
    return {**observed.plan, key: json.dumps(json.loads(observed.plan[key]) | fields)}


def restarts(observed: Observed) -> list[str]:
    """Return what the next reconcile would scale, apply to StatefulSets, or delete."""
    desired = reconcile(observed, CONFIG, NOW)
    applied = [item["metadata"]["name"] for item in desired.objects if item["kind"] == "StatefulSet"]
    return [*applied, *(f"{item.name}={item.replicas}" for item in desired.scales), *(d.name for d in desired.deletes)]


def test_a_new_field_with_a_default_does_not_change_the_digest() -> None:
    spec = DLJobSpec.model_validate(DIGITS)
    assert spec_digest(NextSpec.model_validate(DIGITS)) == spec_digest(spec)
    assert spec_digest(NextSpec.model_validate({**DIGITS, "oversubscription": 2})) != spec_digest(spec)


def test_an_explicit_default_does_not_change_the_digest() -> None:
    spec = DLJobSpec.model_validate(DIGITS)
    assert spec_digest(DLJobSpec.model_validate(spec.manifest())) == spec_digest(spec)


def test_a_field_of_a_later_crd_is_ignored() -> None:
    observed = running()
    spec = {
        **observed.job.spec,
        "mascots": ["gopher"],
        "nodes": {**observed.job.spec["nodes"], "oversubscription": 1.5},
    }
    later = replace(observed, job=replace(observed.job, spec=spec))
    assert parse_observed(later).refusal is None and restarts(later) == []


def test_a_plan_contains_only_fields_that_differ_from_their_defaults() -> None:
    """An agent of an earlier release then rejects a plan only if the plan uses something new."""
    plan = plan_of(running()).plan
    document = json.loads(plan.to_json())
    assert document["schema"] == 1 and "compression" not in document and "role" not in document["ranks"][0]
    assert Plan.parse(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        (OPERATOR_KEY, {"mascot": "gopher"}),
        (PLAN_KEY, {"mascot": "gopher"}),
        (OPERATOR_KEY, {"cpu_limits_m": {"cpu": 100}}),
    ],
)
def test_a_plan_of_a_later_release_stays_in_force(key: str, fields: dict[str, Any]) -> None:
    observed = running()
    later = replace(observed, plan=stored_with(observed, key, **fields))
    assert restarts(later) == []
    maps = [m["data"] for m in reconcile(later, CONFIG, NOW).objects if m["metadata"]["name"] == "digits-plan"]
    assert maps == [later.plan], "a plan whose pods run is not rewritten"


def test_nested_fields_of_a_later_release_are_ignored() -> None:
    observed = running()
    assert observed.plan is not None
    mine = json.loads(observed.plan[OPERATOR_KEY])
    mine["status"]["predicted"]["mood"] = "good"
    later = replace(observed, plan={**observed.plan, OPERATOR_KEY: json.dumps(mine)})
    assert restarts(later) == []


def test_fencing_changes_only_the_term() -> None:
    observed = running()
    data = stored_with(observed, PLAN_KEY, mascot="gopher")
    fenced = StoredPlan.parse(data).with_term(7)
    assert fenced.plan.term == 7
    assert json.loads(fenced.data()[PLAN_KEY]) == json.loads(data[PLAN_KEY]) | {"term": 7}
    assert fenced.data()[OPERATOR_KEY] == data[OPERATOR_KEY]


def test_pods_of_an_unreadable_plan_run_on() -> None:
    observed = running()
    broken = replace(observed, plan=stored_with(observed, PLAN_KEY, schema=2))
    assert restarts(broken) == []
    status = reconcile(broken, CONFIG, NOW).status
    assert status is not None
    planned = find(status.conditions, "Planned")
    assert planned is not None and planned.reason == "PlanUnreadable" and "digits-plan" in planned.message
    assert is_true(status.conditions, "Running")


def test_an_unreadable_plan_without_pods_is_planned_again() -> None:
    observed = running()
    sets = tuple(replace(item, replicas=0) for item in observed.sets)
    broken = replace(observed, plan=stored_with(observed, PLAN_KEY, schema=2), sets=sets, pods=())
    assert any(m["kind"] == "StatefulSet" for m in reconcile(broken, CONFIG, NOW).objects)


@pytest.mark.parametrize(
    "changes", [{"mood": "good"}, {"phase": "Waiting"}, {"plan": {"kind": "new"}}, {"progress": {"step": 1, "new": 2}}]
)
def test_a_status_of_a_later_release_keeps_its_conditions(changes: dict[str, Any]) -> None:
    status = reconcile(running(), CONFIG, NOW).status
    assert status is not None
    found = previous(job(status={**status.manifest(), **changes}))
    assert found.conditions == status.conditions and found.start_time == status.start_time


def test_a_job_that_new_rules_refuse_runs_on() -> None:
    observed = running()
    refused = replace(observed, job=replace(observed.job, spec={**observed.job.spec, "epochs": -1}))
    assert parse_observed(refused).spec is None and restarts(refused) == []


def test_failure_of_the_operator_is_a_condition_and_changes_nothing_else() -> None:
    """Fixed bug: an AssertionError of the planner left a job without any status."""
    observed = running()
    desired = failed(observed, "AssertionError: no", NOW)
    assert (desired.objects, desired.scales, desired.deletes) == ((), (), ())
    assert desired.status is not None and is_true(desired.status.conditions, "Running")
    accepted = find(desired.status.conditions, "Accepted")
    assert accepted is not None and accepted.reason == "InternalError" and "AssertionError: no" in accepted.message
    recovered = reconcile(after(observed, desired), CONFIG, NOW).status
    assert recovered is not None and is_true(recovered.conditions, "Accepted")
