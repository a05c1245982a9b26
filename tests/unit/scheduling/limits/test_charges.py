"""Tests of what pods and other objects charge to quotas."""

from typing import Any

import pytest

from dljob.scheduling import Charge, object_charge, pod_charge
from dljob.scheduling.limits.charges import MAX_AMOUNTS
from support.builders import MIXED, rendered, seen

Json = dict[str, Any]
AFFINITY = {
    "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone", "namespaces": ["b"]}]}
}


def container(requests: Json, limits: Json | None = None, **more: Any) -> Json:
    return {"name": "main", "resources": {"requests": requests, "limits": limits or {}}, **more}


CASES: dict[str, tuple[Json, Json]] = {
    # name: (spec, expected amounts in thousandths)
    "a pod counts twice": ({"containers": [container({})]}, {"pods": 1000, "count/pods": 1000}),
    "requests have two names": (
        {"containers": [container({"cpu": "1500m"})]}, {"requests.cpu": 1500, "cpu": 1500},
    ),
    "a limit is also a request": (
        {"containers": [container({}, {"memory": "1Gi"})]},
        {"requests.memory": 1000 * 2**30, "memory": 1000 * 2**30, "limits.memory": 1000 * 2**30},
    ),
    "extended resources have no short name": (
        {"containers": [container({"nvidia.com/gpu": "2"}, {"nvidia.com/gpu": "2"})]}, {"requests.nvidia.com/gpu": 2000},
    ),
    "the largest init container counts": (
        {"containers": [container({"cpu": "1"})], "initContainers": [container({"cpu": "3"})]}, {"requests.cpu": 3000},
    ),
    "a sidecar counts beside the containers": (
        {
            "containers": [container({"cpu": "1"})],
            "initContainers": [container({"cpu": "2"}, restartPolicy="Always")],
        }, {"requests.cpu": 3000},
    ),
    "storage on the node's disk": (
        {"containers": [container({"ephemeral-storage": "1k"}, {"ephemeral-storage": "2k"})]},
        {"requests.ephemeral-storage": 10**6, "ephemeral-storage": 10**6, "limits.ephemeral-storage": 2 * 10**6},
    ),
    "overhead counts": (
        {"containers": [container({"cpu": "1"}, {"cpu": "2"})], "overhead": {"cpu": "100m"}},
        {"requests.cpu": 1100, "limits.cpu": 2100},
    ),
    "requests of the whole pod": (
        {"containers": [container({"cpu": "1"})], "resources": {"requests": {"cpu": "5"}}}, {"requests.cpu": 5000},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_amounts_of_a_pod(case: str) -> None:
    spec, expected = CASES[case]
    found = dict(pod_charge(spec).amounts)
    assert {name: found.get(name) for name in expected} == expected
    if case.startswith("extended"):
        assert found.keys() == {"pods", "count/pods", "requests.nvidia.com/gpu"}


def test_a_pod_charges_a_limited_number_of_resources() -> None:
    """Computed: 300 pods of a job with 10,000 extended resources each would take 450 MB of the operator."""
    many = {f"example.com/r{i:05}": "1" for i in range(10_000)}
    found = pod_charge({"containers": [container({**many, "cpu": "1", "zz": "1"})]})
    assert len(found.amounts) == MAX_AMOUNTS and {"pods", "requests.cpu", "requests.zz"} < dict(found.amounts).keys()


@pytest.mark.parametrize(
    ("spec", "trait"),
    [
        ({"priorityClassName": "high"}, {"priority_class": "high"}),
        ({"activeDeadlineSeconds": 60}, {"terminating": True}),
        ({"affinity": AFFINITY}, {"cross_namespace": True}),
        ({"containers": [container({"cpu": "1"})]}, {"best_effort": False}),
        ({"containers": [container({})]}, {"best_effort": True}),
    ],
)
def test_traits_that_scopes_select(spec: Json, trait: Json) -> None:
    found = pod_charge(spec)
    assert {name: getattr(found, name) for name in trait} == trait


def test_pods_of_a_job_are_counted_by_no_scope_but_the_common_ones() -> None:
    [manifest, *_] = [item for item in rendered(seen(view=MIXED)) if item["kind"] == "StatefulSet"]
    found = pod_charge(manifest["spec"]["template"]["spec"])
    assert not (found.terminating or found.best_effort or found.cross_namespace or found.priority_class)


def test_objects_of_a_job() -> None:
    found = dict(object_charge(rendered(seen())).amounts)
    assert found["configmaps"] == found["count/configmaps"] == 3000
    assert found["persistentvolumeclaims"] == 1000 and found["requests.storage"] > 0
    assert found["count/statefulsets.apps"] == found["count/controllerrevisions.apps"] == 1000
    assert found["count/networkpolicies.networking.k8s.io"] == found["count/roles.rbac.authorization.k8s.io"] == 1000
    assert found["count/endpoints"] == found["count/endpointslices.discovery.k8s.io"] == 1000
    assert "pods" not in found, "the StatefulSet controller creates them"


def test_claim_of_a_storage_class() -> None:
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "spec": {"storageClassName": "fast", "resources": {"requests": {"storage": "1k"}}},
    }  # fmt: skip
    found = object_charge([claim])
    assert isinstance(found, Charge) and not found.is_pod
    assert dict(found.amounts)["fast.storageclass.storage.k8s.io/requests.storage"] == 10**6
