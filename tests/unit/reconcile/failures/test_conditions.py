"""Tests of failure rules about conditions of nodes and pods: which failure they decide on, and until when."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dlcontract import FAILURES_KEY, Failure, FailureAllowance, RunPhase
from dljob.job.observed import Conditions, Observed
from dljob.reconcile.failures.failure_conditions import END_S, WAIT_S, WINDOW_S
from support.builders import DIGITS, after, plan_of, report
from support.job_lifecycle import started, status, step, training, verdict

POD, NODE = "digits-cpu-1", "digits-cpu-node-1"
HEALTHY: Conditions = (("GpuUnhealthy", "False"), ("Ready", "True"))
BAD_GPU: Conditions = (("GpuUnhealthy", "True"), ("Ready", "True"))
UNKNOWN: Conditions = (("GpuUnhealthy", "False"), ("Ready", "Unknown"))
EVICTED: Conditions = (("DisruptionTarget", "True"),)


def on_node(action: str, kind: str = "GpuUnhealthy", **more: str) -> dict[str, Any]:
    return {"action": action, "onNodeConditions": [{"type": "Unlikely"}, {"type": kind, **more}]}


def on_pod(action: str) -> dict[str, Any]:
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget"}]}


def on_code(action: str) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"values": [3]}}


def spec(*rules: dict[str, Any], limit: int = 3) -> dict[str, Any]:
    return {**DIGITS, "runPolicy": {"backoffLimit": limit, "failureRules": list(rules)}}


def broken(
    observed: Observed,
    node: Conditions = HEALTHY,
    pod: Conditions = (),
    phase: RunPhase = RunPhase.RESTARTING,
    n: int = 1,
) -> Observed:
    """Return the job after a rank in ``POD`` has failed, with the conditions of its node and its pod."""
    failure = Failure(reason="RankFailed", message="as it said", rank=1, host=POD, exit_code=3)
    text = report(observed, phase, failure=failure, failures=n, restarts={"RankFailed": n})
    return shown(replace(observed, report=text), node, pod)


def shown(observed: Observed, node: Conditions = HEALTHY, pod: Conditions = ()) -> Observed:
    """Return the job with other conditions of the node and the pod of the failed rank."""
    pods = tuple(replace(item, conditions=pod if item.name == POD else ()) for item in observed.pods)
    return replace(observed, pods=pods, node_conditions={NODE: node, "digits-cpu-node-0": BAD_GPU})


def ignored(observed: Observed, seconds: float = 0.0) -> int:
    """Return the number of failures that do not count after one more reconcile, as the coordinator reads it."""
    desired = step(observed, seconds)
    events = [event.message for event in desired.events if event.reason == "FailureIgnored"]
    data = after(observed, desired).plan
    assert data is not None
    allowance = FailureAllowance.parse(data[FAILURES_KEY])
    assert len(events) == allowance.ignored
    assert not events or "spec.runPolicy.failureRules[" in events[0]
    return allowance.ignored


CASES: dict[str, tuple[tuple[dict[str, Any], ...], Conditions, Conditions, int]] = {
    # rules, conditions of the node, of the pod, failures that do not count
    "node": ((on_node("Ignore"),), BAD_GPU, (), 1),
    "node without the condition": ((on_node("Ignore"),), HEALTHY, (), 0),
    "status": ((on_node("Ignore", "Ready", status="Unknown"),), UNKNOWN, (), 1),
    "another status": ((on_node("Ignore", "Ready", status="Unknown"),), HEALTHY, (), 0),
    "pod": ((on_pod("Ignore"),), HEALTHY, EVICTED, 1),
    "pod without the condition": ((on_pod("Ignore"),), BAD_GPU, (), 0),
    "a rule of the coordinator decides first": ((on_node("Ignore"), on_code("Count")), BAD_GPU, (), 0),
    "Count hides later rules": ((on_node("Count"), on_pod("Ignore")), BAD_GPU, EVICTED, 0),
    "Count that does not apply": ((on_node("Count"), on_pod("Ignore")), HEALTHY, EVICTED, 1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_first_rule_whose_condition_holds_decides(
    case: tuple[tuple[dict[str, Any], ...], Conditions, Conditions, int],
) -> None:
    rules, node, pod, expected = case
    assert ignored(broken(training(spec(*rules)), node, pod)) == expected


def test_status_counts_ignored_failures() -> None:
    observed = training(spec(on_node("Ignore")))
    assert status(step(observed)).failures_ignored is None
    assert status(step(broken(observed))).failures_ignored is None
    assert status(step(broken(observed, BAD_GPU))).failures_ignored == 1


def test_condition_may_come_later_while_ranks_train_again() -> None:
    first = broken(training(spec(on_node("Ignore"))))
    observed = after(first, step(first))
    running = replace(
        observed, report=report(observed, failures=1, failure=Failure(reason="Hung", message="", counts=False))
    )
    assert ignored(shown(running), 60) == 0
    assert ignored(shown(running, BAD_GPU), WINDOW_S - 1) == 1
    assert ignored(shown(running, BAD_GPU), WINDOW_S + 1) == 0


def test_each_failure_is_ignored_once() -> None:
    first = broken(training(spec(on_node("Ignore"))), BAD_GPU)
    observed = after(first, step(first))
    again = step(observed, 1)
    assert not again.events and plan_of(after(observed, again)).failures == plan_of(observed).failures
    second = broken(observed, BAD_GPU, n=2)
    desired = step(second, 2)
    assert json.loads((after(second, desired).plan or {})[FAILURES_KEY])["ignored"] == 2


def test_job_with_a_last_failure_waits_for_the_window() -> None:
    first = broken(training(spec(on_node("Ignore"), limit=0)))
    desired = step(first)
    assert verdict(desired, "Running") == ("False", "Restarting") and desired.requeue_after_s is not None
    waiting = after(first, desired)
    assert verdict(step(waiting, WINDOW_S + 1), "Running") == ("False", "Restarting")
    assert verdict(step(waiting, END_S + 1), "Failed") == ("True", "BackoffLimitExceeded")
    saved = shown(waiting, BAD_GPU)
    saved = after(saved, step(saved, 30))
    assert verdict(step(saved, END_S + 1), "Running") == ("False", "Restarting")


def test_coordinator_that_has_given_up_has_ended_the_job() -> None:
    observed = broken(training(spec(on_node("Ignore"), limit=0)), BAD_GPU, phase=RunPhase.FAILED)
    assert verdict(step(observed), "Failed") == ("True", "RankFailed")


def test_rule_fails_the_job() -> None:
    observed = broken(training(spec(on_code("Count") | {"onExitCodes": {"values": [4]}}, on_node("FailJob"))), BAD_GPU)
    desired = step(observed)
    assert verdict(desired, "Failed") == ("True", "RankFailed")
    failed = next(c for c in status(desired).conditions if c.type == "Failed")
    assert f"node {NODE}" in failed.message and "GpuUnhealthy=True" in failed.message
    assert "spec.runPolicy.failureRules[1] says FailJob" in failed.message


def test_pod_that_has_replaced_the_failed_one_does_not_decide() -> None:
    first = broken(training(spec(on_pod("Ignore"))))
    observed = shown(after(first, step(first)), pod=EVICTED)
    assert ignored(observed, 1) == 1
    other = replace(observed, pods=tuple(replace(pod, uid=f"{pod.uid}-2") for pod in observed.pods))
    assert ignored(other, 1) == 0


def test_first_plan_tells_the_coordinator_to_wait_and_a_changed_spec_keeps_the_count() -> None:
    observed = started(spec(on_node("Ignore")))
    assert observed.plan is not None and FailureAllowance.parse(observed.plan[FAILURES_KEY]).wait_s == WAIT_S
    assert "GpuUnhealthy" not in observed.plan["plan.json"], "agents of earlier releases reject what they do not know"
    first = broken(training(spec(on_node("Ignore"))), BAD_GPU)
    counted = after(first, step(first))
    without = replace(counted, job=replace(counted.job, spec=spec(), generation=2))
    record = FailureAllowance.parse((after(without, step(without)).plan or {})[FAILURES_KEY])
    assert record.ignored == 1


def test_coordinator_that_counts_from_zero_has_nothing_ignored() -> None:
    first = broken(training(spec(on_node("Ignore"))), BAD_GPU)
    observed = after(first, step(first))
    fresh = replace(shown(observed), report=report(observed))
    assert FailureAllowance.parse((after(fresh, step(fresh)).plan or {})[FAILURES_KEY]).ignored == 0


def test_jobs_without_such_rules_have_the_plan_of_earlier_releases() -> None:
    observed = broken(training(spec(on_code("Count"))), BAD_GPU)
    assert FAILURES_KEY not in (after(observed, step(observed)).plan or {})


@pytest.mark.parametrize("action", ["FailJob", "Count"])
def test_coordinator_does_not_wait_if_no_rule_can_ignore_the_failure(action: str) -> None:
    data = started(spec(on_node(action))).plan
    assert data is not None and FailureAllowance.parse(data[FAILURES_KEY]).wait_s == 0


def test_edited_record_counts_as_none() -> None:
    observed = training(spec(on_node("Ignore")))
    edited = replace(observed, plan={**(observed.plan or {}), FAILURES_KEY: '{"ignored": "many"}'})
    assert plan_of(edited).failures is None and verdict(step(edited), "Running")[0] == "True"
