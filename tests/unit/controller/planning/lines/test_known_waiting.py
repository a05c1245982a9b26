"""Tests that jobs keep their place in the queue when another operator takes over."""

from typing import Any

import pytest

from dljob.controller.planning.answers import HEAR_S
from dljob.controller.planning.queueing import Queue
from dljob.kube import JobKey
from dljob.kube.kinds import POD
from dljob.reconcile import ParsedJob
from dljob.scheduling import QueuedJob
from support.builders import T4
from support.controller.fake_operator import SPEC, Json, Operator, on_two_nodes, run_on
from support.servers.fake_api import FakeCluster

SMALL: Json = {**SPEC, "nodes": {"min": 1, "max": 1}}
LONG: Json = {**SMALL, "epochs": 1_000_000}
"""A job on one node that takes days."""


async def waiting(cluster: FakeCluster, operator: Operator) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return a job that waits for two nodes, and one behind it for one node. Both nodes are then free, and no operator
    has noticed that."""
    running = cluster.submit("running", **SMALL)
    await operator.watch(1.0)
    await cluster.bind(await cluster.create_pods(running), "n1")
    await operator.watch(1.0)
    big, small = cluster.submit("big", second=1, **SPEC), cluster.submit("small", second=2, **LONG)
    await operator.watch()
    assert (operator.planned(big), operator.planned(small)) == ("DeviceBusy", "Queued")
    await operator.__aexit__()
    await cluster.edit(running, suspend=True)
    for pod in await cluster.api.find(POD, running[0]):
        await cluster.api.delete(POD, running[0], pod["metadata"]["name"])
    return big, small


def test_job_that_waited_is_first_for_the_next_operator() -> None:
    """Fixed bug: after a restart, the job that was reconciled first took the devices, whatever its place had been."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        big, small = await waiting(cluster, operator)
        cluster.watch(operator.cache)
        async with Operator(cluster) as successor:
            successor.queue.add(small)
            await successor.watch(2.0)
            successor.queue.add(big)
            await successor.watch(HEAR_S)
            assert (successor.planned(big), successor.planned(small)) == ("Planned", "DeviceBusy")

    on_two_nodes(body)


def test_job_that_waited_for_a_quota_is_first_for_the_next_operator() -> None:
    """Fixed bug: after a restart, a later job took the quota."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        for name in ("n3", "n4"):
            cluster.node(name, T4, 1)
        cluster.quota("team-a", {"pods": "1"}, pods="2")
        big = cluster.submit("big", second=1, **SPEC)
        await operator.watch()
        assert operator.planned(big) == "QuotaExceeded"
        await operator.__aexit__()
        cluster.quota("team-a", {"pods": "0"}, pods="2")
        small = cluster.submit("small", second=2, **LONG)
        cluster.watch(operator.cache)
        async with Operator(cluster) as successor:
            successor.queue.add(small)
            await successor.watch(2.0)
            successor.queue.add(big)
            await successor.watch(HEAR_S)
            assert (successor.planned(big), successor.planned(small)) == ("Planned", "QuotaExceeded")

    on_two_nodes(body)


def test_job_that_cannot_ask_keeps_nobody_waiting_for_long() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        _, small = await waiting(cluster, operator)
        cluster.watch(operator.cache)
        async with Operator(cluster) as successor:
            successor.queue.add(small)
            await successor.watch(HEAR_S + 2)
            assert successor.planned(small) == "Planned"

    on_two_nodes(body)


def test_a_takeover_does_not_find_all_places_again_for_each_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: the places of all waiting jobs were found before each plan, 2 s of CPU time for a thousand jobs."""
    found, each = list[JobKey](), list[int]()
    job, without_delay, place = Queue.job, Queue.without_delay, Queue.place

    def counted(self: Queue, question: ParsedJob) -> QueuedJob:
        found.append(question.observed.job.key)
        return job(self, question)

    async def planned(self: Queue, *given: Any, **more: Any) -> Any:
        found.clear()
        result = await without_delay(self, *given, **more)
        each.append(len(found))
        return result

    def placed(self: Queue, *given: Any) -> Any:
        found.clear()
        result = place(self, *given)
        each.append(len(found))
        return result

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **SMALL)
        await run_on(cluster, operator, running, "n1")
        keys = [cluster.submit(f"waits-{i}", second=1 + i, **(SPEC if i == 0 else LONG)) for i in range(20)]
        monkeypatch.setattr(Queue, "job", counted)
        monkeypatch.setattr(Queue, "without_delay", planned)
        monkeypatch.setattr(Queue, "place", placed)
        await operator.watch()
        assert [operator.planned(key) for key in keys] == ["DeviceBusy", *["Queued"] * 19]
        assert len(each) >= 38 and max(each) <= 3

    on_two_nodes(body)
