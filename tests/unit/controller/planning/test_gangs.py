"""Tests of two gangs that compete for the place of a lost pod, with the default ``gangScheduling: none``.

kube-scheduler then places pods one by one and knows no gangs. The operator cannot prevent that it gives the place of a
deleted pod to the pending pod of another job. The limits in docs/explanation/fault-tolerance.md say what follows.
"""

from datetime import timedelta
from typing import Any

from dljob.kube import JobKey
from dljob.kube.kinds import NODE, POD, STATEFUL_SET
from dljob.reconcile.gang import START_TIMEOUT_S
from support.builders import T4
from support.controller.fake_operator import SPEC, Operator
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

Json = dict[str, Any]
STEP_S = 10.0


async def replicas(cluster: FakeCluster, key: JobKey) -> int:
    sets = await cluster.api.find(STATEFUL_SET, key[0])
    return sum(item["spec"]["replicas"] for item in sets if item["metadata"]["name"].startswith(f"{key[1]}-"))


async def pods(cluster: FakeCluster, key: JobKey) -> list[Json]:
    found = await cluster.api.find(POD, key[0])
    return sorted(
        (pod for pod in found if pod["metadata"]["name"].startswith(f"{key[1]}-")),
        key=lambda p: str(p["metadata"]["name"]),
    )


async def set_conditions(cluster: FakeCluster, pod: Json, **conditions: str) -> None:
    """Set conditions of a pod as the kubelet and the scheduler do."""
    items = [
        {"type": kind, "status": status, "reason": "Unschedulable", "message": "0/3 nodes are available"}
        for kind, status in conditions.items()
    ]
    phase = "Running" if conditions.get("Ready") == "True" else "Pending"
    name = pod["metadata"]["name"]
    await cluster.api.merge(POD, pod["metadata"]["namespace"], name, {"status": {"phase": phase, "conditions": items}})


async def later(operator: Operator, seconds: float, *keys: JobKey) -> None:
    """Let time pass, also for the operator's wall clock. Reconcile the jobs now and then."""
    for _ in range(int(seconds / STEP_S)):
        operator.now += timedelta(seconds=STEP_S)
        for key in keys:
            operator.queue.add(key)
        await operator.watch(STEP_S)


def test_place_of_a_lost_pod_may_go_to_another_gang_but_no_two_gangs_stay_incomplete() -> None:
    async def main() -> None:
        cluster = FakeCluster()
        for name in ("n1", "n2", "n3", "n4"):
            cluster.node(name, T4, 1)
        async with Operator(cluster) as operator:
            first = cluster.submit("first", **SPEC)
            await operator.watch()
            await cluster.bind(await cluster.create_pods(first), "n1", "n2")
            for pod in await pods(cluster, first):
                await set_conditions(cluster, pod, Ready="True")
            await operator.watch()
            assert operator.condition(first, "Admitted") == ("True", "Started")

            # The second gang starts on n3 and n4, and n4 is gone before its second pod is placed.
            second = cluster.submit("second", second=1, **SPEC)
            await operator.watch()
            await cluster.create_pods(second)
            placed, pending = await pods(cluster, second)
            await cluster.bind([placed], "n3")
            await set_conditions(cluster, placed, Ready="True")
            await set_conditions(cluster, pending, PodScheduled="False")
            await cluster.api.delete(NODE, None, "n4")
            await operator.watch()
            assert operator.condition(second, "Admitted") == ("True", "Starting")

            # A pod of the first gang is evicted. The scheduler gives its place to the second gang at once.
            lost = (await pods(cluster, first))[0]
            await cluster.api.delete(POD, "team-a", lost["metadata"]["name"])
            await cluster.bind([pending], "n1")
            await set_conditions(cluster, (await pods(cluster, second))[1], Ready="True")
            [replacement] = await cluster.create_pods(first)
            await set_conditions(cluster, replacement, PodScheduled="False")
            await operator.watch()
            assert operator.condition(second, "Admitted") == ("True", "Started")
            assert operator.condition(first, "PodsReady") == ("False", "Unschedulable")

            # Meanwhile, the first gang holds n2 without training. No third gang is planned there.
            third = cluster.submit("third", "team-b", second=2, **{**SPEC, "nodes": {"min": 1, "max": 1}})
            await later(operator, START_TIMEOUT_S - 4 * STEP_S, first, second, third)
            assert await replicas(cluster, first) == 2 and operator.planned(third) == "DeviceBusy"

            # After the start time-out, it releases what it holds as a whole.
            await later(operator, 8 * STEP_S, first, second, third)
            assert operator.condition(first, "Admitted") == ("False", "StartTimedOut")
            assert await replicas(cluster, first) == 0 and await replicas(cluster, second) == 2
            for pod in await pods(cluster, first):
                await cluster.api.delete(POD, "team-a", pod["metadata"]["name"])
            await later(operator, 4 * STEP_S, first, second, third)
            assert operator.planned(third) == "Planned", "n2 is free for others"

            # It starts again, with all its pods, as soon as there is room for both.
            cluster.node("n5", T4, 1)
            cluster.node("n6", T4, 1)
            await later(operator, 10 * STEP_S, first, second, third)
            assert operator.condition(first, "Admitted") == ("True", "Starting") and await replicas(cluster, first) == 2

    run(main())
