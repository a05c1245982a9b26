"""Nodes, pods of others, jobs and their trainers on a control plane without machines. One client in one event loop.

KWOK reports that pods run. This module acts as the users, who create jobs, and as the trainers, who write reports.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import yaml

import dlcontract
from devcluster.paths import REPOSITORY
from dljob.kube import Api, ApiError
from dljob.kube.kinds import CONFIG_MAP, DLJOB, NODE, POD, SERVICE_ACCOUNT, STATEFUL_SET, Kind

Json = dict[str, Any]
Key = tuple[str, str]
NAMESPACE = Kind("v1", "Namespace", "namespaces", namespaced=False)
CRD = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False)
AT_ONCE = 32
TRAINERS = 4
JOB_LABEL = "dljob.dev/job"
STEPS = 1000


def node(name: str, device: str, gpus: int = 0, bandwidth: str = "") -> Json:
    """Return a node of 64 CPUs and 256 GiB, as KWOK expects it. ``bandwidth``: bytes/s of its network; "": unknown."""
    size = {"cpu": "64", "memory": "256Gi", "pods": "250", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    labels = {"kubernetes.io/hostname": name, "dljob.dev/device": device}
    annotations = {"kwok.x-k8s.io/node": "fake"}
    if bandwidth:
        annotations["dljob.dev/network-bandwidth"] = bandwidth
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "status": {"allocatable": size, "capacity": size},
    }


def foreign_pod(name: str, on: str, cpu: str = "100m") -> Json:
    """Return a pod of another application that is already placed on a node."""
    resources = {"requests": {"cpu": cpu, "memory": "128Mi"}}
    container = {"name": "main", "image": "example.invalid/other:1", "resources": resources}
    spec = {"nodeName": on, "containers": [container], "automountServiceAccountToken": False}
    labels = {"app.kubernetes.io/name": "other"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "others", "labels": labels},
        "spec": spec,
    }


def job(key: Key, pods: int, device: str) -> Json:
    spec = {
        "model": {"name": "digits-cnn"},
        "dataset": {"name": "digits"},
        "globalBatchSize": 16 * pods,
        "epochs": 5,
        "nodes": {"min": pods, "max": pods},
        "devices": [device],
        "resources": {"cpu": "500m", "memory": "1Gi"},
        "checkpoint": {"enabled": False},
    }
    metadata = {"name": key[1], "namespace": key[0]}
    return {"apiVersion": DLJOB.api_version, "kind": "DLJob", "metadata": metadata, "spec": spec}


async def all_of(calls: Iterable[Callable[[], Awaitable[Any]]], at_once: int = AT_ONCE) -> None:
    """Run all calls, at most ``at_once`` at the same time. Raise the first error."""
    pending = iter(calls)

    async def work() -> None:
        for call in pending:
            await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())


@dataclass
class Seen:
    """Monotonic times in seconds, and the last status of one job."""

    created_s: float
    children_s: float | None = None
    """When the first StatefulSet of the job was seen."""
    status: Json = field(default_factory=dict)
    status_s: float | None = None
    """When its first status was seen."""


class SimulatedJobs:
    """The jobs of a run. ``run`` watches them and acts as their trainers until it is cancelled."""

    def __init__(self, api: Api, pods: int) -> None:
        self._api, self._pods = api, pods
        self.seen: dict[Key, Seen] = {}
        self._to_report: asyncio.Queue[Key] = asyncio.Queue()
        self._reported: set[Key] = set()
        self._plans: dict[Key, dlcontract.Plan] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(follow(self._api, DLJOB, "", self._on_job))
            group.create_task(follow(self._api, STATEFUL_SET, JOB_LABEL, self._on_set))
            for _ in range(TRAINERS):
                group.create_task(self._train())

    async def create(self, key: Key, device: str) -> None:
        self.seen[key] = Seen(time.monotonic())
        await self._api.create(DLJOB, job(key, self._pods, device))

    async def create_at(self, keys: list[Key], device: str, rate: float) -> None:
        """Create jobs, ``rate`` a second, without waiting for the answers."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for i, key in enumerate(keys):
                await asyncio.sleep(max(0.0, began + i / rate - time.monotonic()))
                group.create_task(self.create(key, device))

    async def until(self, what: str, holds: Callable[[], bool], deadline_s: float) -> None:
        """Wait until ``holds()`` is true. It is asked after each change of a job."""
        try:
            async with asyncio.timeout(deadline_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
                    await asyncio.sleep(0.05)  # changes come in bursts
        except TimeoutError:
            phases: dict[str, int] = {}
            for each in self.seen.values():
                phase = str(each.status.get("phase"))
                phases[phase] = phases.get(phase, 0) + 1
            raise SystemExit(f"{what}: not within {deadline_s:g} s; jobs by phase: {phases}") from None

    def count(self, keys: Iterable[Key], phase: str) -> int:
        return sum(self.seen[key].status.get("phase") == phase for key in keys)

    async def report(self, key: Key, phase: dlcontract.RunPhase, **changes: Any) -> None:
        """Write a report as the coordinator of a job does."""
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = await plan_of(self._api, key)
        await write_report(self._api, key, plan, phase, **{"step": 10, "steps": STEPS, "step_s": 0.01, **changes})

    async def finish(self, keys: list[Key]) -> None:
        """Write the reports of success of these jobs."""
        outcome = dlcontract.Outcome(steps=STEPS, seconds=10.0, loss=0.1, accuracy=0.98)
        done = dlcontract.RunPhase.SUCCEEDED
        await all_of(partial(self.report, key, done, step=STEPS, outcome=outcome) for key in keys)

    async def reaction_s(self, key: Key, step: int, deadline_s: float = 30.0) -> float:
        """Write a report with this step. Return the seconds until the status of the job has it."""
        began = time.monotonic()
        await self.report(key, dlcontract.RunPhase.RUNNING, step=step, loss=0.5)

        def shown() -> bool:
            return bool((self.seen[key].status.get("progress") or {}).get("step") == step)

        try:
            async with asyncio.timeout(deadline_s):
                while not shown():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return float("inf")
        return time.monotonic() - began

    async def _train(self) -> None:
        while True:
            key = await self._to_report.get()
            await self.report(key, dlcontract.RunPhase.RUNNING)

    def _on_job(self, body: Json) -> None:
        meta = body["metadata"]
        seen = self.seen.get(key := (meta["namespace"], meta["name"]))
        if seen is None or not (status := body.get("status")):
            return
        seen.status = status
        seen.status_s = seen.status_s or time.monotonic()
        if status.get("ready") == f"{self._pods}/{self._pods}" and key not in self._reported:
            self._reported.add(key)
            self._to_report.put_nowait(key)
        self._changed.set()

    def _on_set(self, body: Json) -> None:
        meta = body["metadata"]
        seen = self.seen.get((meta["namespace"], meta["labels"][JOB_LABEL]))
        if seen is not None and seen.children_s is None:
            seen.children_s = time.monotonic()
            self._changed.set()


async def follow(api: Api, kind: Kind, selector: str, handle: Callable[[Json], None]) -> None:
    """Call ``handle`` with each new or changed object of a kind, in all namespaces, until cancelled."""
    page = await api.page(kind, None, selector, 1, "")
    version = page["metadata"]["resourceVersion"]
    while True:
        async for line in api.watch(kind, None, selector, version, 3000, 3000):
            event = json.loads(line)
            if event["type"] == "ERROR":
                raise SystemExit(f"the watch of {kind.plural} broke: {event['object']}")
            version = event["object"]["metadata"]["resourceVersion"]
            if event["type"] in ("ADDED", "MODIFIED"):
                handle(event["object"])


async def plan_of(api: Api, key: Key) -> dlcontract.Plan:
    """Return the plan in force of a job."""
    found = await api.get(CONFIG_MAP, key[0], f"{key[1]}-plan")
    return dlcontract.Plan.parse(found["data"][dlcontract.PLAN_KEY])


async def write_report(api: Api, key: Key, plan: dlcontract.Plan, phase: dlcontract.RunPhase, **fields: Any) -> None:
    """Write a report as the coordinator of a job does."""
    report = dlcontract.Report(
        uid=plan.uid, plan_number=plan.number, plan_digest=plan.digest(), term=plan.term, phase=phase,
        unix_s=time.time(), world_size=len(plan.ranks), **fields,
    )  # fmt: skip
    await api.merge(CONFIG_MAP, key[0], f"{key[1]}-report", {"data": {dlcontract.REPORT_KEY: report.to_json()}})


def crds() -> list[Json]:
    """Return the CustomResourceDefinitions of this repository."""
    return [yaml.safe_load(path.read_text()) for path in sorted((REPOSITORY / "crds").glob("*.yaml"))]


async def set_up(api: Api, crds: list[Json], nodes: list[Json], foreign: list[Json], namespaces: list[str]) -> None:
    """Create CRDs, namespaces, nodes and pods of others. Wait until KWOK runs these pods."""
    names = [*namespaces, "others"]
    bodies = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in names]
    for kind, objects in ((CRD, crds), (NAMESPACE, bodies), (NODE, nodes)):
        await all_of(partial(api.create, kind, body) for body in objects)
    for crd in crds:
        await _until_found(partial(_established, api, crd["metadata"]["name"]))
    for name in names:
        await _until_found(partial(api.get, SERVICE_ACCOUNT, name, "default"))
    await all_of(partial(api.create, POD, body) for body in foreign)
    end_s, whole = time.monotonic() + 30 + len(foreign) / 20, Api(api.session, api.server, max_nbytes=inf)
    while await whole.find(POD, "others", fieldSelector="status.phase=Pending"):
        if time.monotonic() > end_s:
            raise SystemExit("pods of others: found some Pending; expected KWOK to run all. See its log")
        await asyncio.sleep(1.0)


async def _established(api: Api, name: str) -> None:
    found = await api.get(CRD, None, name)
    conditions = (found.get("status") or {}).get("conditions") or ()
    if not any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
        raise ApiError(404, "NotFound", f"{name} is not established")
    await api.find(DLJOB, None)


async def _until_found(get: Callable[[], Awaitable[Any]]) -> None:
    end_s = time.monotonic() + 60.0
    while True:
        try:
            await get()
            return
        except ApiError as error:
            if not error.not_found or time.monotonic() > end_s:
                raise
        await asyncio.sleep(0.2)


async def delete_foreign(api: Api, name: str) -> None:
    """Delete a pod of others at once."""
    pod = await api.get(POD, "others", name)
    await api.delete(POD, "others", name, uid=pod["metadata"]["uid"], grace_s=0)
