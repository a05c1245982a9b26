"""An API server whose pods run at once: hardware probes end with a document, and others serve."""

import asyncio
from typing import Any

from dlcontract.hardware import DiskRate, HardwareMeasure, LinkRate, MemoryRate, TimedStep
from dljob.kube.kinds import NODE, POD
from support.servers.fake_api import FakeApi

MEASURE = HardwareMeasure(
    device="A Processor",
    cores=4,
    node_cores=4,
    steps=(TimedStep(net="conv", batch=24, s=0.05), TimedStep(net="wide-dense", batch=128, s=0.05)),
    memory=(MemoryRate(Bps=9e9), MemoryRate(cores=4, Bps=2e10)),
    disk=DiskRate(read_Bps=2e9, write_Bps=1e9, direct=True),
    near=LinkRate(latency_s=1e-6, Bps=4e9),
    background_cores=0.31,
    notes=("a note",),
)


class Kubelet(FakeApi):
    """An API server whose pods run at once, and end with ``message``."""

    def __init__(self, message: str, phase: str = "Succeeded") -> None:
        super().__init__()
        self.message, self.phase, self.started = message, phase, list[str]()

    async def create(self, kind: Any, body: Any) -> Any:
        self.started.append(body["metadata"]["name"])
        return await super().create(kind, body)

    async def get(self, kind: Any, namespace: str | None, name: str) -> Any:
        found = await super().get(kind, namespace, name)
        if kind is POD and "peer" in name:
            return found | {"status": {"phase": "Running", "podIP": "10.0.0.7"}}
        ended = {"message": self.message, "exitCode": int(self.phase == "Failed")}
        statuses = [{"name": "probe", "state": {"terminated": ended}}]
        return found | {"status": {"phase": self.phase, "containerStatuses": statuses}} if kind is POD else found

    async def apply(self, kind: Any, body: Any, subresource: str = "", **options: Any) -> Any:
        if subresource:  # A server-side apply removes fields that it lacks.
            self.objects[kind.plural, "", body["metadata"]["name"]].pop("status", None)
        return await super().apply(kind, body, subresource, **options)

    async def find(self, kind: Any, namespace: str | None, **_: str) -> Any:
        return await super().find(kind, namespace)  # the fake has no selectors of fields that differ

    @property
    def pods(self) -> list[str]:
        return [name for plural, _, name in self.objects if plural == "pods" and name.startswith("dljob-probe")]


def node(name: str, device: str = "plain", cpu: str = "4") -> dict[str, Any]:
    size = {"cpu": cpu, "memory": "16Gi", "pods": "110"}
    status = {"allocatable": size, "capacity": size, "conditions": [{"type": "Ready", "status": "True"}]}
    labels = {"dljob.dev/device": device, "kubernetes.io/hostname": name}
    return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}


OPERATOR = {
    "metadata": {"namespace": "dljob-system", "name": "operator-1", "labels": {"app.kubernetes.io/name": "dljob"}},
    "spec": {
        "containers": [
            {
                "name": "operator",
                "env": [
                    {"name": "DLJOB_WATCH_NAMESPACES", "value": ""},
                    {"name": "DLJOB_TRAINER_IMAGE", "value": "example.org/trainer:1"},
                    {"name": "DLJOB_JOB_DEFAULTS", "value": '{"trainer": {"imagePullSecrets": ["pull"]}}'},
                ],
            }
        ]
    },
}


def cluster(message: str, phase: str = "Succeeded") -> Kubelet:
    api = Kubelet(message, phase)

    async def fill() -> None:
        for name in ("a", "b"):
            await FakeApi.create(api, NODE, node(name))
        await FakeApi.create(api, POD, OPERATOR)

    asyncio.run(fill())
    return api
