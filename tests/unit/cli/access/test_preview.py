"""Tests of the state of a cluster that ``dljob plan`` and ``Client.plan`` use."""

import asyncio
from typing import Any

from dljob.client import preview
from dljob.kube.kinds import NODE, POD, Kind


def pod(name: str, job: str, namespace: str = "team-a") -> dict[str, Any]:
    resources = {"requests": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}}
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": name, "labels": {"dljob.dev/job": job}},
        "spec": {"nodeName": "n1", "containers": [{"name": "trainer", "resources": resources}]},
        "status": {"phase": "Running"},
    }


class Server:
    """An API server with one node of four GPUs, and pods of three jobs on it."""

    async def find(self, kind: Kind, namespace: str | None, **_: str) -> list[dict[str, Any]]:
        allocatable = {"cpu": "8", "memory": "32Gi", "pods": "110", "nvidia.com/gpu": "4"}
        labels = {"nvidia.com/gpu.product": "Tesla-T4"}
        status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]}
        node = {"metadata": {"name": "n1", "labels": labels}, "spec": {}, "status": status}
        pods = [pod("mine-0", "mine"), pod("other-0", "other"), pod("b-mine-0", "mine", "team-b")]
        return {NODE: [node], POD: pods}.get(kind, [])


def test_devices_of_the_job_itself_count_as_free() -> None:
    """Fixed bug: no plan was possible for the changed manifest of a job that used all devices (DeviceBusy)."""
    state = asyncio.run(preview.observe(Server()))
    free = {name: state.of_job("team-a", name).view.nodes[0].free_devices for name in ("new", "mine", "other")}
    assert free == {"new": 1, "mine": 2, "other": 2}
    assert state.of_job("team-a", "mine").view.nodes[0].free_cpu == 6
