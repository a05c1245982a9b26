"""Tests of Kubernetes' own gang scheduling, with the real scheduler and controllers of a cluster that has it."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, condition, no_pods, wait_for
from support.cluster.live_job import Play

pytestmark = [pytest.mark.api, pytest.mark.gang]
Json = dict[str, Any]


@pytest.fixture(scope="module")
def other_device(kubectl: Kubectl) -> Iterator[HollowNodes]:
    """Return a node of another device type."""
    with HollowNodes(f"{kubectl.namespace}-other", 1, device=kubectl.namespace.replace("api", "other")) as found:
        yield found


@pytest.fixture(scope="module")
def operator_environment() -> dict[str, str]:
    """The operator does not see the pods of other namespaces, so that its plans may lack room."""
    return {"DLJOB_GANG_SCHEDULING": "kubernetes"}


@pytest.fixture
def stranger(admin: Kubectl, kubectl: Kubectl) -> Iterator[Kubectl]:
    yield Kubectl(admin.kubeconfig, "default")
    admin.run("delete", "pod", f"first-{kubectl.namespace}", "-n", "default", "--ignore-not-found")


def fill(stranger: Kubectl, name: str, node: str) -> None:
    """Run a pod on ``node`` that takes all of its processors."""
    container = {"name": "main", "image": "example.invalid/none:1", "resources": {"requests": {"cpu": "32"}}}
    spec = {"nodeName": node, "containers": [container], "terminationGracePeriodSeconds": 0}
    stranger.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    wait_for("the pod to run", lambda: (stranger.get("pod", name) or {})["status"]["phase"] == "Running", 20)


def placed(kubectl: Kubectl) -> dict[str, str | None]:
    """Return the job's pods that are not being deleted, by uid, with their nodes."""
    pods = [pod for pod in kubectl.list("pods", "dljob.dev/job") if "deletionTimestamp" not in pod["metadata"]]
    return {pod["metadata"]["uid"]: pod["spec"].get("nodeName") for pod in pods}


def refused_by_scheduler(kubectl: Kubectl, known: set[str], count: int) -> list[str]:
    """Wait until the scheduler has refused ``count`` pods that are not ``known``. Return its messages."""

    def messages() -> list[str] | None:
        found = [
            item["message"]
            for pod in kubectl.list("pods", "dljob.dev/job")
            for item in pod["status"].get("conditions") or ()
            if pod["metadata"]["uid"] not in known and item["type"] == "PodScheduled" and item["status"] == "False"
        ]
        return found if len(found) == count else None

    return wait_for(f"{count} pods that the scheduler refuses", messages, 30, lambda: str(placed(kubectl)))


def test_all_pods_of_a_job_are_placed_together_or_not_at_all(
    play: Play, nodes: HollowNodes, other_device: HollowNodes, stranger: Kubectl
) -> None:
    kubectl, blocker = play.kubectl, f"first-{play.kubectl.namespace}"
    fill(stranger, blocker, other_device.names[0])
    groups = [
        {"device": play.device, "nodes": 2, "batchPerRank": 20},
        {"device": other_device.device, "nodes": 1, "batchPerRank": 20},
    ]
    play.submit("gang", nodes={"min": 1, "max": 3}, devices=None, planning={"mode": "Fixed", "groups": groups})

    # Two device groups share one PodGroup. There is room for two of three pods, so none is placed.
    refused_by_scheduler(kubectl, set(), 3)
    assert list(placed(kubectl).values()) == [None] * 3
    [group] = kubectl.list("podgroups.scheduling.k8s.io")
    assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 3}}
    assert {pod["spec"]["schedulingGroup"]["podGroupName"] for pod in kubectl.list("pods", "dljob.dev/job")} == {
        group["metadata"]["name"]
    }
    play.kubectl.wait_job(
        "gang", "PodsReady", lambda job: (condition(job, "PodsReady") or {}).get("status") == "False", 10
    )

    # Room for the third pod: all are placed.
    stranger.run("delete", "pod", blocker)
    play.until_ready("gang", 3)

    # One lost pod is replaced alone: it counts with those that run.
    before = placed(kubectl)
    kubectl.run("delete", "pod", f"gang-{play.device}-0", "--wait=false")
    wait_for(
        "another pod", lambda: None not in (now := placed(kubectl)).values() and len(now) == 3 and now != before, 30
    )
    play.until_ready("gang", 3)

    # The PodGroup goes with its job.
    kubectl.delete("dljob", "gang", "--wait=false")
    no_pods(kubectl, "gang", 30)
    wait_for("the PodGroup to be gone", lambda: not kubectl.list("podgroups.scheduling.k8s.io"), 30)


def test_pod_group_of_another_owner_is_left_alone(play: Play) -> None:
    """The name of a PodGroup contains a digest of its spec, so that a first job finds out the name."""
    kubectl = play.kubectl
    play.run("shared")
    [own] = kubectl.list("podgroups.scheduling.k8s.io")
    kubectl.delete("dljob", "shared", "--wait=true")
    wait_for("the PodGroup to be gone", lambda: not kubectl.list("podgroups.scheduling.k8s.io"), 30)
    no_pods(kubectl, "shared", 30)
    name = own["metadata"]["name"]
    foreign = {"apiVersion": own["apiVersion"], "kind": "PodGroup", "metadata": {"name": name}, "spec": own["spec"]}
    kubectl.apply(foreign)
    before = kubectl.get("podgroups.scheduling.k8s.io", name)
    assert before is not None
    play.submit("shared")
    play.until_reported("shared", "PodsReady", "NamesTaken", "PodGroup", name)
    after = kubectl.get("podgroups.scheduling.k8s.io", name)
    assert after is not None and after["metadata"]["uid"] == before["metadata"]["uid"]
    assert "ownerReferences" not in after["metadata"] and after["spec"] == before["spec"]
    assert not kubectl.list("pods", "dljob.dev/job=shared")
    kubectl.delete("dljob", "shared", "--wait=true")
    assert kubectl.get("podgroups.scheduling.k8s.io", name) is not None
    kubectl.delete("podgroups.scheduling.k8s.io", name)
