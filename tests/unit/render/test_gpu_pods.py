"""Tests of rendered GPU pods: requests, affinity, tolerations, and the shared memory that NCCL needs."""

import pytest

from dljob.perf.resources.memory import SHM_PER_GPU_NBYTES
from support.builders import A100, DIGITS, Json, nodes, rendered, seen

MI300X = "AMD_Instinct_MI300X_OAM"


@pytest.mark.parametrize("clock", [None, "1200"], ids=["no clock limit", "clock limit"])
@pytest.mark.parametrize("limit", [None, "250"], ids=["no power limit", "power limit"])
@pytest.mark.parametrize(
    ("device", "resource", "label"),
    [
        (A100, "nvidia.com/gpu", "nvidia.com/gpu.product"),
        (MI300X, "amd.com/gpu", "amd.com/gpu.product-name"),
    ],
    ids=["NVIDIA", "AMD"],
)
def test_pod_requests_the_resource_of_its_vendor_and_tolerates_its_taint(
    device: str, resource: str, label: str, limit: str | None, clock: str | None
) -> None:
    taint = {"key": resource, "value": "present", "effect": "NoSchedule"}
    view = nodes(
        {
            "count": 2,
            "device": device,
            "devices": 4,
            "cpu": 48,
            "memory": "180Gi",
            "taints": [taint],
            "powerLimit": limit,
            "clockLimit": clock,
        }
    )
    collective: Json = {**DIGITS, "nodes": {"min": 2, "max": 2}, "collective": "Ring"}
    objects = rendered(seen(collective, view))
    (pod,) = (item["spec"]["template"]["spec"] for item in objects if item["kind"] == "StatefulSet")
    resources = pod["containers"][0]["resources"]
    ranks = int(resources["limits"][resource])
    assert resources["requests"][resource] == str(ranks) and ranks >= 1
    assert pod["tolerations"] == [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    states: list[Json] = [
        {"key": key, "operator": "In", "values": [value]} if value else {"key": key, "operator": "DoesNotExist"}
        for key, value in (("dljob.dev/power-limit", limit), ("dljob.dev/clock-limit", clock))
    ]
    chosen = [
        {"matchExpressions": [{"key": k, "operator": "In", "values": [device]}, *states]}
        for k in (label, "dljob.dev/device")
    ]
    assert terms == chosen
    (shm,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm == {"medium": "Memory", "sizeLimit": f"{ranks * SHM_PER_GPU_NBYTES // 2**20}Mi"}
    (policy,) = (item for item in objects if item["kind"] == "NetworkPolicy")
    among = policy["spec"]["ingress"][0]["ports"]
    assert among == [{"protocol": "TCP"}], "NCCL listens on any port with every collective"
