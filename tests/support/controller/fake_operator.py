"""A controller with its planning on a ``FakeCluster``, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from dljob.cluster import ClusterView
from dljob.controller.controller import Controller
from dljob.controller.metrics import Metrics
from dljob.controller.planning.answers import DEFAULT_POLICY, PlanningError
from dljob.controller.planning.background import Planning
from dljob.controller.planning.parsed_objects import Profiles
from dljob.controller.work_queue import WorkQueue
from dljob.job.plan.first_plans import FirstMeasurements
from dljob.job.plan.stored import StoredPlan
from dljob.kube import Cache, JobKey, Kube, NodeFaults, PlanKeySecret, WarningEvents
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.reconcile.planning.make_plan import decide
from dljob.render import RenderConfig
from dljob.scheduling import QueuePolicy
from dljob.status.pace import ProgressPace
from support.builders import CONFIG, NOW, T4
from support.servers.fake_api import FakeCluster
from support.virtual_time import now_s, run

Json = dict[str, Any]
SPEC: Json = {
    "model": {"name": "digits-cnn"},
    "dataset": {"name": "digits"},
    "globalBatchSize": 64,
    "epochs": 5,
    "nodes": {"min": 2, "max": 2},
    "checkpoint": {"enabled": False},
}
"""A job that needs both nodes of the cluster."""
SMALL: Json = {**SPEC, "nodes": {"min": 1, "max": 1}}
LONG: Json = {**SMALL, "epochs": 1_000_000}
"""A job on one node that takes days."""


async def planned_here(
    question: ParsedJob, view: ClusterView, profiles: Profiles, config: RenderConfig = CONFIG
) -> StoredPlan | Infeasible:
    return decide(replace(question, observed=replace(question.observed, view=view, learned=profiles)), config)


class Operator:
    """A controller whose workers run until nothing is left to do."""

    def __init__(
        self,
        cluster: FakeCluster,
        policy: QueuePolicy = DEFAULT_POLICY,
        *,
        preempts: bool = False,
        together: bool = False,
        config: RenderConfig = CONFIG,
        pace: ProgressPace | None = None,
    ) -> None:
        """``preempts``: jobs of a higher priority may stop others. ``together``: as of ``Planning``."""
        self.now, self.config = NOW, config
        self.cluster, self.cache, self.asked = cluster, Cache(now=lambda: NOW), list[JobKey]()
        self.queue: WorkQueue[JobKey] = WorkQueue()
        self.breaks: JobKey | None = None
        """Job for which planning fails."""
        self.hangs: JobKey | None = None
        """Job for which planning does not end."""
        self.error: Exception = PlanningError("the process that makes plans ended")
        api: Any = cluster.api
        self.plan_key = PlanKeySecret(api, "dljob-system", "plan-key", self.cache.plans)
        self.kube, self.metrics = Kube(api, self.cache, 600.0, plan_key=self.plan_key), Metrics()
        cluster.listed(self.cache)
        self.measurements = FirstMeasurements(now_s)
        self.planning = Planning(
            self.cache, self._plan, self.queue.add, self.metrics, now_s, lambda: self.now,
            policy=replace(policy, preempts=preempts), together=together, measurements=self.measurements,
        )  # fmt: skip
        self.controller = Controller(
            self.kube, self.cache, WarningEvents(api), self.queue, config, self.metrics, self.planning, lambda: self.now,
            node_faults=NodeFaults(api, self.cache, "dljob-system", "node-faults", None),
            pace=pace or ProgressPace(1000.0, now_s),
        )  # fmt: skip

    async def _plan(self, question: ParsedJob, view: ClusterView, profiles: Profiles) -> StoredPlan | Infeasible:
        self.asked.append(question.observed.job.key)
        if question.observed.job.key == self.breaks:
            raise self.error
        while question.observed.job.key == self.hangs:
            await asyncio.sleep(1.0)
        return await planned_here(question, view, profiles, self.config)

    async def __aenter__(self) -> "Operator":
        await self.plan_key.load()
        self._tasks = [asyncio.create_task(self.controller.work()) for _ in range(4)]
        self._tasks.append(asyncio.create_task(self.planning.run()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def watch(self, seconds: float = 3.0) -> None:
        """Let watch events arrive and the operator react to them, for some seconds."""
        for _ in range(int(seconds / 0.5)):
            for key in self.cluster.watch(self.cache):
                self.queue.add(key)
            self.planning.capacity_changed()
            await asyncio.sleep(0.5)

    def planned(self, key: JobKey) -> str | None:
        """Return the reason of the condition Planned."""
        found = self._condition(key, "Planned")
        return None if found is None else str(found["reason"])

    def message(self, key: JobKey, kind: str) -> str:
        """Return the message of a condition."""
        found = self._condition(key, kind)
        assert found is not None
        return str(found["message"])

    def condition(self, key: JobKey, kind: str) -> tuple[str, str] | None:
        """Return the status and the reason of a condition."""
        found = self._condition(key, kind)
        return None if found is None else (found["status"], found["reason"])

    def _condition(self, key: JobKey, kind: str) -> Json | None:
        job = self.cache.job(key)
        assert job is not None
        return next((c for c in job.status.get("conditions") or () if c["type"] == kind), None)


def on_two_nodes(
    test: Callable[[FakeCluster, Operator], Awaitable[None]],
    policy: QueuePolicy = DEFAULT_POLICY,
    *,
    preempts: bool = False,
    config: RenderConfig = CONFIG,
) -> None:
    """Run a test on a cluster with two nodes, each with one GPU. ``preempts``: as of ``Operator``."""

    async def main() -> None:
        cluster = FakeCluster()
        for name in ("n1", "n2"):
            cluster.node(name, T4, 1)
        async with Operator(cluster, policy, preempts=preempts, config=config) as operator:
            await test(cluster, operator)

    run(main())


async def run_on(cluster: FakeCluster, operator: Operator, key: JobKey, *nodes: str) -> None:
    """Start the pods of a planned job."""
    await operator.watch(1.0)
    assert operator.planned(key) == "Planned"
    await cluster.bind(await cluster.create_pods(key), *nodes)
    await operator.watch(1.0)
