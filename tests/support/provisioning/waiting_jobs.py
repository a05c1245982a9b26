"""Jobs of an operator that asks an autoscaler for their nodes with ProvisioningRequests, on a ``FakeCluster``."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from dljob.cluster.templates import NodeTemplates
from dljob.kube import JobKey
from dljob.kube.kinds import STATEFUL_SET
from support.builders import A100, CONFIG, T4, nodes
from support.controller.fake_operator import SPEC, Operator
from support.provisioning.autoscaler import CLASS, Autoscaler
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

Json = dict[str, Any]
TIMEOUT_S = 600.0
NEW: Json = {"name": "new", "count": 2, "device": T4, "devices": 1, "cpu": 16, "memory": "64Gi"}
OTHER: Json = {"name": "other", "count": 2, "device": A100, "devices": 1, "cpu": 16, "memory": "64Gi"}
Body = Callable[[FakeCluster, Operator, Autoscaler], Awaitable[None]]


def with_templates(*templates: Json, on: bool = True) -> Any:
    found = NodeTemplates(nodes(*templates).nodes, TIMEOUT_S)
    return replace(CONFIG, node_templates=found, provisioning_class=CLASS if on else "")


def on_no_nodes(body: Body, *templates: Json, on: bool = True) -> None:
    """Run a test on a cluster without nodes, whose autoscaler can add those of the templates. ``on``: with requests."""

    async def main() -> None:
        cluster = FakeCluster()
        cluster.api.created = cluster.now.isoformat()
        async with Operator(cluster, config=with_templates(*(templates or (NEW,)), on=on)) as operator:
            await body(cluster, operator, Autoscaler(cluster))

    run(main())


async def later(cluster: FakeCluster, operator: Operator, seconds: float, *keys: JobKey) -> None:
    """Let time pass, and then reconcile the jobs."""
    operator.now += timedelta(seconds=seconds)
    cluster.now = operator.now
    cluster.api.created = cluster.now.isoformat()
    await operator.watch(1.0)
    for key in keys:
        operator.queue.add(key)
    await operator.watch()


async def sets(cluster: FakeCluster) -> list[Json]:
    return await cluster.api.find(STATEFUL_SET, "team-a")


async def waiting(cluster: FakeCluster, operator: Operator, **spec: Any) -> JobKey:
    """Submit a job that waits for its nodes."""
    key = cluster.submit("first", **{**SPEC, **spec})
    await later(cluster, operator, 1.0, key)
    assert operator.condition(key, "Admitted") == ("False", "WaitingForNodes")
    return key
