"""Tests that a job waits only for those before it that may use the same devices, and that these do not hide others."""

from collections.abc import Awaitable, Callable

import pytest

from dljob.kube import JobKey
from support.builders import T4
from support.controller.fake_operator import SPEC, Json, Operator
from support.controller.shared_devices import A100, remove_pods, replicas
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

Body = Callable[[FakeCluster, Operator], Awaitable[None]]
SAVES: Json = {**SPEC, "epochs": 1_000_000, "checkpoint": {"volume": {"claimName": "data"}}}


def on(device: str, nodes: int, *, priority: str = "", **more: object) -> Json:
    """Return the spec of a job that takes days on nodes with one device type."""
    scheduling = {"scheduling": {"priorityClassName": priority}} if priority else {}
    return {**SAVES, "devices": [device], "nodes": {"min": nodes, "max": nodes}, **scheduling, **more}


def two_pools() -> FakeCluster:
    """Return two nodes with a T4 and one with an A100."""
    cluster = FakeCluster()
    for name, device in (("n1", T4), ("n2", T4), ("a1", A100)):
        cluster.node(name, device, 1)
    cluster.claim("data", "ReadWriteMany")
    cluster.priority_class("urgent", 1000)
    cluster.priority_class("high", 500)
    return cluster


def behind_another_pool(body: Body, *, preempts: bool = False, together: bool = False) -> None:
    """Run a test on two nodes with a T4 and one with an A100, for which an urgent job waits, the first in line.

    An equally urgent job uses the A100 for days.
    """

    async def main() -> None:
        cluster = two_pools()
        async with Operator(cluster, preempts=preempts, together=together) as operator:
            await start(cluster, operator, cluster.submit("holder", **on(A100, 1, priority="urgent")), "a1")
            first = cluster.submit("first", second=1, **on(A100, 1, priority="urgent"))
            await operator.watch(5.0)
            assert operator.planned(first) == "DeviceBusy"
            await body(cluster, operator)

    run(main())


async def start(cluster: FakeCluster, operator: Operator, key: JobKey, *nodes: str) -> None:
    await operator.watch(5.0)
    assert operator.planned(key) == "Planned"
    await cluster.bind(await cluster.create_pods(key), *nodes)
    await operator.watch(1.0)


def test_large_job_is_not_overtaken_because_another_waits_for_other_devices() -> None:
    """Fixed bug: only the first of all jobs had a shadow reservation, also of those that use other devices."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        await start(cluster, operator, cluster.submit("runs", second=2, **on(T4, 1)), "n1")
        large = cluster.submit("large", second=3, **on(T4, 2))
        await operator.watch(5.0)
        assert operator.planned(large) == "DeviceBusy"
        small = cluster.submit("small", second=4, **on(T4, 1))
        await operator.watch(5.0)
        assert operator.planned(small) == "Queued"

    behind_another_pool(body)


def test_job_of_any_devices_still_leaves_them_to_those_before_it() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        await start(cluster, operator, cluster.submit("runs", second=2, **on(T4, 1)), "n1")
        any_device = cluster.submit("any", second=3, **{**SAVES, "nodes": {"min": 1, "max": 1}})
        await operator.watch(5.0)
        assert operator.planned(any_device) == "Planned", "on n2, which the first in line cannot use"

    behind_another_pool(body)


@pytest.mark.parametrize("together", [False, True])
def test_job_stops_for_the_first_of_its_pool(together: bool) -> None:
    """Fixed bug: no job stopped for any other while the first of all jobs could get no room."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        low = cluster.submit("low", second=2, **on(T4, 2))
        await start(cluster, operator, low, "n1", "n2")
        high = cluster.submit("next", second=3, **on(T4, 2, priority="high"))
        await operator.watch(30.0)
        assert await replicas(cluster, low) == 0 and operator.planned(high) == "MakingRoom"
        small = cluster.submit("small", second=4, **on(T4, 1))
        await remove_pods(cluster, operator, low, 15.0)
        assert operator.planned(high) == "Planned" and operator.planned(small) != "Planned"

    behind_another_pool(body, preempts=True, together=together)


def test_jobs_stop_for_the_first_of_each_pool() -> None:
    """The pods of the first job that stops take long to write their checkpoint."""

    async def main() -> None:
        cluster = two_pools()
        async with Operator(cluster, preempts=True) as operator:
            lows = [cluster.submit("low-a100", **on(A100, 1)), cluster.submit("low-t4", second=1, **on(T4, 2))]
            for key, nodes in zip(lows, (("a1",), ("n1", "n2")), strict=True):
                await start(cluster, operator, key, *nodes)
            waiting = [
                cluster.submit("first", second=2, **on(A100, 1, priority="urgent")),
                cluster.submit("next", second=3, **on(T4, 2, priority="high")),
            ]
            await operator.watch(45.0)
            assert [await replicas(cluster, key) for key in lows] == [0, 0]
            assert [operator.planned(key) for key in waiting] == ["MakingRoom", "MakingRoom"]

    run(main())
