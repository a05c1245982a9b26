"""Jobs in a queue of Kueue on a real API server.

The transitions of Workloads are replayed, unless ``DLJOB_TEST_KUEUE=real`` says that the cluster has a real Kueue
(``hack/test kueue --kubeconfig FILE``).
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster.kubectl import Kubectl, condition, no_pods, wait_for
from support.cluster.live_job import SPEC, Play
from support.kueue.actors import Actor, RealKueue, Replayer

Json = dict[str, Any]
pytestmark = pytest.mark.api


@pytest.fixture(scope="module")
def kueue(kubectl: Kubectl, nodes: Any) -> Iterator[Actor]:
    kind = RealKueue if os.environ.get("DLJOB_TEST_KUEUE") == "real" else Replayer
    found = kind(kubectl, nodes.device)
    yield found
    found.remove()


def submit(play: Play, kueue: Actor, name: str, **changes: Any) -> None:
    metadata = {"name": name, "labels": {"kueue.x-k8s.io/queue-name": kueue.queue}}
    spec = {**SPEC, "devices": [play.device], **changes}
    play.kubectl.apply({"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "metadata": metadata, "spec": spec})


def stands(body: Json, kind: str) -> tuple[str, str] | None:
    """Return status and reason of a condition of a Workload."""
    found = [item for item in body.get("status", {}).get("conditions", ()) if item["type"] == kind]
    return (found[0]["status"], found[0]["reason"]) if found else None


def released(body: Json) -> bool:
    return "admission" not in body.get("status", {}) and (stands(body, "QuotaReserved") or ("",))[0] != "True"


def test_job_follows_its_workload(play: Play, kueue: Actor, kubectl: Kubectl) -> None:
    """Without Kueue, queued, admitted, evicted, admitted again, done, deleted."""
    if kueue.replayed:
        submit(play, kueue, "whole")
        play.until_reported("whole", "Admitted", "NoKueue")
        kueue.install()
    else:
        kueue.install()
        submit(play, kueue, "whole")
    play.until_reported("whole", "Admitted", "Queued")
    asked = kueue.wait("whole", "in its queue", lambda each: each["spec"]["queueName"] == kueue.queue)
    assert [item["count"] for item in asked["spec"]["podSets"]] == [2]
    assert not kubectl.list("statefulsets", "dljob.dev/job=whole")

    kueue.admit("whole")
    play.until_ready("whole")
    [first, _] = kubectl.list("pods", "dljob.dev/job=whole")
    assert first["spec"]["nodeSelector"] == {"dljob.dev/device": play.device}
    assert {"key": "example.com/kueue", "operator": "Exists"} in first["spec"]["tolerations"]
    assert not any("kueue" in key for key in first["metadata"]["labels"])
    kueue.wait("whole", "ready", lambda each: stands(each, "PodsReady") == ("True", "Started"))

    kueue.evict("whole")
    no_pods(kubectl, "whole", 60)
    kueue.wait("whole", "without quota", released)
    play.until_reported("whole", "Admitted", "Queued")
    job = kubectl.wait_phase("whole", "Suspended", 30)
    assert (condition(job, "Suspended") or {})["reason"] == "InQueue"

    kueue.admit("whole")
    play.until_ready("whole")
    play.finish("whole")
    kueue.wait("whole", "finished", lambda each: stands(each, "Finished") == ("True", "Succeeded"))
    kubectl.delete("dljob", "whole")
    wait_for("the Workload to be deleted with its job", lambda: kueue.find("whole") is None, 60)


def test_partially_admitted_job_runs_with_the_admitted_pods(play: Play, kueue: Actor, kubectl: Kubectl) -> None:
    """Admitted with one of two pods, deactivated, activated, admitted with both."""
    if not kueue.replayed:
        kueue.evict("")  # The queue must be held when the job comes.
    submit(play, kueue, "part", nodes={"min": 1, "max": 2}, planning={"mode": "Auto"}, resources={"cpu": "1"})
    asked = kueue.wait("part", "there", lambda _: True)
    [pod_set] = asked["spec"]["podSets"]
    if pod_set["count"] != 2:
        pytest.fail(f"expected a plan with two nodes; found {pod_set['count']}")
    assert pod_set["minCount"] == 1
    kueue.admit("part", 1)
    play.until_ready("part", 1)
    assert len(play.plan("part").pods) == 1

    kueue.deactivate("part")
    no_pods(kubectl, "part", 60)
    play.until_reported("part", "Admitted", "Deactivated")
    kueue.wait("part", "without quota", released)
    if not kueue.replayed:
        kueue.evict("part")
    kueue.activate("part")
    kueue.admit("part")
    play.until_ready("part", 2)
    assert len(play.plan("part").pods) == 2
