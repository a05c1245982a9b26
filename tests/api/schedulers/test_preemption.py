"""Tests of preemption with a real scheduler and API server: a low job makes room for a high one and continues."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, condition, wait_for
from support.cluster.live_job import SPEC, Play

pytestmark = pytest.mark.api
Json = dict[str, Any]


@pytest.fixture(scope="module")
def operator_environment() -> dict[str, str]:
    return {"DLJOB_PREEMPTION": "LowerPriority"}


@pytest.fixture(scope="module")
def nodes(kubectl: Kubectl) -> Iterator[HollowNodes]:
    """Return two nodes with one GPU each, so that only one of the jobs fits at a time."""
    with HollowNodes(kubectl.namespace, 2, device=kubectl.namespace.replace("api", "hollow"), gpus=1) as found:
        yield found


@pytest.fixture
def high_class(kubectl: Kubectl, admin: Kubectl) -> Iterator[str]:
    """Return the name of a PriorityClass with the value 1000. Its pods do not preempt others by themselves."""
    name = f"high-{kubectl.namespace}"
    meta = {"name": name}
    admin.apply({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": meta, "value": 1000})
    yield name
    admin.run("delete", "priorityclass", name, "--ignore-not-found")


def pods_of(kubectl: Kubectl, job: str) -> list[Json]:
    return kubectl.list("pods", f"dljob.dev/job={job}")


def reason(job: Json, kind: str) -> str | None:
    found = condition(job, kind)
    return None if found is None else str(found["reason"])


def test_low_job_makes_room_and_continues(play: Play, admin: Kubectl, high_class: str, claim: str) -> None:
    kubectl, high = play.kubectl, {**SPEC["scheduling"], "priorityClassName": high_class}
    play.submit("low", epochs=1_000_000, checkpoint={"volume": {"claimName": claim}})
    play.until_ready("low")
    play.submit("high", scheduling=high)
    low = kubectl.wait_job("low", "it to be preempted", lambda job: reason(job, "Preempted") == "Preempted", 60)
    assert low["status"]["preemptions"] == 1
    wait_for("the pods of the low job to be gone", lambda: not pods_of(kubectl, "low"), 60)
    play.until_ready("high")
    assert not pods_of(kubectl, "low")
    kubectl.run("delete", "dljob", "high")
    kubectl.wait_job("low", "it to continue", lambda job: reason(job, "Preempted") == "Resumed", 90)
    play.until_ready("low")
    low = kubectl.job("low")
    assert (low["status"]["preemptions"], low["status"]["failures"], low["status"]["restarts"]) == (1, 0, 0)
    # The class goes away: a job that names it waits and says so, and the running job is not touched.
    admin.run("delete", "priorityclass", high_class)
    play.submit("late", scheduling=high)
    kubectl.wait_job(
        "late", "the missing class", lambda job: reason(job, "PriorityClassFound") == "PriorityClassNotFound", 30
    )
    assert not pods_of(kubectl, "late") and len(pods_of(kubectl, "low")) == 2
