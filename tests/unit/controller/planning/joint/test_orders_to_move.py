"""Tests of moves with queue.assignment: Together: each change of a part is checked, and a rest is explained."""

from dataclasses import replace
from datetime import timedelta

from dljob.cluster import ClusterView
from dljob.controller.planning.joint.options import Known
from dljob.controller.planning.parsed_objects import Profiles
from dljob.job.plan.stored import StoredPlan
from dljob.kube import JobKey
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.scheduling.assignment import Option
from support.builders import T4
from support.controller.fake_operator import Operator
from support.controller.shared_devices import (
    LONG,
    OTHER,
    SHORT,
    devices_of,
    long_then_short,
    remove_pods,
    replicas,
    together,
    train,
)
from support.servers.fake_api import FakeCluster
from support.virtual_time import now_s


async def ordered(cluster: FakeCluster, operator: Operator) -> tuple[JobKey, JobKey]:
    """Let a job train on all devices, and order it to release some for a short job. Return both keys.

    The first job is not reconciled for the order, so that it does not carry it out.
    """
    assigning = operator.planning._assigning
    first = cluster.submit("first", **LONG)
    await operator.watch(2.0)
    assert await devices_of(cluster, first) == {T4: 4}
    await train(cluster, operator, first, "n1")
    assigning._requeue = lambda key: None
    second = cluster.submit("second", second=1, **SHORT)
    for _ in range(45):
        await operator.watch(1.0)
        if assigning.moves(first):
            return first, second
    raise AssertionError("the job is not ordered to move")


def test_order_that_no_longer_repays_is_withdrawn() -> None:
    """Fixed bug: an order given for a short job stood when the part had changed for a job as long as the first."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        assigning = operator.planning._assigning
        first, second = await ordered(cluster, operator)
        await cluster.edit(second, suspend=True)
        third = cluster.submit("third", second=2, **OTHER)
        looked_s = assigning._looked_s = now_s() + 1000.0  # Only the assignment for the new job runs.
        await operator.watch(5.0)
        assert assigning._looked_s == looked_s and assigning.of(third) is not None
        assert not assigning.moves(first) and assigning._orders == {}
        assert operator.condition(first, "Resizing") is None and await replicas(cluster, first) == 1

    together({"n1": T4}, body, gpus=4)


def test_order_that_still_repays_stands() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        assigning = operator.planning._assigning
        first, _ = await ordered(cluster, operator)
        since_s = assigning._orders[first].since_s
        cluster.submit("third", second=2, **SHORT)
        assigning._looked_s = now_s() + 1000.0
        await operator.watch(5.0)
        assert assigning.moves(first) and assigning._orders[first].since_s == since_s
        assert assigning._orders[first].room is not None and assigning._orders[first].room.jobs == 2

    together({"n1": T4}, body, gpus=4)


def test_part_of_a_job_that_decides_to_move_during_an_assignment_does_not_change() -> None:
    """Fixed bug: the options of a new job take time, and the assignment then changed the part of the moving job."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        assigning = operator.planning._assigning
        first, _ = await ordered(cluster, operator)
        part, moving = assigning.of(first), set[JobKey]()
        before, is_moving = operator.planning._planner, assigning._is_moving
        assigning._is_moving = lambda key: key in moving or is_moving(key)

        async def planner(question: ParsedJob, view: ClusterView, profiles: Profiles) -> StoredPlan | Infeasible:
            if question.observed.job.name == "third":
                moving.add(first)
            return await before(question, view, profiles)

        operator.planning._planner = planner
        cluster.submit("third", second=2, **{**SHORT, "seed": 1})
        cluster.submit("fourth", second=3, **{**SHORT, "seed": 1})
        await operator.watch(10.0)
        assert moving and assigning.of(first) == part and assigning.moves(first)

    together({"n1": T4}, body, gpus=4)


def test_devices_that_stay_empty_while_a_job_rests_are_explained() -> None:
    """Fixed bug: a job rested on two of four devices when the other job had ended, and nothing said why."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first, second = await long_then_short(cluster, operator)
        await remove_pods(cluster, operator, first)
        assert (await devices_of(cluster, first), await devices_of(cluster, second)) == ({T4: 2}, {T4: 2})
        await train(cluster, operator, first, "n1")
        await train(cluster, operator, second, "n1")
        await operator.watch(45.0)
        assert operator.condition(first, "Resizing") == ("False", "Resized")
        await cluster.edit(second, suspend=True)
        await operator.watch(2.0)
        await remove_pods(cluster, operator, second)
        await operator.watch(15.0)
        assert operator.condition(first, "Resizing") == ("False", "Resting")
        assert f"4 x {T4}" in operator.message(first, "Resizing") and await replicas(cluster, first) == 1
        operator.now += timedelta(seconds=600)  # The virtual clock of the queue goes on at its own pace.
        operator.queue.add(first)
        await operator.watch(75.0)
        assert operator.condition(first, "Resizing") == ("True", "BetterPlan")

    together({"n1": T4}, body, gpus=4)


def test_no_second_job_moves_while_the_first_one_stops() -> None:
    """Fixed bug: the devices that the first one was about to release did not count, so two jobs restarted for one."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        two = {**LONG, "nodes": {"min": 1, "max": 2}}
        runs = [cluster.submit(f"runs-{i}", second=i, **{**two, "seed": i}) for i in range(2)]
        await operator.watch(2.0)
        for key, nodes in zip(runs, (("n1", "n2"), ("n3", "n4")), strict=True):
            assert await devices_of(cluster, key) == {T4: 2}
            await train(cluster, operator, key, *nodes)
        waits = cluster.submit("waits", second=2, **SHORT)
        await operator.watch(100.0)
        [moved] = [key for key in runs if operator.condition(key, "Resizing") is not None]
        assert operator.condition(moved, "Resizing") == ("True", "DevicesReassigned")
        await remove_pods(cluster, operator, moved, seconds=15.0)
        assert await devices_of(cluster, moved) == await devices_of(cluster, waits) == {T4: 1}

    together({f"n{i}": T4 for i in range(1, 5)}, body)


def test_job_whose_ranks_read_a_stream_releases_no_device() -> None:
    """Fixed bug: it moved to fewer ranks in the middle of an epoch, and failed with BadInput."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        assigning = operator.planning._assigning
        first = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, first, "n1", bound_ranks=4)
        second = cluster.submit("second", second=1, **SHORT)
        await operator.watch(45.0)
        assert operator.planned(second) == "DeviceBusy" and not assigning.moves(first)
        assert (await devices_of(cluster, first), await replicas(cluster, first)) == ({T4: 4}, 1)
        assert {option.devices for option in assigning._known[first].options} == {4}, "also in forecasts"
        recent, question = assigning._recent, assigning._running[first].question
        of_new_jobs = Known((Option(T4, 1, 1, 9.0), Option(T4, 1, 4, 3.0)))
        recent.note([(first, replace(question, bound_ranks=None))], {first: of_new_jobs})
        recent.note([(first, question)], {first: assigning._known[first]})
        assert recent._seen[first].known is of_new_jobs, "a job like it may have any number"

    together({"n1": T4}, body, gpus=4)
