"""Jobs that train on a fake cluster whose devices are assigned to all jobs together (``queue.assignment: Together``)."""

from collections.abc import Awaitable, Callable
from typing import Any

import dlcontract
from dljob.cluster import ClusterView
from dljob.controller.planning.parsed_objects import Profiles
from dljob.job.plan.stored import StoredPlan
from dljob.kube import JobKey
from dljob.kube.kinds import CONFIG_MAP, POD, STATEFUL_SET
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from support.controller.fake_operator import SPEC, Json, Operator
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

A100 = "NVIDIA-A100-SXM4-80GB"
LONG: Json = {
    **SPEC, "model": {"name": "resnet18"}, "dataset": {"name": "synthetic-images"}, "globalBatchSize": 256,
    "epochs": 1_000_000, "nodes": {"min": 1, "max": 1}, "checkpoint": {"volume": {"claimName": "data"}},
}  # fmt: skip
OTHER: Json = {**LONG, "seed": 1}
"""Options are stored by spec."""
SHORT: Json = {**LONG, "epochs": 1000}
Body = Callable[[FakeCluster, Operator], Awaitable[None]]


def together(nodes: dict[str, str], body: Body, *, gpus: int = 1, on: bool = True, preempts: bool = False) -> None:
    """Run a test on nodes with ``gpus`` each. ``nodes``: name → device type."""

    async def main() -> None:
        cluster = FakeCluster()
        for name, device in nodes.items():
            cluster.node(name, device, gpus)
        for namespace in ("team-a", "team-b"):
            cluster.claim("data", "ReadWriteMany", namespace)
        async with Operator(cluster, together=on, preempts=preempts) as operator:
            await body(cluster, operator)

    run(main())


async def plan_of(cluster: FakeCluster, key: JobKey) -> StoredPlan:
    return StoredPlan.parse((await cluster.api.get(CONFIG_MAP, key[0], f"{key[1]}-plan"))["data"])


async def devices_of(cluster: FakeCluster, key: JobKey) -> dict[str, int]:
    return {group.device: group.nodes * group.ranks_per_node for group in (await plan_of(cluster, key)).groups}


def gains(**factors: float) -> Callable[[Operator], None]:
    """Return a function that lets the A100 shorten the plans of each job by a factor, relative to the T4."""

    def apply(operator: Operator) -> None:
        before = operator.planning._planner

        async def planner(question: ParsedJob, view: ClusterView, profiles: Profiles) -> StoredPlan | Infeasible:
            found = await before(question, view, profiles)
            factor = factors.get(question.observed.job.name)
            if factor is None or not isinstance(found, StoredPlan):
                return found
            fast = any(group.device == A100 for group in found.groups)
            predicted = found.status.predicted.model_copy(update={"total_seconds": 1e6 / (factor if fast else 1.0)})
            return found.model_copy(update={"status": found.status.model_copy(update={"predicted": predicted})})

        operator.planning._planner = planner

    return apply


async def train(cluster: FakeCluster, operator: Operator, key: JobKey, *nodes: str, **fields: Any) -> None:
    """Let the pods of a planned job start and train."""
    pods = await cluster.create_pods(key)
    await cluster.bind(pods, *nodes)
    for pod in await cluster.api.find(POD, key[0]):
        if pod["metadata"]["name"].startswith(f"{key[1]}-"):
            ready = [{"type": "Ready", "status": "True"}]
            status = {"phase": "Running", "conditions": ready}
            await cluster.api.merge(POD, key[0], pod["metadata"]["name"], {"status": status})
    await operator.watch(2.0)
    stored = await plan_of(cluster, key)
    plan, predicted = stored.plan, stored.status.predicted
    beside_s = predicted.evaluation_seconds + predicted.checkpoint_seconds + predicted.fetch_seconds
    steps = round((predicted.total_seconds - beside_s) / plan.expected.step_s)
    report = dlcontract.Report(
        uid=plan.uid, plan_number=plan.number, plan_digest=plan.digest(), term=plan.term,
        phase=dlcontract.RunPhase.RUNNING, unix_s=operator.now.timestamp(), world_size=len(plan.ranks),
        step=500, step_s=plan.expected.step_s,
        last_checkpoint={"step": 490, "unix_s": operator.now.timestamp()}, steps=steps, **fields,
    )  # fmt: skip
    await cluster.api.merge(CONFIG_MAP, key[0], f"{key[1]}-report", {"data": {dlcontract.REPORT_KEY: report.to_json()}})
    await operator.watch(2.0)


async def long_then_short(cluster: FakeCluster, operator: Operator) -> tuple[JobKey, JobKey]:
    """Let a long job train, submit a short one, and wait for the next assignment. Return their keys."""
    first = cluster.submit("first", **LONG)
    await operator.watch(2.0)
    await train(cluster, operator, first, "n1")
    second = cluster.submit("second", second=1, **SHORT)
    await operator.watch(45.0)
    return first, second


async def remove_pods(cluster: FakeCluster, operator: Operator, key: JobKey, seconds: float = 3.0) -> None:
    """Delete the pods of a job, and let the operator run for so many ``seconds``."""
    for pod in await cluster.api.find(POD, key[0]):
        if pod["metadata"]["name"].startswith(f"{key[1]}-"):
            await cluster.api.delete(POD, key[0], pod["metadata"]["name"])
    await operator.watch(seconds)


async def replicas(cluster: FakeCluster, key: JobKey) -> int:
    sets = await cluster.api.find(STATEFUL_SET, key[0])
    return sum(item["spec"]["replicas"] for item in sets if item["metadata"]["name"].startswith(f"{key[1]}-"))
