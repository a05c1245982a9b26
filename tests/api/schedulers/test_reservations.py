"""Tests that jobs never share devices and never block them for nothing, with a real scheduler and API server."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, condition, wait_for
from support.cluster.live_job import Play
from support.cluster.operator_process import OperatorProcess

pytestmark = pytest.mark.api
Json = dict[str, Any]
RESERVED_S = 90
"""Longer than a reservation lasts if no pod is placed."""


@pytest.fixture(scope="module")
def nodes(kubectl: Kubectl) -> Iterator[HollowNodes]:
    """Return three nodes with one GPU each, so that only one of the jobs fits at a time."""
    with HollowNodes(kubectl.namespace, 3, device=kubectl.namespace.replace("api", "hollow"), gpus=1) as found:
        yield found


@pytest.fixture(scope="module")
def other(neighbour: Kubectl) -> Kubectl:
    """Return the second namespace, whose quota allows no pods at first."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "full"}, "spec": {"hard": {"pods": "0"}}}
    neighbour.apply(quota)
    return neighbour


@pytest.fixture(scope="module")
def operator_environment(kubectl: Kubectl, neighbour: Kubectl) -> dict[str, str]:
    return {"DLJOB_WATCH_NAMESPACES": f"{kubectl.namespace},{neighbour.namespace}", "DLJOB_COUNT_ALL_PODS": "true"}


def planned(job: Json) -> str | None:
    found = condition(job, "Planned")
    return None if found is None else str(found["reason"])


def remove(kubectl: Kubectl, *names: str) -> None:
    kubectl.run("delete", "dljob", *names)
    # Other jobs may start as soon as these pods are gone.
    label = f"dljob.dev/job in ({', '.join(names)})"
    wait_for("the pods to be gone", lambda: not kubectl.list("pods", label), 60)


def test_jobs_at_once_never_share_devices(play: Play) -> None:
    names = [f"at-once-{i}" for i in range(5)]
    for name in names:
        play.submit(name)

    def decided() -> bool:
        return all(planned(play.kubectl.job(name)) for name in names)

    for left in (4, 3):
        wait_for("all jobs to be planned or to wait", decided, 30)
        wait_for(
            "one job to be planned",
            lambda: Counter(planned(play.kubectl.job(name)) for name in names)["Planned"] == 1, 30,
        )  # fmt: skip
        assert Counter(planned(play.kubectl.job(name)) for name in names) == {"Planned": 1, "DeviceBusy": left}
        [running] = [name for name in names if planned(play.kubectl.job(name)) == "Planned"]
        play.until_ready(running)
        used = [pod["spec"].get("nodeName") for pod in play.kubectl.list("pods", "dljob.dev/job")]
        assert len(used) == len(set(used)) == 2
        remove(play.kubectl, running)
        names.remove(running)
        wait_for(
            "the next job to be planned",
            lambda: any(planned(play.kubectl.job(name)) == "Planned" for name in names), 10,
        )  # fmt: skip
    remove(play.kubectl, *names)


def test_pods_of_other_namespaces_take_devices(play: Play, admin: Kubectl, nodes: HollowNodes) -> None:
    stranger = Kubectl(admin.kubeconfig, "default")
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    container = {"name": "main", "image": "example.invalid/none:1", "resources": limits}
    spec = {"nodeName": nodes.names[0], "containers": [container], "terminationGracePeriodSeconds": 0}
    name = f"stranger-{play.kubectl.namespace}"
    stranger.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})
    wait_for("the pod to run", lambda: (stranger.get("pod", name) or {})["status"]["phase"] == "Running", 20)
    play.submit("wants-all", nodes={"min": 3, "max": 3})
    play.until_reported("wants-all", "Planned", "DeviceBusy")
    stranger.run("delete", "pod", name)
    play.kubectl.wait_job("wants-all", "a plan", lambda job: planned(job) == "Planned", 10)
    remove(play.kubectl, "wants-all")


def test_job_waits_for_its_quota_and_does_not_block_another(play: Play, other: Kubectl) -> None:
    full = Play(other, play.device)
    full.submit("refused")
    full.until_reported("refused", "Planned", "QuotaExceeded", "ResourceQuota full", "0 left, 2 needed")
    assert not other.list("statefulsets", "dljob.dev/job")
    play.submit("allowed")
    play.until_ready("allowed")
    remove(play.kubectl, "allowed")
    grown = {"hard": {"pods": "2", "requests.nvidia.com/gpu": "2", "count/statefulsets.apps": "1"}}
    other.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "full"}, "spec": grown})
    full.until_ready("refused")
    found = other.get("resourcequota", "full")
    assert found is not None and found["status"]["used"] == {
        "pods": "2",
        "requests.nvidia.com/gpu": "2",
        "count/statefulsets.apps": "1",
    }
    full.submit("second", nodes={"min": 1, "max": 1})
    full.until_reported("second", "Planned", "QuotaExceeded", "ResourceQuota full")
    remove(other, "refused", "second")


@pytest.mark.long
def test_next_operator_keeps_reservations_until_they_expire(play: Play, operator: OperatorProcess) -> None:
    play.submit("unplaced", scheduling={"schedulerName": "nobody", "tolerations": [{"operator": "Exists"}]})
    wait_for("pods", lambda: len(play.kubectl.list("pods", "dljob.dev/job=unplaced")) == 2, 20)
    operator.stop()
    operator.start()
    play.submit("later")
    play.until_reported("later", "Planned", "DeviceBusy")
    play.kubectl.wait_job("later", "a plan", lambda job: planned(job) == "Planned", RESERVED_S)
    play.until_ready("later")
    remove(play.kubectl, "unplaced", "later")
