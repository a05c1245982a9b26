"""Tests of preemption: the first in line gets the devices of jobs of a lower priority, which wait and continue."""

from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from dljob.kube import JobKey
from dljob.kube.kinds import DLJOB, NODE, POD, PRIORITY_CLASS
from dljob.scheduling import PROTECTED_S
from support.builders import T4
from support.controller.fake_operator import SPEC, Json, Operator, on_two_nodes
from support.controller.shared_devices import remove_pods, replicas
from support.servers.fake_api import FakeCluster

BOTH: Json = {**SPEC, "epochs": 1_000_000, "checkpoint": {"volume": {"claimName": "data"}}}
"""A job that needs both nodes for days, and writes checkpoints."""
ONE: Json = {**BOTH, "nodes": {"min": 1, "max": 1}}
Body = Callable[[FakeCluster, Operator], Awaitable[None]]


def urgent(spec: Json, name: str = "urgent") -> Json:
    return {**spec, "scheduling": {"priorityClassName": name}}


def preempting(body: Body) -> None:
    """Run a test with preemption on two nodes, with the classes urgent (1000) and polite (1000, preempts nobody)."""

    async def prepared(cluster: FakeCluster, operator: Operator) -> None:
        for namespace in ("team-a", "team-b"):
            cluster.claim("data", "ReadWriteMany", namespace)
        cluster.priority_class("urgent", 1000)
        meta = {"name": "polite"}
        cluster.api._store(PRIORITY_CLASS, {"metadata": meta, "value": 1000, "preemptionPolicy": "Never"})
        await body(cluster, operator)

    on_two_nodes(prepared, preempts=True)


async def run_on(cluster: FakeCluster, operator: Operator, key: JobKey, *nodes: str) -> None:
    """Start the pods of a planned job."""
    await operator.watch(1.0)
    assert operator.planned(key) == "Planned"
    await cluster.bind(await cluster.create_pods(key), *nodes)
    await operator.watch(1.0)


async def status(cluster: FakeCluster, key: JobKey) -> Json:
    found: Json = (await cluster.api.get(DLJOB, *key))["status"]
    return found


def reason(found: Json, kind: str) -> str | None:
    return next((str(c["reason"]) for c in found.get("conditions") or () if c["type"] == kind), None)


def test_low_job_stops_the_urgent_one_runs_and_the_low_one_continues() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        low = cluster.submit("low", **BOTH)
        await run_on(cluster, operator, low, "n1", "n2")
        high = cluster.submit("high", second=1, **urgent(BOTH))
        await operator.watch(15.0)
        found = await status(cluster, low)
        assert await replicas(cluster, low) == 0 and reason(found, "Preempted") == "Preempted"
        assert found["preemptions"] == 1 and "job high with priority 1000" in operator.message(low, "Preempted")
        assert operator.planned(high) == "MakingRoom" and "1 jobs of a lower priority" in operator.message(
            high, "Planned"
        )
        await remove_pods(cluster, operator, low, 15.0)
        await run_on(cluster, operator, high, "n1", "n2")
        assert await replicas(cluster, low) == 0 and operator.planned(low) == "DeviceBusy"
        await cluster.edit(high, suspend=True)
        await operator.watch(2.0)
        await remove_pods(cluster, operator, high, 15.0)
        await run_on(cluster, operator, low, "n1", "n2")
        found = await status(cluster, low)
        assert reason(found, "Preempted") == "Resumed" and await replicas(cluster, low) == 2
        await operator.watch(30.0)
        assert await replicas(cluster, low) == 2 and found["preemptions"] == 1
        assert operator.metrics.registry.get_sample_value("dljob_operator_preemptions_total") == 1.0

    preempting(body)


def test_forecast_counts_devices_of_a_stopping_job_as_nearly_free() -> None:
    """Fixed bug: the job for which another one stopped was predicted to start days later, when that would have ended."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        low = cluster.submit("low", **BOTH)
        await run_on(cluster, operator, low, "n1", "n2")
        high = cluster.submit("high", second=1, **urgent(BOTH))
        await operator.watch(90.0)  # The pods of the other job take long to write their checkpoint.
        assert reason(await status(cluster, low), "Preempted") == "Preempted"
        found = operator.planning.outlook(high)
        assert found is not None and found.latest is not None
        assert found.latest - operator.now < timedelta(minutes=1)

    preempting(body)


def test_job_is_preempted_on_a_node_with_room_for_one_pod_whose_other_devices_are_free() -> None:
    """Fixed bug: nothing counted as free on a node with its maximum of pods, also after the last of them has stopped."""

    def fixed(nodes: int, ranks: int) -> Json:
        group = {"device": T4, "nodes": nodes, "ranksPerNode": ranks, "batchPerRank": 64 // (nodes * ranks)}
        return {**ONE, "nodes": {"min": nodes, "max": nodes}, "planning": {"mode": "Fixed", "groups": [group]}}

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        for node in ("n1", "n2"):
            allocatable = {"nvidia.com/gpu": "2", "pods": "1"}
            await cluster.api.merge(NODE, None, node, {"status": {"allocatable": allocatable}})
        low = cluster.submit("low", **fixed(1, 1))
        await run_on(cluster, operator, low, "n1")
        high = cluster.submit("high", second=1, **urgent(fixed(2, 2)))
        await operator.watch(15.0)
        assert await replicas(cluster, low) == 0 and operator.planned(high) == "MakingRoom"
        await remove_pods(cluster, operator, low, 15.0)
        await run_on(cluster, operator, high, "n1", "n2")

    preempting(body)


@pytest.mark.parametrize(
    ("victim", "waiting"),
    [
        (urgent(BOTH), urgent(BOTH)),
        (BOTH, urgent(BOTH, "polite")),
        ({**BOTH, "scheduling": {"disruption": "Avoid"}}, urgent(BOTH)),
        (SPEC, urgent(BOTH)),
        ({**BOTH, "epochs": 1}, urgent(BOTH)),
        (BOTH, urgent({**BOTH, "nodes": {"min": 3, "max": 3}})),
    ],
    ids=["equal priority", "policy Never", "Avoid", "no checkpoints", "ends soon", "no room on the whole cluster"],
)
def test_jobs_that_are_not_preempted(victim: Json, waiting: Json) -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **victim)
        await run_on(cluster, operator, running, "n1", "n2")
        high = cluster.submit("high", second=1, **waiting)
        await operator.watch(30.0)
        assert await replicas(cluster, running) == 2 and operator.planned(high) != "MakingRoom"

    preempting(body)


def test_without_the_setting_no_job_is_preempted() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.claim("data", "ReadWriteMany")
        cluster.priority_class("urgent", 1000)
        low = cluster.submit("low", **BOTH)
        await run_on(cluster, operator, low, "n1", "n2")
        high = cluster.submit("high", second=1, **urgent(BOTH))
        await operator.watch(30.0)
        assert await replicas(cluster, low) == 2 and operator.planned(high) == "DeviceBusy"

    on_two_nodes(body)


def test_only_the_job_that_loses_least_stops() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        jobs = [cluster.submit(name, second=i, **ONE) for i, name in enumerate(("fresh", "old"))]
        await operator.watch(1.0)
        for key, node in zip(jobs, ("n1", "n2"), strict=True):
            await cluster.bind(await cluster.create_pods(key), node)
        await operator.watch(1.0)
        progress = {"step": 5000, "steps": 10**9, "percent": 0}
        await cluster.api.merge(DLJOB, *jobs[1], {"status": {"progress": progress}})
        high = cluster.submit("high", second=3, **urgent(ONE))
        await operator.watch(15.0)
        assert [await replicas(cluster, key) for key in jobs] == [0, 1]
        assert operator.planned(high) == "MakingRoom"

    preempting(body)


def test_only_jobs_on_nodes_that_the_urgent_job_may_use_stop() -> None:
    """The job on the other node would lose less."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        await cluster.api.merge(NODE, None, "n2", {"metadata": {"labels": {"zone": "b"}}})
        await operator.watch(1.0)
        jobs = [cluster.submit(name, second=i, **ONE) for i, name in enumerate(("fresh", "old"))]
        await operator.watch(1.0)
        for key, node in zip(jobs, ("n1", "n2"), strict=True):
            await cluster.bind(await cluster.create_pods(key), node)
        await operator.watch(1.0)
        await cluster.api.merge(DLJOB, *jobs[1], {"status": {"progress": {"step": 5000, "steps": 10**9, "percent": 0}}})
        placed = {"priorityClassName": "urgent", "nodeSelector": {"zone": "b"}}
        high = cluster.submit("high", second=3, **{**ONE, "scheduling": placed})
        await operator.watch(15.0)
        assert [await replicas(cluster, key) for key in jobs] == [1, 0]
        assert operator.planned(high) == "MakingRoom"

    preempting(body)


def test_search_that_finds_nothing_is_not_repeated_at_once() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        low = cluster.submit("low", "team-b", **ONE)
        await run_on(cluster, operator, low, "n1")
        equal = cluster.submit("equal", "team-b", second=1, **urgent(ONE))
        await run_on(cluster, operator, equal, "n2")
        cluster.submit("high", second=2, **urgent(BOTH))
        await operator.watch(15.0)
        operator.asked.clear()
        await operator.watch(40.0)
        assert operator.asked == []
        await operator.watch(40.0)
        assert operator.asked

    preempting(body)


def test_other_namespaces_do_not_learn_names() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        low = cluster.submit("low", "team-b", **BOTH)
        await run_on(cluster, operator, low, "n1", "n2")
        cluster.submit("secret-project", second=1, **urgent(BOTH))
        await operator.watch(15.0)
        message = operator.message(low, "Preempted")
        assert "a job of another namespace" in message and "secret" not in message and "team-a" not in message

    preempting(body)


def test_freed_devices_go_to_nobody_else() -> None:
    """A small job would fit as soon as the first pod is gone."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        low = cluster.submit("low", **BOTH)
        await run_on(cluster, operator, low, "n1", "n2")
        high = cluster.submit("high", second=1, **urgent(BOTH))
        await operator.watch(15.0)
        small = cluster.submit("small", second=2, **ONE)
        pods = [pod["metadata"]["name"] for pod in await cluster.api.find(POD, "team-a")]
        await cluster.api.delete(POD, "team-a", pods[0])
        await operator.watch(15.0)
        assert (operator.planned(high), operator.planned(small)) == ("MakingRoom", "Queued")
        await cluster.api.delete(POD, "team-a", pods[1])
        await operator.watch(15.0)
        assert operator.planned(high) == "Planned" and operator.planned(small) != "Planned"
        assert reason(await status(cluster, low), "Preempted") == "Preempted"

    preempting(body)


def test_job_that_resumed_is_protected_for_a_time() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        low = cluster.submit("low", **BOTH)
        await run_on(cluster, operator, low, "n1", "n2")
        high = cluster.submit("high", second=1, **urgent(BOTH))
        await operator.watch(15.0)
        await cluster.api.delete(DLJOB, *high)
        await remove_pods(cluster, operator, low, 15.0)
        await run_on(cluster, operator, low, "n1", "n2")
        again = cluster.submit("again", second=2, **urgent(BOTH))
        await operator.watch(30.0)
        assert await replicas(cluster, low) == 2 and operator.planned(again) == "DeviceBusy"
        operator.now += timedelta(seconds=PROTECTED_S + 1)
        await operator.watch(30.0)
        assert await replicas(cluster, low) == 0 and (await status(cluster, low))["preemptions"] == 2

    preempting(body)


def test_message_does_not_promise_room_after_the_other_job_has_resumed() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        low = cluster.submit("low", **BOTH)
        await run_on(cluster, operator, low, "n1", "n2")
        high = cluster.submit("high", second=1, **urgent(BOTH))
        await operator.watch(15.0)
        await cluster.edit(high, suspend=True)
        await remove_pods(cluster, operator, low, 15.0)
        await run_on(cluster, operator, low, "n1", "n2")
        await cluster.edit(high, suspend=False)
        await operator.watch(30.0)
        assert operator.planned(high) == "DeviceBusy" and await replicas(cluster, low) == 2

    preempting(body)


def test_next_operator_does_not_start_the_stopping_job_again() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        low = cluster.submit("low", **BOTH)
        await run_on(cluster, operator, low, "n1", "n2")
        high = cluster.submit("high", second=1, **urgent(BOTH))
        await operator.watch(15.0)
        await operator.__aexit__()
        async with Operator(cluster, preempts=True) as following:
            for key in (low, high):
                following.queue.add(key)
            await following.watch(15.0)
            assert await replicas(cluster, low) == 0 and (await status(cluster, low))["preemptions"] == 1
            await remove_pods(cluster, following, low, 15.0)
            assert following.planned(high) == "Planned"

    preempting(body)


def test_quota_that_the_urgent_job_would_exceed_saves_the_others() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        low = cluster.submit("low", "team-b", **BOTH)
        await run_on(cluster, operator, low, "n1", "n2")
        cluster.quota("team-a", {"requests.nvidia.com/gpu": "0"}, **{"requests.nvidia.com/gpu": "1"})
        await operator.watch(1.0)
        cluster.submit("high", second=1, **urgent(BOTH))
        await operator.watch(30.0)
        assert await replicas(cluster, low) == 2

    preempting(body)


def test_job_stops_that_uses_the_quota_of_the_urgent_one_although_another_would_lose_less() -> None:
    """Fixed bug: only the cheapest jobs were considered. Their quota was another one, so the urgent job waited on."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        gpu = "requests.nvidia.com/gpu"
        cluster.quota("team-a", {gpu: "0"}, **{gpu: "1"})
        jobs = [cluster.submit("mine", **ONE), cluster.submit("other", "team-b", second=1, **ONE)]
        await operator.watch(1.0)
        for key, node in zip(jobs, ("n1", "n2"), strict=True):
            await cluster.bind(await cluster.create_pods(key), node)
        cluster.quota("team-a", {gpu: "1"}, **{gpu: "1"})
        await operator.watch(1.0)
        await cluster.api.merge(DLJOB, *jobs[0], {"status": {"progress": {"step": 5000, "steps": 10**9, "percent": 0}}})
        high = cluster.submit("high", second=3, **urgent(ONE))
        await operator.watch(15.0)
        assert [await replicas(cluster, key) for key in jobs] == [0, 1]
        assert operator.planned(high) == "MakingRoom"

    preempting(body)


def test_urgent_job_gets_the_quota_of_a_low_one_although_devices_are_free() -> None:
    """Fixed bug: no job stopped for one that waited for a quota alone."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        for name in ("n3", "n4", "n5", "n6"):
            cluster.node(name, T4, 1)
        jobs = [cluster.submit("low", **BOTH), cluster.submit("elsewhere", "team-b", second=1, **BOTH)]
        await operator.watch(1.0)
        for key, nodes in zip(jobs, (("n1", "n2"), ("n3", "n4")), strict=True):
            await cluster.bind(await cluster.create_pods(key), *nodes)
        cluster.quota("team-a", {"pods": "2"}, pods="3")
        await operator.watch(1.0)
        high = cluster.submit("high", second=2, **urgent(BOTH))
        await operator.watch(15.0)
        assert [await replicas(cluster, key) for key in jobs] == [0, 2] and operator.planned(high) == "MakingRoom"
        for pod in await cluster.api.find(POD, "team-a"):
            await cluster.api.delete(POD, "team-a", pod["metadata"]["name"])
        await operator.watch(1.0)  # The quota controller has not counted yet that they are gone.
        cluster.quota("team-a", {"pods": "0"}, pods="3")
        await operator.watch(15.0)
        assert operator.planned(high) == "Planned" and operator.planned(jobs[0]) == "QuotaExceeded"
        assert [await replicas(cluster, key) for key in (*jobs, high)] == [0, 2, 2]

    preempting(body)


def test_job_whose_priority_class_vanished_runs_on_and_is_no_victim() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("batch", 10)
        low = cluster.submit("low", **urgent(BOTH, "batch"))
        await run_on(cluster, operator, low, "n1", "n2")
        await cluster.api.delete(PRIORITY_CLASS, "", "batch")
        await operator.watch(1.0)
        operator.queue.add(low)
        cluster.submit("high", second=1, **urgent(BOTH))
        await operator.watch(30.0)
        assert await replicas(cluster, low) == 2
        assert reason(await status(cluster, low), "PriorityClassFound") == "PriorityClassNotFound"

    preempting(body)


def test_job_that_waits_for_its_priority_class_reserves_nothing() -> None:
    """Fixed bug: it reserved both nodes for pods that the API server rejects."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        await operator.watch(1.0)
        lost = cluster.submit("lost", **urgent(BOTH, "gone"))
        await operator.watch(5.0)
        assert operator.planned(lost) is None and "'gone'" in operator.message(lost, "PriorityClassFound")
        other = cluster.submit("other", second=1, **BOTH)
        await operator.watch(5.0)
        assert operator.planned(other) == "Planned"
        await cluster.api.delete(DLJOB, *other)
        cluster.priority_class("gone", 5)
        await operator.watch(30.0)
        assert operator.planned(lost) == "Planned"

    preempting(body)
