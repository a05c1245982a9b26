"""Tests of what counts as a rejection of a pod by the kubelet, and of the memory of rejections."""

from datetime import UTC, datetime
from typing import Any

import pytest

from dljob.job.observed import Rejection, Unscheduled
from dljob.kube import Cache
from dljob.kube.kinds import DLJOB, POD
from dljob.kube.objects import trim

CREATED = "2026-01-01T00:00:00Z"
NO_CPU = "Node didn't have enough resource: cpu, requested: 500, used: 15700, capacity: 16000"


def pod(status: dict[str, Any], uid: str = "a", **spec: Any) -> dict[str, Any]:
    reference = {"controller": True, "uid": "set", "kind": "StatefulSet", "name": "digits-cpu"}
    labels = {"dljob.dev/job": "digits", "dljob.dev/group": "cpu"}
    meta = {"name": "digits-cpu-0", "namespace": "ns", "uid": uid, "labels": labels, "ownerReferences": [reference]}
    return {"metadata": {**meta, "creationTimestamp": CREATED}, "spec": {"containers": [], **spec}, "status": status}


STATUSES: dict[str, tuple[dict[str, Any], str | None]] = {
    # status of the pod, reason of its rejection
    "too little CPU": ({"phase": "Failed", "reason": "OutOfcpu", "message": f"Pod was rejected: {NO_CPU}"}, "OutOfcpu"),
    "too few devices": ({"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": ""}, "OutOfnvidia.com/gpu"),
    "old kubelet": (
        {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Pod Allocate failed"},
        "UnexpectedAdmissionError",
    ),
    "node under pressure": (
        {
            "phase": "Failed",
            "reason": "Evicted",
            "message": "Pod was rejected: The node had condition: [DiskPressure]. ",
        },
        "Evicted",
    ),
    "evicted": ({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}, None),
    "node shut down": ({"phase": "Failed", "reason": "NodeShutdown", "message": "Pod was terminated"}, None),
    "runs": ({"phase": "Running"}, None),
}


@pytest.mark.parametrize("case", STATUSES)
def test_rejections_are_recognized(case: str) -> None:
    status, reason = STATUSES[case]
    found = trim.pod(pod(status, nodeName="n1")).rejection
    assert (found and found.reason) == reason
    if found is not None:
        assert found.node == "n1" and not found.message.startswith("Pod was rejected")


def test_rejection_outlives_its_pod_and_ends_with_the_job() -> None:
    found = Cache()
    meta = {"name": "digits", "namespace": "ns", "uid": "job", "creationTimestamp": CREATED}
    found.put(DLJOB, {"metadata": meta, "spec": {}})
    found.put(POD, pod(STATUSES["too little CPU"][0], nodeName="n1"))
    found.drop(POD, "ns", "digits-cpu-0", "a")
    found.put(POD, pod({"phase": "Pending"}, "b"))
    observed = found.observe(("ns", "digits"))
    at = datetime(2026, 1, 1, tzinfo=UTC)
    assert observed is not None
    assert observed.rejections == (Rejection("digits-cpu-0", "a", "n1", "OutOfcpu", NO_CPU, at),)
    assert observed.pods[0].unscheduled == Unscheduled(at, "default-scheduler")
    found.drop(DLJOB, "ns", "digits")
    found.put(DLJOB, {"metadata": {**meta, "uid": "next"}, "spec": {}})
    again = found.observe(("ns", "digits"))
    assert again is not None and again.rejections == ()


@pytest.mark.parametrize(
    ("status", "spec"),
    [
        ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]}, {}),
        ({"phase": "Pending"}, {"nodeName": "n1"}),
        ({"phase": "Failed"}, {}),
    ],
)
def test_pod_that_a_scheduler_has_tried_to_place_waits_for_none(status: dict[str, Any], spec: dict[str, Any]) -> None:
    assert trim.pod(pod(status, **spec)).unscheduled is None
