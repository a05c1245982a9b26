"""Fake nodes with a kubelet that only reports that pods are ready: real scheduling without containers.

Tests take the trainer's part and write its report.
"""

import asyncio
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Self

from dljob.controller.connection import connect
from dljob.kube import Api, ApiError, Cache, JobKey
from dljob.kube.kinds import NODE, POD, Kind
from dljob.kube.watch import Reflector

POLL_S = 0.1
"""Seconds between two looks at the pods that the watch has shown, which take no request."""
HEARTBEAT_S = 4.0


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class PodBodies(Cache):
    """The pods of all nodes, as the API server sends them to a ``Reflector``."""

    def __init__(self) -> None:
        super().__init__()
        self.by_uid: dict[str, Mapping[str, Any]] = {}

    def put(self, kind: Kind, body: Mapping[str, Any]) -> bool:
        self.by_uid[body["metadata"]["uid"]] = body
        return True

    def drop(self, kind: Kind, namespace: str, name: str, uid: str | None = None) -> bool:
        return self.by_uid.pop(str(uid), None) is not None

    def prune(
        self, kind: Kind, present: Iterable[str], before: int | None, namespace: str | None = None
    ) -> list[JobKey]:
        for uid in self.by_uid.keys() - set(present):
            del self.by_uid[uid]
        return []


class HollowNodes:
    """Nodes ``<prefix>-0`` to ``<prefix>-<count-1>``, alive between ``start`` and ``stop``.

    Jobs that request ``device`` are scheduled only on them. ``gpus``: number of devices on each; 0: they are CPU nodes.
    """

    def __init__(self, prefix: str, count: int, device: str, gpus: int = 0) -> None:
        self.device, self._gpus = device, gpus
        self.names = [f"{prefix}-{i}" for i in range(count)]
        self.unpullable: set[str] = set()
        """Names of pods whose image cannot be pulled."""
        self.unready: set[str] = set()
        """Names of nodes whose kubelet reports that they are not ready."""
        self.conditions: dict[str, dict[str, str]] = {}
        """Name of a node → type and status of its conditions besides Ready."""
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._bodies = PodBodies()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._session: Any = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._thread.start()
        self._call(self._begin())
        self._task = asyncio.run_coroutine_threadsafe(self._live(), self._loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        wait([self._task], 30)
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def remove(self, name: str) -> None:
        """Remove the machine and its Node object, as a cloud provider does."""
        self.names.remove(name)
        self._call(self._api.delete(NODE, None, name))

    def add(self, name: str) -> None:
        """Add a machine and its Node object."""
        self._call(self._create(name))
        self.names.append(name)
        self._call(self._beat())

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _begin(self) -> None:
        connection = connect()
        self._session = connection.session()
        self._api = Api(self._session, connection.server)
        # A list for each node at each look took 26 requests a second for three nodes.
        reflector = Reflector(self._api, self._bodies, POD, None, "", lambda kind, body: None, lambda job: None)
        self._watch = asyncio.create_task(reflector.run())
        for name in self.names:
            await self._create(name)
        await self._beat()
        await reflector.synced.wait()

    async def _create(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name, "dljob.dev/device": self.device}
        # Only pods that request the device are scheduled here, and no daemons of the cluster.
        taints = [{"key": "dljob.dev/hollow", "value": "true", "effect": "NoSchedule"}]
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "spec": {"taints": taints},
        }
        await self._api.create(NODE, body)

    async def _end(self) -> None:
        for name in self.names:
            for pod in await self._api.find(POD, None, fieldSelector=f"spec.nodeName={name}"):
                await self._remove(pod)
            await self._api.delete(NODE, None, name)
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        await self._session.close()

    async def _live(self) -> None:
        beat = 0.0
        while not self._ending.is_set():
            if self._loop.time() - beat > HEARTBEAT_S:
                beat = self._loop.time()
                await self._beat()
            for pod in self._pods():
                try:
                    await self._run_pod(pod)
                except ApiError as error:
                    if not (error.not_found or error.conflict):
                        raise
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), POLL_S)

    async def _beat(self) -> None:
        size = {"cpu": "32", "memory": "64Gi", "ephemeral-storage": "100Gi", "pods": "100"}
        size |= {"nvidia.com/gpu": str(self._gpus)} if self._gpus else {}
        for name in list(self.names):
            unready = name in self.unready
            ready = {
                "type": "Ready", "status": str(not unready), "reason": "KubeletNotReady" if unready else "KubeletReady",
                "message": "hollow", "lastHeartbeatTime": _now(),
                "lastTransitionTime": f"2026-01-01T00:00:0{int(unready)}Z",
            }  # fmt: skip
            more = [{"type": kind, "status": value} for kind, value in self.conditions.get(name, {}).items()]
            status = {"capacity": size, "allocatable": size, "conditions": [ready, *more]}
            try:
                await self._api.merge(NODE, None, name, {"status": status}, subresource="status")
            except ApiError as error:
                if not error.not_found:
                    raise

    def _pods(self) -> list[Mapping[str, Any]]:
        """Return the pods on these nodes that the watch has shown."""
        return [pod for pod in self._bodies.by_uid.values() if pod["spec"].get("nodeName") in self.names]

    async def _run_pod(self, pod: Mapping[str, Any]) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            await self._remove(pod)
        elif pod["metadata"]["name"] in self.unpullable:
            await self._write_status(pod, ready=False)
        elif (pod.get("status") or {}).get("phase") not in ("Running", "Failed"):  # A test has evicted the pod.
            await self._write_status(pod, ready=True)

    async def _remove(self, pod: Mapping[str, Any]) -> None:
        meta = pod["metadata"]
        await self._api.delete(POD, meta["namespace"], meta["name"], uid=meta["uid"], grace_s=0)

    async def _write_status(self, pod: Mapping[str, Any], *, ready: bool) -> None:
        image = pod["spec"]["containers"][0]["image"]
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}}
        container = {
            "name": "trainer", "image": image, "imageID": "", "ready": ready, "restartCount": 0, "lastState": {},
            "state": {"running": {"startedAt": _now()}} if ready else waiting,
        }  # fmt: skip
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": _now()}
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": _now()}
        status = {
            "phase": "Running" if ready else "Pending",
            "conditions": [scheduled, condition],
            "containerStatuses": [container],
        }
        old = pod.get("status") or {}
        if old.get("phase") == status["phase"] and old.get("containerStatuses"):
            return
        meta = pod["metadata"]
        # With the version, a late watch does not undo what a test has written.
        patch = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": status}
        await self._api.merge(POD, meta["namespace"], meta["name"], patch, subresource="status")
