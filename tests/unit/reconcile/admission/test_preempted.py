"""Tests of a job that is preempted: it stops with a checkpoint, waits in the queue, and continues."""

from dataclasses import replace

import pytest

from dlcontract import RunPhase
from dljob.api import Phase
from dljob.job.observed import Observed, Preemption
from dljob.reconcile import needs_view
from support.builders import DIGITS, Json, after, nodes, report, settled
from support.job_lifecycle import DOWN, condition_of, nothing_done, started, status, step, training, verdict

URGENT = Preemption("urgent", 1000, 0)


def preempted(spec: Json | None = None, by: Preemption = URGENT) -> Observed:
    """Return a training job that is told to release its devices."""
    return replace(training(spec, step=10), preemption=by)


def stopped(observed: Observed) -> Observed:
    """Return the preempted job after its pods wrote a checkpoint and were deleted."""
    leaving = replace(after(observed, step(observed, 10)), preemption=None)
    return replace(settled(leaving), report=report(leaving, RunPhase.STOPPED, step=10))


def test_job_stops_and_says_why() -> None:
    observed = preempted()
    assert not needs_view(observed)
    found = step(observed, 10)
    assert found.scales == DOWN and found.plan is None and not found.deletes
    assert verdict(found, "Preempted") == ("True", "Preempted")
    assert "job urgent with priority 1000" in condition_of(found, "Preempted").message
    assert verdict(found, "Admitted") == ("False", "Preempting")
    assert status(found).phase is Phase.PENDING and status(found).preemptions == 1
    assert [(event.type, event.reason) for event in found.events] == [("Normal", "Preempted")]


def test_names_do_not_leave_their_namespace() -> None:
    message = condition_of(step(preempted(by=Preemption("", 7, 3))), "Preempted").message
    assert "a job of another namespace with priority 7" in message and "has priority 3" in message


def test_pods_that_stop_are_not_started_again() -> None:
    observed = preempted()
    stopping = replace(after(observed, step(observed, 10)), preemption=None)
    for each in (stopping, replace(stopping, preemption=URGENT)):
        assert not needs_view(each)
        found = step(each, 20)
        assert nothing_done(found) and status(found).preemptions == 1 and not found.events
        assert verdict(found, "Admitted") == ("False", "Preempting")


def test_job_waits_and_continues_when_there_is_room() -> None:
    waiting = stopped(preempted())
    assert needs_view(waiting)
    full = replace(waiting, view=nodes({"name": "n", "count": 2, "cpu": 2, "memory": "4Gi"}))
    found = step(full, 60)
    assert nothing_done(found) and verdict(found, "Admitted") == ("False", "NoPlan")
    assert verdict(found, "Preempted") == ("True", "Preempted")
    back = step(replace(after(full, found), view=waiting.view), 120)
    assert verdict(back, "Preempted") == ("False", "Resumed") and verdict(back, "Admitted") == ("True", "Starting")
    assert [s.replicas for s in after(full, back).sets] == [3]
    assert [(event.type, event.reason) for event in back.events if event.reason == "Resumed"] == [("Normal", "Resumed")]
    again = settled(after(full, back))
    assert status(step(again, 130)).preemptions == 1 and verdict(step(again, 130), "Admitted") == ("True", "Started")


def test_preemption_is_no_failure_and_its_wait_is_no_active_time() -> None:
    """The waiting time would otherwise end the job with DeadlineExceeded."""
    spec = {"runPolicy": {"activeDeadlineSeconds": 100, "backoffLimit": 0}}
    waiting = stopped(preempted(DIGITS | spec))
    full = replace(waiting, view=nodes({"name": "n", "count": 2, "cpu": 2, "memory": "4Gi"}))
    found = step(full, 5000)
    assert status(found).phase is Phase.PENDING and (status(found).failures, status(found).restarts) == (0, 0)
    back = step(replace(after(full, found), view=waiting.view), 5000)
    again = settled(after(full, back))
    assert status(step(again, 5090)).phase is not Phase.FAILED
    assert verdict(step(again, 5101), "Failed") == ("True", "DeadlineExceeded")


def test_second_preemption_is_counted() -> None:
    waiting = stopped(preempted())
    back = settled(after(waiting, step(waiting, 60)))
    second = step(replace(back, preemption=URGENT), 2000)
    assert status(second).preemptions == 2 and verdict(second, "Preempted") == ("True", "Preempted")


@pytest.mark.parametrize("spec", [{"suspend": True}, {"planning": {"mode": "PlanOnly"}}])
def test_job_that_stops_anyway_is_not_preempted(spec: Json) -> None:
    observed = replace(started(), preemption=URGENT)
    found = step(replace(observed, job=replace(observed.job, spec=DIGITS | spec)), 10)
    assert status(found).preemptions is None and not any(c.type == "Preempted" for c in status(found).conditions)


def test_spec_change_while_the_pods_stop_is_planned_afterwards() -> None:
    observed = preempted()
    stopping = replace(after(observed, step(observed, 10)), preemption=None)
    changed = replace(stopping, job=replace(stopping.job, spec=DIGITS | {"nodes": {"min": 2, "max": 2}}, generation=2))
    assert nothing_done(step(changed, 15))
    gone = replace(settled(changed), report=None)
    assert needs_view(gone)
    back = step(gone, 30)
    assert [s.replicas for s in after(gone, back).sets] == [2] and verdict(back, "Preempted")[1] == "Resumed"


def test_new_status_field_is_unset_for_other_jobs() -> None:
    found = status(step(training(step=10), 10))
    assert found.preemptions is None and "preemptions" not in found.manifest()
