"""Tests of admissions by Kueue with which no plan is possible: kept for a time, given back, or refused for good."""

import pytest

from dljob.planner import Infeasible
from dljob.reconcile import needs_view
from support.builders import changed, nodes, plan_of
from support.kueue import replay
from support.kueue.life import ELASTIC, FEW, Life

ONE = nodes({"name": "n", "count": 1, "cpu": 8, "memory": "16Gi"})
"""The nodes that are left while the others are cordoned."""
NEVER = Infeasible("BatchMismatch", "spec.planning.groups", "found 4 samples; expected 6")
TIMEOUT_S = 300.0


def admitted_while_cordoned() -> Life:
    """Return a job that asked for 3 pods, of which Kueue admitted 2 while there was one node."""
    life = Life(ELASTIC)
    life.view = FEW
    life.steps()
    life.view = ONE
    return life.kueue(replay.admitted, {"cpu": 2}).steps()


def timed_out() -> Life:
    return admitted_while_cordoned().wait(TIMEOUT_S)


def never() -> Life:
    """Return a job of which Kueue admitted 2 pods, with which no plan is possible on any nodes."""
    life = Life(ELASTIC)
    life.view = FEW
    life.steps().kueue(replay.admitted, {"cpu": 2})
    life.infeasible = NEVER
    life.step()
    life.infeasible = None
    return life


def test_job_keeps_an_admission_until_its_nodes_return() -> None:
    """Fixed bug: the operator deactivated the Workload, and the job never ran."""
    life = admitted_while_cordoned()
    assert life.replicas == 0 and life.condition() == ("False", "AwaitingUsableNodes")
    assert life.condition("Planned") == ("False", "TooFewNodes")
    assert life.body is not None and life.body["spec"]["active"] is True
    assert life.workload("QuotaReserved") == ("True", "QuotaReserved")
    assert needs_view(life.observed, now=life.now), "it is planned again when the nodes change"
    assert life.desired.requeue_after_s is not None
    life.view = FEW
    life.wait(TIMEOUT_S / 2)
    assert life.replicas == 2 and life.condition() == ("True", "AdmittedByKueue")


def test_quota_is_given_back_after_the_start_timeout() -> None:
    life = admitted_while_cordoned().wait(TIMEOUT_S - 20)
    assert life.body is not None and life.condition() == ("False", "AwaitingUsableNodes")
    life.wait(20)
    assert life.body is None and life.condition() == ("False", "AdmissionTimedOut")
    assert "spec.planning.groups" in life.message(), "the message has the reason of the planner"
    assert life.desired.status is not None and life.desired.status.start_timeouts == 1
    assert life.desired.requeue_after_s is not None and life.desired.requeue_after_s > 0


def test_start_timeout_of_the_spec_counts() -> None:
    life = Life({**ELASTIC, "scheduling": {"startTimeout": "1m"}})
    life.view = FEW
    life.steps()
    life.view = ONE
    life.kueue(replay.admitted, {"cpu": 2}).steps().wait(60)
    assert life.condition() == ("False", "AdmissionTimedOut")


def test_job_asks_again_after_a_back_off_which_doubles() -> None:
    life = timed_out().steps()
    assert not needs_view(life.observed, now=life.now), "its plan would not be used during the back-off"
    life.view = FEW
    life.wait(45)
    assert life.body is not None and life.condition() == ("False", "Queued")
    assert life.body["spec"]["podSets"][0]["count"] == 3
    life.view = ONE
    life.kueue(replay.admitted, {"cpu": 2}).steps().wait(TIMEOUT_S)
    assert life.desired.status is not None and life.desired.status.start_timeouts == 2
    life.view = FEW
    life.wait(40)
    assert life.body is None, "the second back-off is longer than 45 s"
    life.wait(45)
    assert life.body is not None and life.condition() == ("False", "Queued")
    life.kueue(replay.admitted).steps().pods().steps()
    assert life.replicas == 3 and life.desired.status.start_timeouts == 0


def test_job_is_planned_for_the_nodes_that_are_left() -> None:
    life = timed_out().wait(45)
    assert life.body is not None and life.body["spec"]["podSets"][0]["count"] == 1
    life.kueue(replay.admitted).steps()
    assert life.replicas == 1 and plan_of(life.observed).nodes == 1


def test_job_asks_for_nothing_while_no_nodes_are_left() -> None:
    life = timed_out()
    life.view = nodes({"name": "n", "count": 1, "cpu": 1, "memory": "64Mi"})
    life.wait(45)
    assert life.body is None and life.condition() == ("False", "NoPlan")
    assert needs_view(life.observed, now=life.now)
    life.view = FEW
    life.steps()
    assert life.body is not None and life.body["spec"]["podSets"][0]["count"] == 3


def test_workload_that_is_being_deleted_keeps_the_reason() -> None:
    life = admitted_while_cordoned()
    workload = life.body
    life.wait(TIMEOUT_S)
    assert workload is not None and life.body is None
    life.body = {**workload, "metadata": {**workload["metadata"], "deletionTimestamp": "2026-03-01T12:10:00Z"}}
    life.wait(45)
    assert life.condition() == ("False", "AdmissionTimedOut") and life.desired.workload is None
    assert life.desired.requeue_after_s, "it does not reconcile without a pause"


@pytest.mark.parametrize("start", [admitted_while_cordoned, timed_out])
def test_change_of_the_spec_asks_again_at_once(start: object) -> None:
    assert callable(start)
    life = start()
    life.view = FEW
    life.observed = changed(life.observed, nodes={"min": 3, "max": 3})
    life.steps()
    assert life.body is not None and life.condition() == ("False", "Queued")
    [pod_set] = life.body["spec"]["podSets"]
    assert pod_set["count"] == 3 and "minCount" not in pod_set


def test_eviction_ends_the_wait_for_nodes() -> None:
    life = admitted_while_cordoned().kueue(replay.evicted, "PodsReadyTimeout", "too late").steps()
    assert life.workload("QuotaReserved") == ("False", "Pending") and life.condition() == ("False", "Queued")


def test_admission_that_can_never_be_used_is_deactivated() -> None:
    life = never()
    assert life.replicas == 0 and life.condition() == ("False", "AdmissionNotUsable")
    assert life.body is not None and life.body["spec"]["active"] is False
    assert NEVER.message in life.message(), "the message has the reason of the planner"


def test_reason_of_a_deactivation_stays() -> None:
    """Fixed bug: the message advised to activate the Workload, which leads to the same admission."""
    life = never()
    text = life.message()
    assert "spec.nodes.min" in text
    life.steps()
    assert life.condition() == ("False", "AdmissionNotUsable") and life.message() == text
    life.kueue(replay.evicted, "Deactivated", "The workload is deactivated").steps()
    assert life.workload("QuotaReserved") == ("False", "Pending"), "others can use the quota"
    life.wait(86400)
    assert life.condition() == ("False", "AdmissionNotUsable") and life.message() == text
    assert life.body is not None and life.body["spec"]["active"] is False
    life.observed = changed(life.observed, nodes={"min": 3, "max": 3})
    life.steps()
    assert life.condition() == ("False", "Queued") and life.body["spec"]["active"] is True


def test_activated_workload_waits_again() -> None:
    life = never().kueue(replay.evicted, "Deactivated", "The workload is deactivated").steps()
    assert life.body is not None
    life.body["spec"]["active"] = True
    assert life.steps().condition() == ("False", "Queued")
    life.kueue(replay.deactivated).steps()
    assert life.condition() == ("False", "Deactivated"), "somebody else has deactivated it"


def test_admission_of_an_earlier_spec_is_not_planned_for() -> None:
    life = admitted_while_cordoned()
    assert life.body is not None
    meta = life.body["metadata"]
    life.body["metadata"] = {**meta, "annotations": {**meta["annotations"], "dljob.dev/spec": "other"}}
    life.step()
    assert life.body is None and life.condition() == ("False", "Queued")
    life.steps()
    assert life.body is not None and life.body["spec"]["active"] is True
