"""Tests that a job says that its quota is too small for it, although it also waits for busy devices."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.cluster import ClusterView
from dljob.planner import Infeasible
from dljob.reconcile.parsed import parse_observed
from dljob.reconcile.planning.make_plan import decide
from dljob.scheduling import NamespaceLimits, Quota
from dljob.scheduling.limits.quotas import Scope
from support.builders import A100, CONFIG, CPUS, nodes, seen

Json = dict[str, Any]
HEAVY: Json = {
    "model": {"hints": {"parameters": 300_000_000, "flopsPerSample": 4e12}},
    "dataset": {"uri": "pvc://data/train", "samples": 1_000_000},
    "trainer": {"command": ["python", "train.py"]},
    "globalBatchSize": 2048,
    "epochs": 3,
}


def quota(used: Json | None = None, **hard: str) -> Quota:
    status = {"hard": hard, "used": used or {}}
    return Quota.parse({"metadata": {"name": "team"}, "spec": {"hard": hard}, "status": status})


def gpus(count: int) -> Quota:
    return Quota("gpus", {"requests.nvidia.com/gpu": 1000 * count})


def refused(spec: Json, limit: Quota, view: ClusterView) -> Infeasible:
    found = decide(parse_observed(seen(spec, view, limits=NamespaceLimits((limit,)))), CONFIG)
    assert isinstance(found, Infeasible) and found.transient
    return found


BUSY = nodes({"name": "g", "count": 4, "device": A100, "devices": 8, "free": 0, "cpu": 32, "memory": "256Gi"})


@pytest.mark.parametrize(
    ("spec", "limit", "resource", "needed"),
    [
        ({"nodes": {"min": 3, "max": 4}}, gpus(2), "requests.nvidia.com/gpu", "3"),
        ({"nodes": {"min": 3, "max": 4}}, quota({"pods": "1"}, pods="2"), "pods", "3"),
        ({"resources": {"memory": "8Gi"}, "nodes": {"min": 2, "max": 4}}, quota(memory="10Gi"), "memory", "16Gi"),
        (
            {"planning": {"mode": "Fixed", "groups": [{"device": A100, "nodes": 1, "ranksPerNode": 8}]}},
            gpus(4), "requests.nvidia.com/gpu", "8",
        ),
    ],
    ids=["GPUs", "pods", "memory", "fixed groups"],
)  # fmt: skip
def test_job_that_waits_for_devices_says_that_its_quota_is_too_small(
    spec: Json, limit: Quota, resource: str, needed: str
) -> None:
    """Fixed bug: the reason was DeviceBusy until enough devices were free, and meanwhile no running job grew."""
    found = refused({**HEAVY, **spec}, limit, view=BUSY)
    assert found.reason == "QuotaExceeded" and f"Raise {resource} of ResourceQuota" in found.message
    assert f"at least {needed}" in found.message
    enough = replace(limit, hard=dict.fromkeys(limit.hard, 2**60))
    assert refused({**HEAVY, **spec}, enough, view=BUSY).reason == "DeviceBusy"
    scoped = replace(limit, scopes=(Scope("Terminating"),))
    assert refused({**HEAVY, **spec}, scoped, view=BUSY).reason == "DeviceBusy"


def test_job_that_may_use_cpus_may_be_admitted_without_gpus() -> None:
    mixed = ClusterView((*BUSY.nodes, *(replace(node, free_cpu=0.0) for node in CPUS.nodes)))
    assert refused({**HEAVY, "nodes": {"min": 3, "max": 4}}, gpus(2), view=mixed).reason == "DeviceBusy"
