"""Clusters and requests for tests of the planner."""

from typing import Any

from dljob.cluster import ClusterView, cluster_view
from dljob.planner import Decision, Infeasible, Learned, Request, plan

A100, T4 = "NVIDIA-A100-SXM4-40GB", "Tesla-T4"
DIGITS = Request(job="j", global_batch=96, total_steps=375, model="digits-cnn", dataset="digits")
RESNET = Request(job="j", global_batch=512, total_steps=1000, model="resnet50", dataset="synthetic-images")


def view(*entries: dict[str, Any]) -> ClusterView:
    return cluster_view({"nodes": [{"name": f"n{i}", **entry} for i, entry in enumerate(entries)]})


def decided(request: Request, cluster: ClusterView, learned: dict[tuple[str, str], Learned] | None = None) -> Decision:
    found = plan(request, cluster, learned or {})
    assert isinstance(found, Decision), found
    return found


def rejected(request: Request, cluster: ClusterView) -> Infeasible:
    found = plan(request, cluster, {})
    assert isinstance(found, Infeasible), found
    return found


THREE = view({"count": 3, "cpu": 2, "memory": "4Gi"})
