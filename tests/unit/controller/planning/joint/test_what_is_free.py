"""An assignment counts each device once, and jobs use what others cannot use now."""

from datetime import timedelta
from typing import Any

import pytest

from dljob.kube import JobKey
from dljob.kube.kinds import NODE
from support.builders import NOW, T4
from support.controller.fake_operator import Operator
from support.controller.shared_devices import LONG, OTHER, SHORT, devices_of, remove_pods, replicas, together, train
from support.servers.fake_api import FakeCluster

BRIEF = {**SHORT, "seed": 4, "epochs": 20}
FOUR = {f"n{i}": T4 for i in range(1, 5)}


def of_high_priority(nodes: int) -> dict[str, Any]:
    scheduling = {"priorityClassName": "high"}
    return {**SHORT, "seed": 3, "nodes": {"min": nodes, "max": nodes}, "scheduling": scheduling}


def part(operator: Operator, key: JobKey) -> int | None:
    share = operator.planning._assigning.of(key)
    return None if share is None or share.part is None else share.part.devices


def test_a_job_without_a_part_starts_where_it_delays_nobody() -> None:
    """Fixed bug: the part of a job that had to wait for others was kept free for hours."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("high", 100)
        runs = cluster.submit("runs", **{**SHORT, "nodes": {"min": 1, "max": 2}})
        await operator.watch(2.0)
        await train(cluster, operator, runs, "n1", "n2")
        wide = cluster.submit("wide", second=1, **of_high_priority(4))
        await operator.watch(4.0)
        brief = cluster.submit("brief", second=2, **BRIEF)
        await operator.watch(30.0)
        assert operator.condition(wide, "Planned") == ("False", "DeviceBusy")
        assert operator.condition(brief, "Planned") == ("True", "Planned")

    together(FOUR, body)


def test_devices_of_a_job_with_a_fixed_size_count_once() -> None:
    """Fixed bug: a job on three nodes had no options, and its devices counted as free."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("high", 100)
        three = cluster.submit("three", **{**LONG, "nodes": {"min": 3, "max": 3}})
        await operator.watch(2.0)
        await train(cluster, operator, three, "n1", "n2", "n3")
        cluster.submit("two", second=1, **of_high_priority(2))
        await operator.watch(3.0)
        brief = cluster.submit("brief", second=2, **BRIEF)
        await operator.watch(14.0)
        assert (part(operator, three), part(operator, brief)) == (3, 1)
        assert operator.condition(brief, "Planned") == ("True", "Planned")

    together(FOUR, body)


def test_devices_on_nodes_that_take_no_pods_are_not_those_of_others() -> None:
    """Fixed bug: a job that went on on a cordoned node was charged to the other nodes."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        stays = cluster.submit("stays", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, stays, "n1")
        await cluster.api.merge(NODE, None, "n1", {"spec": {"unschedulable": True}})
        cluster.node("n2", T4, 4)
        await operator.watch(2.0)
        comes = cluster.submit("comes", "team-b", second=1, **OTHER)
        await operator.watch(4.0)
        assert await devices_of(cluster, comes) == {T4: 4}

    together({"n1": T4}, body, gpus=4)


def test_no_job_moves_for_one_whose_quota_allows_no_more() -> None:
    """Fixed bug: it restarted on half of its devices, and nobody used the others."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-b", **{"requests.nvidia.com/gpu": "1"})
        small = cluster.submit("small", "team-b", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, small, "n1")
        large = cluster.submit("large", second=1, **OTHER)
        await operator.watch(2.0)
        await train(cluster, operator, large, "n1")
        assert (await devices_of(cluster, small), await devices_of(cluster, large)) == ({T4: 1}, {T4: 4})
        await operator.watch(40.0)
        assert part(operator, small) == 1
        assert operator.condition(large, "Resizing") in (None, ("False", "Resting"))

    together({"n1": T4}, body, gpus=5)


@pytest.mark.parametrize("due", [False, True])
def test_a_job_that_is_overdue_is_not_delayed_by_one_with_a_deadline(due: bool) -> None:
    """Fixed bug: jobs with deadlines took each node that became free from a job that needs two."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **SHORT)
        second = cluster.submit("second", **{**SHORT, "seed": 5})
        await operator.watch(2.0)
        await train(cluster, operator, first, "n1")
        await train(cluster, operator, second, "n2")
        wide = cluster.submit("wide", second=1, **{**SHORT, "seed": 7, "nodes": {"min": 2, "max": 2}})
        await operator.watch(5.0)
        operator.now = NOW + timedelta(hours=240)
        await operator.watch(62.0)
        until = (operator.now + timedelta(hours=1000)).strftime("%Y-%m-%dT%H:%M:%SZ")
        late = cluster.submit(
            "late", second=2, **{**SHORT, "seed": 9, **({"scheduling": {"finishBy": until}} if due else {})}
        )
        await operator.watch(4.0)
        await cluster.edit(first, suspend=True)
        await operator.watch(2.0)
        await remove_pods(cluster, operator, first)
        await operator.watch(14.0)
        assert operator.condition(wide, "Planned") == ("False", "DeviceBusy")
        assert operator.condition(late, "Planned") == ("False", "Queued")

    together({"n1": T4, "n2": T4}, body)


def test_a_running_job_does_not_grow_into_devices_that_the_first_in_line_awaits() -> None:
    """Fixed bug: it restarted for its own gain, and the job that waited for four devices got them later."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        grows = cluster.submit("grows", **{**LONG, "nodes": {"min": 2, "max": 4}})
        await operator.watch(2.0)
        await train(cluster, operator, grows, "n1", "n2")
        ends = cluster.submit("ends", second=1, **{**SHORT, "nodes": {"min": 2, "max": 2}})
        cluster.submit("waits", second=2, **{**LONG, "seed": 7, "nodes": {"min": 4, "max": 4}})
        await operator.watch(1.0)
        for name in ("n3", "n4"):
            cluster.node(name, T4, 1)
        await operator.watch(2.0)
        await train(cluster, operator, ends, "n3", "n4")
        for name in ("n5", "n6", "n7"):
            cluster.node(name, T4, 1)
        await operator.watch(36.0)
        assert (operator.condition(grows, "Resizing") or ("False",))[0] == "False"
        assert await replicas(cluster, grows) == 2

    together({"n1": T4, "n2": T4}, body)


@pytest.mark.parametrize(("epochs", "moves"), [(20_000, False), (500, True)], ids=["long", "ends in time"])
def test_no_job_moves_for_one_that_may_not_take_the_quota_of_an_earlier_one(epochs: int, moves: bool) -> None:
    """Fixed bug: it restarted on fewer devices, and the job that was to get them then waited for its quota."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        runs = cluster.submit("runs", **{**SHORT, "nodes": {"min": 2, "max": 2}, "planning": {"resize": "Never"}})
        await operator.watch(2.0)
        await train(cluster, operator, runs, "n5", "n6")
        cluster.quota("team-a", {"requests.nvidia.com/gpu": "2"}, **{"requests.nvidia.com/gpu": "3"})
        large = cluster.submit("large", "team-b", second=1, **{**LONG, "nodes": {"min": 1, "max": 4}})
        await operator.watch(2.0)
        await train(cluster, operator, large, "n1", "n2", "n3", "n4")
        wide = cluster.submit("wide", second=2, **{**LONG, "seed": 2, "nodes": {"min": 2, "max": 2}})
        await operator.watch(2.0)
        later = cluster.submit("later", second=3, **{**SHORT, "seed": 3, "epochs": epochs})
        await operator.watch(45.0)
        assert operator.condition(wide, "Planned") == ("False", "DeviceBusy")  # It lacks quota as well.
        assert part(operator, later) == (1 if moves else None)
        assert operator.condition(large, "Resizing") == (("True", "DevicesReassigned") if moves else None)

    together({f"n{i}": T4 for i in range(1, 7)}, body)
