"""Tests of a PriorityClass that does not exist: the job says so, and nothing is lost."""

from dataclasses import replace

import pytest

from dljob.api import Phase
from dljob.job.observed import Observed
from dljob.reconcile import needs_view
from support.builders import DIGITS, Json, after, changed, seen
from support.job_lifecycle import DOWN, condition_of, nothing_done, started, status, step, training, verdict

SPEC: Json = DIGITS | {"scheduling": {"priorityClassName": "batch"}}


def without_class(observed: Observed) -> Observed:
    return replace(observed, lacks_priority_class="batch")


def test_job_without_pods_waits_until_the_class_exists() -> None:
    """Fixed bug: the job reserved devices for pods that the API server rejected."""
    first = without_class(seen(SPEC))
    assert not needs_view(first)
    found = step(first)
    assert nothing_done(found) and found.requeue_after_s is not None
    assert verdict(found, "PriorityClassFound") == ("False", "PriorityClassNotFound")
    assert "'batch'" in condition_of(found, "PriorityClassFound").message
    assert verdict(found, "Admitted") == ("False", "NoPlan") and status(found).phase is Phase.PENDING
    assert [(event.type, event.reason) for event in found.events] == [("Warning", "PriorityClassNotFound")]
    back = step(replace(after(first, found), lacks_priority_class=""), 60)
    assert verdict(back, "PriorityClassFound") == ("True", "PriorityClassFound") and back.plan is not None


def test_running_job_runs_on() -> None:
    observed = without_class(training(SPEC, step=10))
    found = step(observed, 10)
    assert not found.scales and not found.deletes and status(found).phase is Phase.RUNNING
    assert verdict(found, "PriorityClassFound") == ("False", "PriorityClassNotFound")
    assert "pods run on" in condition_of(found, "PriorityClassFound").message
    again = step(replace(after(observed, found), lacks_priority_class=""), 20)
    assert verdict(again, "PriorityClassFound") == ("True", "PriorityClassFound")
    assert status(again).phase is Phase.RUNNING


def test_running_job_does_not_stop_for_a_plan_whose_pods_could_not_start() -> None:
    """Fixed bug: a wrong class in a changed spec, or growth onto free nodes, stopped the job without a way back."""
    changed_spec = without_class(changed(training(SPEC, step=10), scheduling={"priorityClassName": "bach"}))
    assert not needs_view(changed_spec)
    found = step(changed_spec, 10)
    assert not found.scales and verdict(found, "Planned") == ("False", "PriorityClassNotFound")
    assert "continues with plan 1" in condition_of(found, "Planned").message and status(found).phase is Phase.RUNNING
    back = step(replace(after(changed_spec, found), lacks_priority_class=""), 20)
    assert back.scales == DOWN and verdict(back, "Running") == ("False", "Replacing")
    moves = without_class(training(SPEC, step=10))
    conditions = [
        *moves.job.status["conditions"],
        {
            "type": "Resizing", "status": "True", "reason": "BetterPlan", "message": "from 3 to 2",
            "lastTransitionTime": "2026-03-01T12:00:00Z",
        },
    ]  # fmt: skip
    moves = replace(moves, job=replace(moves.job, status={**moves.job.status, "conditions": conditions}))
    assert needs_view(replace(moves, lacks_priority_class="")) and not needs_view(moves)
    stays = step(moves, 30)
    assert not stays.scales and verdict(stays, "Planned") == ("True", "Planned")


@pytest.mark.parametrize("more", [{"suspend": True}, {"planning": {"mode": "PlanOnly"}}])
def test_job_that_needs_no_pods_is_not_held(more: Json) -> None:
    found = step(without_class(seen(SPEC | more)))
    assert verdict(found, "PriorityClassFound")[0] == "False"
    assert not any(c.reason == "NoPlan" for c in status(found).conditions)


def test_job_with_a_class_has_no_such_condition() -> None:
    assert not any(c.type == "PriorityClassFound" for c in status(step(started(SPEC))).conditions)
