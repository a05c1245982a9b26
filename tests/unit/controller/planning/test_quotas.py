"""Tests that plans fit the quotas of their namespaces, and that jobs wait for a quota only as long as it is in the way."""

from collections.abc import Awaitable, Callable
from typing import Any

from dljob.kube.kinds import QUOTA, STATEFUL_SET
from support.builders import T4
from support.controller.fake_operator import SPEC, Operator
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

Json = dict[str, Any]


def on_six_nodes(test: Callable[[FakeCluster, Operator], Awaitable[None]]) -> None:
    """Run a test on a cluster in which only a quota can prevent two jobs from running."""

    async def main() -> None:
        cluster = FakeCluster()
        for i in range(6):
            cluster.node(f"n{i}", T4, 1)
        async with Operator(cluster) as operator:
            await test(cluster, operator)

    run(main())


def test_two_plans_do_not_both_count_on_the_same_quota() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", pods="3")
        keys = [cluster.submit(f"job-{i}", **SPEC) for i in range(2)]
        elsewhere = cluster.submit("other", "team-b", **SPEC)
        await operator.watch()
        assert sorted(str(operator.planned(key)) for key in keys) == ["Planned", "QuotaExceeded"]
        assert operator.planned(elsewhere) == "Planned", "the quota of another namespace does not concern it"

    on_six_nodes(body)


def test_created_pods_count_once() -> None:
    """They are in the quota's usage, and no longer reserved."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", pods="4")
        first = cluster.submit("first", **SPEC)
        await operator.watch()
        await cluster.create_pods(first)
        cluster.quota("team-a", {"pods": "2"}, pods="4")
        await operator.watch()
        second = cluster.submit("second", **SPEC)
        await operator.watch()
        assert operator.planned(second) == "Planned"

    on_six_nodes(body)


def test_job_waits_for_its_quota_and_starts_when_that_grows() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", pods="1")
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        assert operator.planned(key) == "QuotaExceeded"
        questions = len(operator.asked)
        await operator.watch(30)
        assert len(operator.asked) == questions, "nothing has changed"
        cluster.quota("team-a", pods="2")
        await operator.watch()
        assert operator.planned(key) == "Planned"

    on_six_nodes(body)


def test_job_starts_when_usage_falls() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", {"pods": "5"}, pods="5")
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        assert operator.planned(key) == "QuotaExceeded"
        cluster.quota("team-a", {"pods": "4"}, pods="5")
        await operator.watch()
        assert operator.planned(key) == "QuotaExceeded", "it needs two pods"
        cluster.quota("team-a", {"pods": "3"}, pods="5")
        await operator.watch()
        assert operator.planned(key) == "Planned"

    on_six_nodes(body)


def test_job_starts_without_the_quota() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", pods="0")
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        assert operator.planned(key) == "QuotaExceeded"
        await cluster.api.delete(QUOTA, "team-a", "full")
        await operator.watch()
        assert operator.planned(key) == "Planned"

    on_six_nodes(body)


def test_own_pods_do_not_count_against_a_new_plan() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", pods="2")
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        pods = await cluster.create_pods(key)
        await cluster.bind(pods, "n0", "n1")
        cluster.quota("team-a", {"pods": "2"}, pods="2")
        await operator.watch()
        await cluster.edit(key, epochs=6)
        await operator.watch()
        assert operator.planned(key) == "Planned"

    on_six_nodes(body)


def test_quota_below_what_runs_stops_nothing() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", pods="2")
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        await cluster.bind(await cluster.create_pods(key), "n0", "n1")
        await operator.watch()
        cluster.quota("team-a", {"pods": "2"}, pods="1")
        await operator.watch(10)
        assert operator.planned(key) == "Planned"
        [created] = await cluster.api.find(STATEFUL_SET, "team-a")
        assert created["spec"]["replicas"] == 2

    on_six_nodes(body)
