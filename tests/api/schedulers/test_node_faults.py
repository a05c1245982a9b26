"""Tests that nodes with repeated faults are left out of plans, with real scheduling. The test reports the faults."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dlcontract import Failure, RunPhase
from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, condition, wait_for
from support.cluster.live_job import Play
from support.cluster.operator_process import OperatorProcess

pytestmark = pytest.mark.api
Json = dict[str, Any]
RECORD = "dljob-operator-node-faults"
IGNORE = "dljob.dev/ignore-faults"
ALL_NODES: Json = {"nodes": {"min": 3, "max": 3}}


@pytest.fixture(scope="module")
def operator_environment(kubectl: Kubectl, neighbour: Kubectl) -> dict[str, str]:
    return {"DLJOB_WATCH_NAMESPACES": f"{kubectl.namespace},{neighbour.namespace}"}


@pytest.fixture(autouse=True)
def healthy(kubectl: Kubectl, neighbour: Kubectl, nodes: HollowNodes, operator: OperatorProcess) -> Iterator[None]:
    """Forget all faults and delete all jobs after each test."""
    yield
    for each in (kubectl, neighbour):
        each.run("delete", "dljobs", "--all", "--wait=true")
    for name in nodes.names:
        kubectl.run("annotate", "node", name, f"{IGNORE}=true", "--overwrite")
    if not operator.running:
        operator.start()
    wait_for("no node to be left out", lambda: left_out(operator) == (0, 0), 30)
    kubectl.delete("configmap", RECORD)
    for name in nodes.names:
        kubectl.run("annotate", "node", name, f"{IGNORE}-")


def left_out(operator: OperatorProcess) -> tuple[float, float]:
    """Return the numbers of nodes that are left out for all namespaces, and for one."""
    all_, one = (operator.metric(f'dljob_operator_nodes_left_out{{scope="{scope}"}}') for scope in ("all", "namespace"))
    return all_, one


def nodes_of(kubectl: Kubectl, job: str) -> dict[str, str]:
    """Return pod → node."""
    pods = kubectl.list("pods", f"dljob.dev/job={job}")
    return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pods}


def record(kubectl: Kubectl) -> Json:
    """Return node → stored faults and times."""
    found = kubectl.get("configmap", RECORD) or {}
    return {node: json.loads(text) for node, text in (found.get("data") or {}).items()}


def fail(play: Play, job: str, node: str, times: int) -> None:
    """Report that the device of a job's pod on ``node`` has failed, for the ``times``-th time."""
    pod = next(name for name, where in nodes_of(play.kubectl, job).items() if where == node)
    failure = Failure(reason="DeviceFailed", message="CUDA error: uncorrectable ECC error", host=pod)
    restarts = {failure.reason: times}
    play.report(job, RunPhase.RESTARTING, failure=failure, failures=times, restarts=restarts)


def start(play: Play, job: str) -> None:
    """Submit a job on all nodes and wait until it is in phase Running."""
    play.submit(job, **ALL_NODES)
    play.until_ready(job, 3)
    play.report(job, RunPhase.RUNNING, step_s=0.01)
    play.kubectl.wait_phase(job, "Running", 30)


def until_recorded(kubectl: Kubectl, node: str, faults: int) -> None:
    wait_for(f"{faults} faults of {node}", lambda: len(record(kubectl).get(node, {}).get("faults", ())) == faults, 20)


def test_job_leaves_a_node_whose_device_fails_again(play: Play, nodes: HollowNodes, operator: OperatorProcess) -> None:
    kubectl = play.kubectl
    play.run("mover")
    bad = sorted(nodes_of(kubectl, "mover").values())[0]
    fail(play, "mover", bad, 1)
    until_recorded(kubectl, bad, 1)
    assert set(nodes_of(kubectl, "mover")) and left_out(operator) == (0, 0)
    play.report("mover", RunPhase.RUNNING, step_s=0.01)
    kubectl.wait_phase("mover", "Running", 30)
    fail(play, "mover", bad, 2)
    # The pods stop within a second here, so that only the event shows the reason for sure.
    play.until_reported("mover", "NodeFaulty", "Replanned")
    [event] = play.kubectl.wait_events("mover", "Replanning")
    assert bad in event["message"] and "2 device faults" in event["message"]
    play.until_ready("mover")
    assert bad not in nodes_of(kubectl, "mover").values()
    assert left_out(operator) == (0, 1)
    job = kubectl.job("mover")
    [line] = [item for item in job["status"]["plan"]["rejected"] if bad in item["reason"]]
    assert line["reason"].startswith("left out because of repeated faults")
    play.kubectl.wait_events("mover", "NodeLeftOut", "Replanning", "Replanned")

    def left() -> list[dict[str, Any]]:
        events = json.loads(kubectl.run("get", "events", "-n", "default", "-o", "json"))["items"]
        return [e for e in events if (e["involvedObject"]["name"], e["reason"]) == (bad, "NodeLeftOut")]

    [event] = wait_for("the event of the node", left, 60)
    assert kubectl.namespace in event["message"] and "2 device faults" in event["message"]
    assert "NodeLeftOut" in kubectl.run("describe", "node", bad)
    play.report("mover", RunPhase.RUNNING, step_s=0.01)
    play.finish("mover")


@pytest.mark.long
def test_record_outlives_the_operator_and_waiting_jobs_start_when_it_ends(
    play: Play, nodes: HollowNodes, operator: OperatorProcess
) -> None:
    kubectl = play.kubectl
    play.run("breaker")
    bad = sorted(nodes_of(kubectl, "breaker").values())[1]
    fail(play, "breaker", bad, 1)
    until_recorded(kubectl, bad, 1)
    assert operator.stop() == 0
    operator.start()
    fail(play, "breaker", bad, 2)
    wait_for("the node to be left out", lambda: left_out(operator) == (0, 1), 20)
    assert operator.stop() == 0
    operator.start()
    play.submit("patient", **ALL_NODES)
    play.until_reported("patient", "Planned", "NodesLeftOut", bad, "2 device faults", "Z")
    assert not kubectl.list("pods", "dljob.dev/job=patient")
    kubectl.run("annotate", "node", bad, f"{IGNORE}=true")
    play.until_ready("patient", 3)
    assert bad in nodes_of(kubectl, "patient").values()


@pytest.mark.long
def test_deleted_entry_of_the_record_lets_a_node_return(play: Play, operator: OperatorProcess) -> None:
    kubectl = play.kubectl
    play.run("plague")
    bad = sorted(nodes_of(kubectl, "plague").values())[0]
    for times in (1, 2):
        fail(play, "plague", bad, times)
        until_recorded(kubectl, bad, times)
    play.until_reported("plague", "NodeFaulty", "Replanned")
    play.submit("hopeful", **ALL_NODES)
    play.until_reported("hopeful", "Planned", "NodesLeftOut", bad)
    kubectl.patch("configmap", RECORD, {"data": {bad: None}})
    kubectl.wait_job("hopeful", "ready", lambda job: job.get("status", {}).get("ready") == "3/3", 60)


@pytest.mark.long
def test_namespace_cannot_take_nodes_from_others_alone(
    play: Play, neighbour: Kubectl, nodes: HollowNodes, operator: OperatorProcess
) -> None:
    other = Play(neighbour, nodes.device)
    start(play, "loud")
    bad = nodes.names[0]
    for times in range(1, 5):
        fail(play, "loud", bad, times)
        until_recorded(play.kubectl, bad, times)
    play.until_reported("loud", "NodeFaulty", "NoOtherNodes", bad, status="True")
    assert left_out(operator) == (0, 1)
    start(other, "calm")
    assert condition(other.kubectl.job("calm"), "NodeFaulty") is None
    fail(other, "calm", bad, 1)
    wait_for("the node to be left out for all", lambda: left_out(operator) == (1, 0), 20)
    other.until_reported("calm", "NodeFaulty", "NoOtherNodes", bad, status="True")


def test_node_that_becomes_not_ready_has_one_fault(play: Play, nodes: HollowNodes) -> None:
    play.run("dark")
    bad = sorted(nodes_of(play.kubectl, "dark").values())[0]
    nodes.unready.add(bad)
    try:
        until_recorded(play.kubectl, bad, 1)
        [fault] = record(play.kubectl)[bad]["faults"]
        assert (fault["kind"], fault.get("namespace", "")) == ("NodeNotReady", "")
    finally:
        nodes.unready.clear()
