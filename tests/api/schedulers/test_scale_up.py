"""Test of a job that needs more nodes than exist: its pods stay pending until a node is added, as autoscalers do."""

import json
from collections.abc import Iterator

import pytest

from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, condition, wait_for
from support.cluster.live_job import Play

pytestmark = pytest.mark.api


@pytest.fixture(scope="module")
def nodes(kubectl: Kubectl) -> Iterator[HollowNodes]:
    """Return the only node that exists at first."""
    with HollowNodes(kubectl.namespace, 1, device=kubectl.namespace.replace("api", "hollow")) as found:
        yield found


@pytest.fixture(scope="module")
def operator_environment(nodes: HollowNodes) -> dict[str, str]:
    taint = {"key": "dljob.dev/hollow", "value": "true", "effect": "NoSchedule"}
    template = {"name": "new", "count": 2, "device": nodes.device, "cpu": 32, "memory": "64Gi", "taints": [taint]}
    return {"DLJOB_NODE_TEMPLATES": json.dumps([template])}


def test_pending_pods_wait_for_a_node_that_is_added(play: Play, nodes: HollowNodes) -> None:
    kubectl = play.kubectl
    play.submit("grows")
    job = play.until_reported("grows", "PodsReady", "Unschedulable")
    planned = condition(job, "Planned")
    assert planned is not None and "1 pod needs a node that does not exist yet" in planned["message"]
    assert len(kubectl.list("pods", "dljob.dev/job=grows")) == 2

    # More than the template allows is planned for nobody, and makes no pods.
    play.submit("too-large", nodes={"min": 3, "max": 3})
    wait_for("the second job to wait", lambda: condition(kubectl.job("too-large"), "Planned"), 20)
    assert (condition(kubectl.job("too-large"), "Planned") or {})["status"] == "False"
    assert not kubectl.list("pods", "dljob.dev/job=too-large")

    added = HollowNodes(f"{kubectl.namespace}-added", 1, device=nodes.device)
    added.start()
    try:
        play.until_ready("grows")
    finally:
        kubectl.delete("dljob", "grows")
        kubectl.delete("dljob", "too-large")
        added.stop()
