"""Tests of the memory of evictions: pods that are evicted, replaced and gone before a reconcile."""

from typing import Any

import pytest

from dljob.kube import Cache
from dljob.kube.kinds import DLJOB, POD
from dljob.kube.objects.pods.evictions import MAX_MESSAGE, MAX_PODS

JOB = ("ns", "digits")
MESSAGE = 'Usage of EmptyDir volume "tmp" exceeds the limit "2Gi". '


def cache() -> Cache:
    meta = {"name": "digits", "namespace": "ns", "uid": "job", "creationTimestamp": "2026-01-01T00:00:00Z"}
    found = Cache()
    found.put(DLJOB, {"metadata": meta, "spec": {}})
    return found


def pod(uid: str, status: dict[str, Any], owner: str = "digits-cpu") -> dict[str, Any]:
    reference = {"controller": True, "uid": "set", "kind": "StatefulSet", "name": owner}
    labels = {"dljob.dev/job": "digits", "dljob.dev/group": "cpu"}
    meta = {"name": "digits-cpu-0", "namespace": "ns", "uid": uid, "labels": labels, "ownerReferences": [reference]}
    return {"metadata": meta, "spec": {"nodeName": "n1"}, "status": status}


def evicted(message: str = MESSAGE) -> dict[str, Any]:
    """Return the status that a kubelet of Kubernetes 1.34 writes when it evicts a pod."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": message}
    return {"phase": "Failed", "reason": "Evicted", "message": message, "conditions": [condition]}


def evictions(found: Cache) -> list[tuple[str, str, str, str]]:
    observed = found.observe(JOB)
    assert observed is not None
    return [(each.pod, each.uid, each.node, each.message) for each in observed.evictions]


def test_eviction_outlives_its_pod() -> None:
    found = cache()
    assert found.put(POD, pod("a", {"phase": "Running"}))
    assert found.put(POD, pod("a", evicted())), "a reconcile follows"
    found.drop(POD, "ns", "digits-cpu-0", "a")
    found.put(POD, pod("b", {"phase": "Pending"}))
    assert evictions(found) == [("digits-cpu-0", "a", "n1", MESSAGE)]


@pytest.mark.parametrize(
    ("at", "counts"), [("2026-01-01T00:00:59Z", False), ("2026-01-01T00:01:00Z", True), ("", True), ("unknown", True)]
)
def test_eviction_of_a_pod_of_an_earlier_job_of_this_name_does_not_count(at: str, counts: bool) -> None:
    """Fixed bug: the pod was remembered anew while it stopped, and the next job failed because of its storage."""
    found, status = cache(), evicted()
    status["conditions"][0]["lastTransitionTime"] = at
    found.put(POD, pod("a", status))
    found.drop(DLJOB, "ns", "digits", "job")
    found.put(POD, pod("a", {**status, "message": f"{MESSAGE} It stops."}))
    meta = {"name": "digits", "namespace": "ns", "uid": "next", "creationTimestamp": "2026-01-01T00:01:00Z"}
    found.put(DLJOB, {"metadata": meta, "spec": {}})
    assert bool(evictions(found)) == counts


def test_other_ends_of_pods_are_no_evictions() -> None:
    found = cache()
    found.put(POD, pod("a", {"phase": "Failed", "reason": "NodeShutdown", "message": "Pod was terminated"}))
    found.put(POD, pod("b", {"phase": "Running", "reason": "Evicted"}))
    found.put(POD, pod("c", evicted(), owner="stranger"))
    assert evictions(found) == []


def test_evictions_of_look_pods_are_remembered_apart() -> None:
    found = cache()
    for uid, name in (("a", "digits-look"), ("b", "digits-look"), ("c", "other")):
        meta = {
            "name": name,
            "namespace": "ns",
            "uid": uid,
            "labels": {"dljob.dev/job": "digits", "dljob.dev/look": "true"},
        }
        assert found.put(POD, {"metadata": meta, "spec": {"nodeName": "n1"}, "status": evicted()})
        found.drop(POD, "ns", name, uid)
    observed = found.observe(JOB)
    assert observed is not None and observed.evictions == ()
    assert [(each.pod, each.uid, each.node) for each in observed.look_evictions] == [
        ("digits-look", "a", "n1"), ("digits-look", "b", "n1"),
    ]  # fmt: skip
    found.drop(DLJOB, *JOB)
    assert cache().observe(JOB) is not None and not found._look_evictions.of(JOB)


def test_memory_is_bounded_and_ends_with_the_job() -> None:
    found = cache()
    for i in range(2 * MAX_PODS):
        found.put(POD, pod(f"p{i}", evicted("x" * 10_000)))
    assert [uid for _, uid, _, _ in evictions(found)] == [f"p{i}" for i in range(MAX_PODS, 2 * MAX_PODS)]
    assert {len(message) for *_, message in evictions(found)} == {MAX_MESSAGE}
    job = {"metadata": {"name": "digits", "namespace": "ns", "uid": "new", "creationTimestamp": "2026-01-01T00:00:00Z"}}
    found.drop(DLJOB, "ns", "digits")
    found.put(DLJOB, {**job, "spec": {}})
    assert evictions(found) == []
