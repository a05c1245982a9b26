"""Test of a job that needs more nodes than exist: its pods stay pending until a node is added, as autoscalers do."""

import json
from collections.abc import Iterator

import pytest

from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, condition, wait_for
from support.cluster.live_job import Play
from support.cluster.operator_process import OperatorProcess

pytestmark = pytest.mark.api


@pytest.fixture(scope="module")
def nodes(kubectl: Kubectl) -> Iterator[HollowNodes]:
    """Return the only node that exists at first."""
    found = HollowNodes(kubectl.namespace, 1, device=kubectl.namespace.replace("api", "hollow"))
    found.start()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def operator(
    kubectl: Kubectl, nodes: HollowNodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    taint = {"key": "dljob.dev/hollow", "value": "true", "effect": "NoSchedule"}
    template = {"name": "new", "count": 2, "device": nodes.device, "cpu": 32, "memory": "64Gi", "taints": [taint]}
    log = tmp_path_factory.mktemp("operator") / "log"
    found = OperatorProcess(kubectl.kubeconfig, kubectl.namespace, log, DLJOB_NODE_TEMPLATES=json.dumps([template]))
    found.start()
    yield found
    if found.running:
        assert found.stop() == 0, found.log


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
