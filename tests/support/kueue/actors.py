"""Kueue as tests see it: a replayer that plays its transitions, or a real Kueue that is told to make them.

Both have the same methods, so that the same assertions hold for both.
"""

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from dljob.cluster import quantity
from support.cluster.kubectl import Kubectl, wait_for
from support.kueue import replay

Json = dict[str, Any]
DEFINITIONS = Path(__file__).with_name("crds.yaml")
PLENTY = "1000000"


class Actor:
    """One LocalQueue of a namespace, with a ClusterQueue and a ResourceFlavor of the same name."""

    replayed = True

    def __init__(self, kubectl: Kubectl, device: str) -> None:
        self.kubectl, self.queue, self.device = kubectl, kubectl.namespace, device

    def install(self) -> None:
        """Make Kueue's API and the queue available."""
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError

    def admit(self, job: str, pods: int | None = None) -> None:
        """Admit ``pods`` of the job's pods; None: all."""
        raise NotImplementedError

    def evict(self, job: str) -> None:
        raise NotImplementedError

    def deactivate(self, job: str) -> None:
        raise NotImplementedError

    def activate(self, job: str) -> None:
        self._patch(job, {"spec": {"active": True}})

    def find(self, job: str) -> Json | None:
        """Return the Workload of a job."""
        found = [
            item for item in self.kubectl.list("workloads.kueue.x-k8s.io", f"dljob.dev/job={job}")
            if "deletionTimestamp" not in item["metadata"]
        ]  # fmt: skip
        return found[0] if found else None

    def wait(self, job: str, what: str, holds: Callable[[Json], bool], deadline_s: float = 60) -> Json:
        """Wait until the Workload of a job is as ``holds`` says, and return it."""

        def probe() -> Json | None:
            found = self.find(job)
            return found if found is not None and holds(found) else None

        return wait_for(f"the Workload of {job} to be {what}", probe, deadline_s, lambda: json.dumps(self.find(job)))

    def _patch(self, job: str, patch: Json, *flags: str) -> None:
        found = self.wait(job, "there", lambda _: True)
        name = found["metadata"]["name"]
        self.kubectl.run("patch", "workloads.kueue.x-k8s.io", name, "--type=merge", "-p", json.dumps(patch), *flags)

    def _flavor(self) -> Json:
        labels = {"dljob.dev/device": self.device}
        tolerations = [{"key": "example.com/kueue", "operator": "Exists"}]
        return {"kind": "ResourceFlavor", "spec": {"nodeLabels": labels, "tolerations": tolerations}}

    def _apply(self, *objects: Json) -> None:
        for item in objects:
            self.kubectl.apply({"apiVersion": "kueue.x-k8s.io/v1beta2", "metadata": {"name": self.queue}, **item})


class Replayer(Actor):
    """Writes to Workloads what Kueue would. Its definitions are dljob's own, not Kueue's."""

    def install(self) -> None:
        documents = list(yaml.safe_load_all(DEFINITIONS.read_text()))
        self.kubectl.apply(*documents)
        names = [f"crd/{item['metadata']['name']}" for item in documents]
        self.kubectl.run("wait", "--for=condition=Established", *names)
        wait_for("flavors to be served", lambda: self._served(), 30)
        self._apply(self._flavor())

    def _served(self) -> bool:
        try:
            self.kubectl.run("get", "resourceflavors.kueue.x-k8s.io,workloads.kueue.x-k8s.io")
        except AssertionError:
            return False
        return True

    def remove(self) -> None:
        self.kubectl.run("delete", "crd", "-l", "dljob.dev/stand-in=true", "--wait=false")

    def admit(self, job: str, pods: int | None = None) -> None:
        found = self.wait(job, "without quota", lambda each: "admission" not in each.get("status", {}))
        counts = None if pods is None else {found["spec"]["podSets"][0]["name"]: pods}
        self._play(job, replay.admitted, counts, self.queue)

    def evict(self, job: str) -> None:
        self._play(job, replay.evicted, "ClusterQueueStopped", "The ClusterQueue is stopped")

    def deactivate(self, job: str) -> None:
        self._patch(job, {"spec": {"active": False}})
        self._play(job, replay.evicted, "Deactivated", "The workload is deactivated")

    def activate(self, job: str) -> None:
        super().activate(job)
        self._play(job, replay.with_condition, "Requeued", True, "Reactivated")

    def _play(self, job: str, change: Callable[..., Json], *args: Any) -> None:
        found = self.wait(job, "there", lambda _: True)
        self._patch(job, {"status": change(found, *args)["status"]}, "--subresource=status")


class RealKueue(Actor):
    """Tells a real Kueue what to do by the quota and the stop policy of a ClusterQueue."""

    replayed = False

    def install(self) -> None:
        self._apply(self._flavor())
        self._set(PLENTY, "HoldAndDrain")
        local = {"kind": "LocalQueue", "metadata": {"name": self.queue, "namespace": self.kubectl.namespace}}
        self._apply({**local, "spec": {"clusterQueue": self.queue}})

    def remove(self) -> None:
        for kind in ("clusterqueues.kueue.x-k8s.io", "resourceflavors.kueue.x-k8s.io"):
            self.kubectl.delete(kind, self.queue, "--wait=false")

    def admit(self, job: str, pods: int | None = None) -> None:
        found = self.wait(job, "without quota", lambda each: "admission" not in each.get("status", {}))
        cpu = PLENTY
        if pods is not None:
            [container] = found["spec"]["podSets"][0]["template"]["spec"]["containers"]
            cpu = f"{int(Decimal(1000) * quantity(container['resources']['requests']['cpu']) * pods)}m"
        self._set(cpu, "None")

    def evict(self, job: str) -> None:
        self._set(PLENTY, "HoldAndDrain")

    def deactivate(self, job: str) -> None:
        self._patch(job, {"spec": {"active": False}})

    def _set(self, cpu: str, stop: str) -> None:
        resources = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": f"{PLENTY}Gi"}]
        group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": self.queue, "resources": resources}]}
        spec = {"namespaceSelector": {}, "resourceGroups": [group], "stopPolicy": stop}
        self._apply({"kind": "ClusterQueue", "spec": spec})
