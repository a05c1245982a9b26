"""Tests that a job decides whether its pods may be evicted."""

import json

import pytest

from support.cluster.kubectl import TWO_NODES, Kubectl, KubectlError, example, step_of, wait_for

pytestmark = pytest.mark.e2e
FEW_STEPS = 5
"""Steps that may be done twice after an eviction. Updates of the progress can name a later step than the checkpoint."""


def evict(kubectl: Kubectl, pod: str) -> None:
    """Evict a pod as ``kubectl drain`` does. Raise KubectlError if its budget does not allow that."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": kubectl.namespace},
    }
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}/eviction"
    kubectl.run("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def test_job_that_allows_disruption_goes_on_after_an_eviction(kubectl: Kubectl) -> None:
    """The checkpoint interval is so long that only the eviction leads to a checkpoint."""
    changes = {
        "checkpoint": example("digits.yaml")["spec"]["checkpoint"] | {"interval": "1h"},
        "scheduling": {"disruption": "Allow"},
        "nodes": TWO_NODES,
    }
    kubectl.apply(example("digits.yaml", job="movable", epochs=3000, **changes))
    before = kubectl.wait_job("movable", "20 steps", lambda job: step_of(job) >= 20, 120)
    assert "lastCheckpoint" not in before["status"]
    evict(kubectl, "movable-cpu-1")
    stopped = kubectl.wait_job("movable", "a checkpoint", lambda job: "lastCheckpoint" in job["status"], 60)
    saved = int(stopped["status"]["lastCheckpoint"]["step"])
    assert saved >= step_of(before) and stopped["status"]["lastCheckpoint"]["writeSeconds"] > 0
    after = kubectl.wait_job("movable", "more steps", lambda job: step_of(job) > saved, 120)
    status = after["status"]
    assert status["restartsByCause"] == {"PodStopped": 1} and status.get("failures", 0) == 0, kubectl.describe_job(
        "movable"
    )
    assert status["progress"].get("stepsRepeated", 0) <= FEW_STEPS
    kubectl.delete("dljob", "movable")


@pytest.mark.long
def test_pods_of_a_job_that_avoids_disruption_are_not_evicted(kubectl: Kubectl) -> None:
    kubectl.apply(example("digits.yaml", job="precious", epochs=3000, scheduling={"disruption": "Avoid"}))
    kubectl.wait_job("precious", "a step", lambda job: step_of(job) > 0, 120)
    wait_for(
        "the budget to count the pods",
        lambda: kubectl.list("poddisruptionbudgets", "dljob.dev/job=precious")[0]["status"].get("currentHealthy") == 3,
        60,
    )
    with pytest.raises(KubectlError, match="violate the pod's disruption budget"):
        evict(kubectl, "precious-cpu-0")
    assert kubectl.job("precious")["status"].get("restarts", 0) == 0
    kubectl.delete("dljob", "precious", "--wait=true")
    wait_for("the budget to go", lambda: not kubectl.list("poddisruptionbudgets", "dljob.dev/job=precious"), 60)
