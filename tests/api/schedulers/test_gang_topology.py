"""Tests of a PodGroup's topology with the real scheduler of a cluster that has it: a plan for one rack stays in a rack."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, wait_for
from support.cluster.live_job import Play

pytestmark = [pytest.mark.api, pytest.mark.gang]
Json = dict[str, Any]
RACK = "example.com/rack"


@pytest.fixture(scope="module")
def nodes(admin: Kubectl, kubectl: Kubectl) -> Iterator[HollowNodes]:
    """Return four nodes, two in each of two racks."""
    with HollowNodes(kubectl.namespace, 4, device=kubectl.namespace.replace("api", "hollow")) as found:
        for i, name in enumerate(found.names):
            admin.run("label", "node", name, f"{RACK}={'ab'[i % 2]}")
        yield found


@pytest.fixture(scope="module")
def operator_environment() -> dict[str, str]:
    """The network between racks is so slow that plans stay in one rack."""
    defaults = {"topology": {"rackLabel": RACK, "betweenRacks": {"bandwidth": "1k"}}}
    return {"DLJOB_GANG_SCHEDULING": "kubernetes", "DLJOB_JOB_DEFAULTS": json.dumps(defaults)}


def racks(admin: Kubectl, kubectl: Kubectl) -> list[str]:
    """Return the racks of the nodes on which the job's pods run that are not being deleted."""
    pods = [pod for pod in kubectl.list("pods", "dljob.dev/job") if "deletionTimestamp" not in pod["metadata"]]
    nodes = [(admin.get("node", pod["spec"]["nodeName"]) or {}) for pod in pods if "nodeName" in pod["spec"]]
    return [node["metadata"]["labels"][RACK] for node in nodes]


def test_pods_of_a_plan_for_one_rack_are_placed_in_one_rack(play: Play, admin: Kubectl) -> None:
    kubectl = play.kubectl
    play.submit("racked", nodes={"min": 2, "max": 2})
    play.until_ready("racked", 2)
    [group] = kubectl.list("podgroups.scheduling.k8s.io")
    assert group["spec"]["schedulingConstraints"] == {"topology": [{"key": RACK}]}, "the server has the feature gate"
    before = racks(admin, kubectl)
    assert len(before) == 2 and len(set(before)) == 1

    # A lost pod comes back in the rack of the other one.
    [lost, _] = kubectl.list("pods", "dljob.dev/job")
    kubectl.run("delete", "pod", lost["metadata"]["name"], "--wait=false")

    def back() -> bool:
        uids = {pod["metadata"]["uid"] for pod in kubectl.list("pods", "dljob.dev/job")}
        return lost["metadata"]["uid"] not in uids and len(racks(admin, kubectl)) == 2

    wait_for("the pod to come back", back, 60, lambda: str(kubectl.list("pods", "dljob.dev/job")))
    assert racks(admin, kubectl) == before
