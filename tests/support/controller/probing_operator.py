"""The hardware probes of an operator, on an API server in memory."""

import asyncio
import copy
from datetime import UTC, datetime
from typing import Any

from dlcontract.hardware import HardwareMeasure, TimedStep
from dljob.controller.hardware_probes import HardwareProbes
from dljob.controller.metrics import Metrics
from dljob.job.plan.first_plans import FirstMeasurements
from dljob.kube import Cache
from dljob.kube.kinds import NODE, POD, PROFILE
from dljob.render import RenderConfig
from dljob.render.helpers.probe import configured
from dljob.status import Event
from support.servers.fake_api import FakeApi

MEASURE = HardwareMeasure(device="A Processor", cores=4, node_cores=4, steps=(TimedStep(net="conv", batch=24, s=0.05),))


class Operator:
    def __init__(self, *nodes: str, links: bool = False) -> None:
        self.api, self.cache = FakeApi(), Cache()
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.metrics, self.events = Metrics(), list[tuple[str, Event]]()
        self.measurements, self.ends = FirstMeasurements(lambda: self.now.timestamp()), 0
        image = configured(RenderConfig("example.org/trainer:1", "Always"), "dljob-probes")
        api: Any = self.api
        self.probes = HardwareProbes(
            api, self.cache, "dljob-system", image, lambda: self.now, self.metrics, self._record, self.measurements,
            self._ended, gpus=True, links=links,
        )  # fmt: skip
        self.bodies: dict[str, dict[str, Any]] = {}
        size = {"cpu": "4", "memory": "16Gi", "pods": "110"}
        for i, name in enumerate(nodes):
            meta = {"name": name, "uid": f"u{i}", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
            conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
            status = {"allocatable": size, "capacity": size, "conditions": conditions}
            body = {"metadata": meta | {"labels": {}}, "spec": {}, "status": status}
            self.cache.put(NODE, body)
            self.bodies[name] = body

    async def _record(self, node: str, event: Event, now: datetime) -> None:
        self.events.append((node, event))

    def _ended(self) -> None:
        self.ends += 1

    def count(self, result: str) -> float:
        """Return how many probes have ended with a result."""
        return self.metrics.registry.get_sample_value("dljob_operator_hardware_probes_total", {"result": result}) or 0

    def upgrade(self, name: str, kernel: str, driver: str = "") -> None:
        """Let a node report a kernel and a driver."""
        labels = {"nvidia.com/cuda.driver-version.full": driver} if driver else {}
        body = copy.deepcopy(self.bodies[name])
        body["metadata"]["labels"] = labels
        body["status"]["nodeInfo"] = {"kernelVersion": kernel}
        self.cache.put(NODE, body)

    def look(self) -> list[dict[str, Any]]:
        self.api.created = self.now.isoformat()
        asyncio.run(self.probes.look())
        return [body for (plural, _, _), body in self.api.objects.items() if plural == POD.plural]

    def end(self, message: str, phase: str = "Succeeded") -> None:
        for (plural, _, _), body in self.api.objects.items():
            if plural == POD.plural:
                ended = {"terminated": {"message": message, "exitCode": int(phase == "Failed")}}
                body["status"] = {"phase": phase, "containerStatuses": [{"name": "probe", "state": ended}]}

    @property
    def profiles(self) -> list[dict[str, Any]]:
        return [body for (plural, _, _), body in self.api.objects.items() if plural == PROFILE.plural]
