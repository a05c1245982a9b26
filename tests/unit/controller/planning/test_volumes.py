"""Tests of the operator with jobs whose volumes only some nodes can mount."""

from collections.abc import Awaitable, Callable
from typing import Any

from dljob.kube.kinds import NODE, VOLUME
from support.builders import T4
from support.controller.fake_operator import SPEC, Operator
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

Json = dict[str, Any]
LABEL = "disks.example.com/zone"
DATA: Json = {"uri": "pvc://data/train.npz", "samples": 1000, "sampleBytes": 256}
ON_ONE: Json = {**SPEC, "dataset": DATA, "nodes": {"min": 1, "max": 1}}


def in_two_zones(test: Callable[[FakeCluster, Operator], Awaitable[None]], a: int = 1, b: int = 2) -> None:
    """Run a test on a cluster with ``a`` nodes in zone a and ``b`` nodes in zone b, each with one GPU."""

    async def main() -> None:
        cluster = FakeCluster()
        for zone, count in (("a", a), ("b", b)):
            for i in range(count):
                cluster.node(f"{zone}{i}", T4, 1, **{LABEL: zone})
        async with Operator(cluster) as operator:
            await test(cluster, operator)

    run(main())


def test_job_starts_when_its_claim_is_where_there_are_nodes() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.claim("data", "ReadWriteMany", node_label=(LABEL, "c"))
        key = cluster.submit("zonal", **ON_ONE)
        await operator.watch()
        assert operator.planned(key) == "VolumeNodeConflict"
        assert "pv-data" in operator.message(key, "Planned")
        cluster.claim("data", "ReadWriteMany", node_label=(LABEL, "b"))
        await operator.watch()
        for waiting in operator.cache.waiting_for_volumes({VOLUME}):
            operator.queue.add(waiting)
        await operator.watch()
        assert operator.planned(key) == "Planned"

    in_two_zones(body)


def test_job_starts_when_a_node_comes_that_can_mount_its_volume() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.claim("data", "ReadWriteMany", node_label=(LABEL, "c"))
        key = cluster.submit("zonal", **ON_ONE)
        await operator.watch()
        cluster.node("c0", T4, 1, **{LABEL: "c"})
        await operator.watch()
        assert operator.planned(key) == "Planned"

    in_two_zones(body)


def test_accepted_plan_reserves_nodes_where_its_volume_is() -> None:
    """Otherwise, the second job would be planned on the only node of the zone, which the first needs."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.claim("data", "ReadWriteMany", node_label=(LABEL, "b"))
        first = cluster.submit("first", **ON_ONE)
        await operator.watch()
        second, third = (cluster.submit(name, second=i + 1, **ON_ONE) for i, name in enumerate(("second", "third")))
        anywhere = cluster.submit("anywhere", second=3, **{**SPEC, "nodes": {"min": 2, "max": 2}})
        await operator.watch()
        assert operator.planned(first) == operator.planned(anywhere) == "Planned"
        assert operator.planned(second) == operator.planned(third) == "DeviceBusy"

    in_two_zones(body, a=2, b=1)


def test_operator_without_permission_to_read_volumes_plans_with_all_nodes() -> None:
    """The scheduler then finds the conflict, as before."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.claim("data", "ReadWriteMany")  # Its volume is not in the cache.
        key = cluster.submit("zonal", **ON_ONE)
        await operator.watch()
        assert operator.planned(key) == "Planned"

    in_two_zones(body)


def test_nodes_in_the_zone_may_be_too_few_now_and_enough_later() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.claim("data", "ReadWriteMany", node_label=(LABEL, "a"))
        key = cluster.submit("zonal", **{**ON_ONE, "nodes": {"min": 2, "max": 2}})
        await operator.watch()
        assert operator.planned(key) == "VolumeNodeConflict"
        assert "of the 3 nodes" in operator.message(key, "Planned") and "1 match" in operator.message(key, "Planned")
        cluster.node("a9", T4, 1, **{LABEL: "a"})
        await operator.watch()
        assert operator.planned(key) == "Planned"
        assert len([name for plural, _, name in cluster.api.objects if plural == NODE.plural]) == 4

    in_two_zones(body)
