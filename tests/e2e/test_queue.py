"""Tests of jobs in real pods that compete for three nodes with a part of a core each (hack/test queue)."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.cluster.helm import helm
from support.cluster.kubectl import ROOT, Kubectl, condition, example, no_pods, step_of, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.queue]
Json = dict[str, Any]
VOLUME: Json = {"interval": "5s", "volume": {"size": "256Mi", "reclaimPolicy": "Delete", "shared": True}}
ENDLESS: Json = {"epochs": 100_000, "checkpoint": VOLUME}


@pytest.fixture(scope="module", autouse=True)
def preempting_operator(admin: Kubectl) -> None:
    """Let jobs preempt others, and the operator request so little that a pod of a job has room on each node."""
    values = ("--set", "preemption=LowerPriority", "--set", "resources.requests.cpu=250m")
    helm(admin, "upgrade", str(ROOT / "charts/dljob"), "--reuse-values", *values)


@pytest.fixture
def urgent(admin: Kubectl) -> Iterator[str]:
    """Return the name of a PriorityClass above that of jobs without a class."""
    meta = {"name": "e2e-urgent"}
    admin.apply({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": meta, "value": 1000})
    yield "e2e-urgent"
    admin.delete("priorityclass", "e2e-urgent")


def submit(kubectl: Kubectl, name: str, least: int, most: int, **changes: Any) -> None:
    """Create a job whose pods each need a node of their own, also beside the operator."""
    nodes, resources = {"min": least, "max": most}, {"cpu": "310m"}
    kubectl.apply(example("digits.yaml", job=name, nodes=nodes, resources=resources, **changes))


def trains(kubectl: Kubectl, name: str, after: int = 0) -> Json:
    """Wait until a job shows a step after the given one and return the job."""
    return kubectl.wait_job(name, f"a step after {after}", lambda job: step_of(job) > after, 180)


def remove(kubectl: Kubectl, *names: str) -> None:
    for name in names:
        kubectl.delete("dljob", name)
    for name in names:
        no_pods(kubectl, name, 90)


def reason(job: Json, kind: str) -> str | None:
    found = condition(job, kind)
    return None if found is None else str(found["reason"])


def position(job: Json) -> int | None:
    found: int | None = job.get("status", {}).get("queue", {}).get("position")
    return found


def events_of(kubectl: Kubectl, name: str) -> set[str]:
    """Return the reasons of all events about a job."""
    return {event["reason"] for event in kubectl.list("events") if event["involvedObject"]["name"] == name}


def test_running_job_grows_when_a_node_becomes_free(kubectl: Kubectl) -> None:
    submit(kubectl, "holder", 1, 1, **ENDLESS)
    trains(kubectl, "holder")
    submit(kubectl, "grows", 1, 3, globalBatchSize=480, **ENDLESS)
    before = trains(kubectl, "grows")["status"]
    assert before["plan"]["nodes"] == 2
    kubectl.delete("dljob", "holder")

    def has_moved(job: Json) -> bool:
        return bool(job["status"]["plan"]["nodes"] == 3 and job["status"]["phase"] == "Running")

    # The reason is free capacity, or a step time that contradicts the plan, whichever the operator sees first.
    moved = kubectl.wait_job("grows", "to run on three nodes", has_moved, 300)["status"]
    assert reason({"status": moved}, "Resizing") == "Resized" or "Replanned" in events_of(kubectl, "grows")
    assert moved["failures"] == 0
    saved = moved["lastCheckpoint"]["step"]
    assert saved > 0
    assert step_of(trains(kubectl, "grows", saved)) > saved, "the job must go on from its checkpoint"
    predicted = [plan["predicted"]["stepSeconds"] for plan in (before["plan"], moved["plan"])]
    assert predicted[1] < predicted[0]
    remove(kubectl, "grows", "holder")


def test_job_of_a_low_priority_makes_room_and_still_learns(kubectl: Kubectl, urgent: str) -> None:
    submit(kubectl, "low", 3, 3, epochs=200, checkpoint=VOLUME)
    trains(kubectl, "low", 50)
    submit(kubectl, "urgent", 3, 3, scheduling={"priorityClassName": urgent})
    low = kubectl.wait_job("low", "to be preempted", lambda job: reason(job, "Preempted") == "Preempted", 120)["status"]
    stopped = step_of({"status": low})
    assert low["preemptions"] == 1 and stopped >= 50
    done = kubectl.wait_phase("urgent", "Complete", 300)
    assert done["status"]["result"]["accuracy"] >= 0.97
    again = kubectl.wait_job("low", "to continue", lambda job: reason(job, "Preempted") == "Resumed", 120)["status"]
    assert again["lastCheckpoint"]["step"] >= stopped, "the checkpoint is written at the stop"
    ended = kubectl.wait_phase("low", "Complete", 900)["status"]
    assert ended["result"]["accuracy"] >= 0.97
    assert (ended["preemptions"], ended["failures"]) == (1, 0)
    assert ended["restartsByCause"] == {}
    remove(kubectl, "urgent", "low")


def test_job_with_a_deadline_starts_first(kubectl: Kubectl) -> None:
    submit(kubectl, "busy", 3, 3, **ENDLESS)
    trains(kubectl, "busy")
    submit(kubectl, "later", 3, 3, epochs=10)
    wait_for("the first to wait", lambda: kubectl.job("later").get("status", {}).get("queue"), 60)
    finish = (datetime.now(UTC) + timedelta(minutes=10)).strftime("%Y-%m-%dT%H:%M:%SZ")
    submit(kubectl, "due", 3, 3, epochs=10, scheduling={"finishBy": finish})
    for name, place in (("due", 1), ("later", 2)):
        kubectl.wait_job(name, f"place {place}", lambda job, n=place: position(job) == n, 90)
    assert condition(kubectl.job("due"), "DeadlineFeasible") is not None
    kubectl.delete("dljob", "busy")
    due = kubectl.wait_phase("due", "Complete", 300)
    assert due["status"]["result"]["accuracy"] >= 0.95, "one process reaches 0.9694 after ten epochs"
    later = kubectl.wait_phase("later", "Complete", 300)
    assert later["status"]["startTime"] > due["status"]["startTime"]
    remove(kubectl, "busy", "due", "later")
