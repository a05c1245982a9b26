"""Kubelets and coordinators of jobs on a fake cluster: pods start, training advances with time, and jobs end."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import dlcontract
from dljob.job.plan.pod_groups import PodGroup
from dljob.kube import JobKey
from dljob.kube.kinds import CONFIG_MAP, POD, STATEFUL_SET
from support.builders import NOW
from support.controller.fake_operator import Json, Operator
from support.controller.shared_devices import plan_of
from support.servers.fake_api import FakeCluster
from support.virtual_time import now_s

REPORT_S = 10.0


@dataclass
class Training:
    """How far a job is. ``steps``: of the whole training, on every plan alike."""

    steps: int
    step: float = 0.0
    reported_s: float = 0.0


@dataclass
class SimulatedPool:
    """``nodes``: name → (device type, number of devices)."""

    cluster: FakeCluster
    operator: Operator
    nodes: dict[str, tuple[str, int]]
    begun_s: float = field(default_factory=now_s)
    placed: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    """Namespace and name of each pod on a node → (node, number of devices)."""
    jobs: dict[JobKey, Training | None] = field(default_factory=dict)
    """The submitted jobs; None before their first step."""
    ended: set[JobKey] = field(default_factory=set)
    broken: set[JobKey] = field(default_factory=set)
    """Jobs whose pods never run, because their image cannot be pulled."""

    def __post_init__(self) -> None:
        for name, (device, count) in self.nodes.items():
            self.cluster.node(name, device, count)

    def submit(self, name: str, namespace: str, **spec: Any) -> JobKey:
        key = self.cluster.submit(name, namespace, second=len(self.jobs), **spec)
        self.jobs[key] = None
        return key

    @property
    def elapsed_s(self) -> float:
        return now_s() - self.begun_s

    @property
    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.elapsed_s)

    def free(self) -> dict[str, int]:
        """Return the number of free devices of each node."""
        used = [*self.placed.values()]
        return {name: count - sum(n for node, n in used if node == name) for name, (_, count) in self.nodes.items()}

    def holds(self, key: JobKey) -> bool:
        return any(namespace == key[0] and pod.startswith(f"{key[1]}-") for namespace, pod in self.placed)

    async def run(self, seconds: float = 1.0) -> None:
        """Let everything go on for some seconds."""
        self.operator.now = self.cluster.now = self.now
        for key in self.jobs.keys() - self.ended:
            await self._run_pods(key, seconds)
        await self.operator.watch(seconds)

    async def _run_pods(self, key: JobKey, seconds: float) -> None:
        pods, sets = [self.cluster.api.of_job(kind, key) for kind in (POD, STATEFUL_SET)]
        wanted = sum(item["spec"]["replicas"] for item in sets)
        if not wanted:
            for pod in pods:
                await self.cluster.api.delete(POD, key[0], pod["metadata"]["name"])
                self.placed.pop((key[0], pod["metadata"]["name"]), None)
            job = self.operator.cache.job(key)
            if job is not None and job.status.get("phase") in ("Complete", "Failed") and not pods:
                self.ended.add(key)
            return
        stored = await plan_of(self.cluster, key)
        pods += await self.cluster.create_pods(key)
        for pod in pods:
            await self._place(key, pod, {group.name: group for group in stored.groups})
        if (
            len(pods) == wanted
            and key not in self.broken
            and all((key[0], pod["metadata"]["name"]) in self.placed for pod in pods)
        ):
            step_s = stored.plan.expected.step_s
            made = self.jobs[key] or Training(round(stored.status.predicted.total_seconds / step_s))
            self.jobs[key] = made
            made.step = min(float(made.steps), made.step + seconds / step_s)
            await self._report(key, stored.plan, made)

    async def _place(self, key: JobKey, pod: Json, groups: dict[str, PodGroup]) -> None:
        """Bind a pod to a node with enough free devices of its group's type, if there is one, and start it."""
        name, group = pod["metadata"]["name"], groups.get(pod["metadata"]["labels"]["dljob.dev/group"])
        if group is None or (key[0], name) in self.placed:
            return
        count, free = group.ranks_per_node, self.free()
        fitting = [node for node, (device, _) in self.nodes.items() if device == group.device and free[node] >= count]
        if fitting:
            self.placed[key[0], name] = fitting[0], count
            await self.cluster.bind([pod], fitting[0])
            conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
            status = {"phase": "Running", "conditions": conditions}
            if key in self.broken:
                waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
                status = {"phase": "Pending", "containerStatuses": [{"name": "trainer", "state": {"waiting": waiting}}]}
            await self.cluster.api.merge(POD, key[0], name, {"status": status})

    async def _report(self, key: JobKey, plan: dlcontract.Plan, made: Training) -> None:
        over = made.step >= made.steps
        if not over and self.elapsed_s - made.reported_s < REPORT_S:
            return
        made.reported_s = self.elapsed_s
        step, unix_s = int(made.step), self.now.timestamp()
        report = dlcontract.Report(
            uid=plan.uid, plan_number=plan.number, plan_digest=plan.digest(), term=plan.term,
            phase=dlcontract.RunPhase.SUCCEEDED if over else dlcontract.RunPhase.RUNNING, unix_s=unix_s,
            world_size=len(plan.ranks), step=step, steps=made.steps, step_s=plan.expected.step_s,
            last_checkpoint={"step": step, "unix_s": unix_s},
            outcome=dlcontract.Outcome(steps=made.steps, seconds=self.elapsed_s) if over else None,
        )  # fmt: skip
        data = {dlcontract.REPORT_KEY: report.to_json()}
        await self.cluster.api.merge(CONFIG_MAP, key[0], f"{key[1]}-report", {"data": data})
