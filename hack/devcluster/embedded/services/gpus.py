"""Simulated GPUs: extended resources on nodes with the option `gpu=`. They are restored if kubelet removes them."""

from __future__ import annotations

from devcluster.embedded.services.api import Api, Object
from devcluster.embedded.services.watching import Mirror, Reconciler
from devcluster.model import GPU_RESOURCE, ClusterSpec


def patch_for(node: Object, gpus: int) -> list[Object]:
    """Return the JSON patch that adds `gpus` simulated GPUs to the status of `node`.

    The patch is empty if the status already contains them.
    """
    status, key = node.get("status", {}), GPU_RESOURCE.replace("/", "~1")
    return [
        {"op": "add", "path": f"/status/{part}/{key}", "value": str(gpus)}
        for part in ("capacity", "allocatable")
        if part in status and status[part].get(GPU_RESOURCE) != str(gpus)
    ]


def reconciler(api: Api, spec: ClusterSpec) -> Reconciler:
    """Return the reconciler that adds the simulated GPUs in `spec` to the status of the nodes."""
    wanted = {node.name: node.gpus for node in spec.nodes if node.gpus}

    def step() -> None:
        for node in nodes.objects():
            name = node["metadata"]["name"]
            patch = patch_for(node, wanted[name]) if name in wanted else []
            if patch:
                path = f"/api/v1/nodes/{name}/status"
                api.request("PATCH", path, patch, content="application/json-patch+json")

    loop = Reconciler(step, "gpus")
    nodes = Mirror(api, "/api/v1/nodes", loop.wake)
    return loop
