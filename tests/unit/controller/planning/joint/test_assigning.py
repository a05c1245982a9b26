"""Tests of queue.assignment: Together: devices go to the jobs that gain most, and running jobs give up some of them."""

from datetime import UTC, datetime

import pytest

from dljob.cluster import ClusterView
from dljob.controller.planning.background import TICK_S
from dljob.controller.planning.parsed_objects import Profiles
from dljob.job.plan.stored import StoredPlan
from dljob.kube import JobKey
from dljob.kube.kinds import DLJOB
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.scheduling.forecasting.calibration import OFFSET_S
from dljob.scheduling.forecasting.joint_simulation import AGAIN_S, LOOK_S, Ending
from support.builders import T4
from support.controller.fake_operator import SPEC, Json, Operator
from support.controller.shared_devices import (
    A100,
    LONG,
    OTHER,
    SHORT,
    devices_of,
    gains,
    long_then_short,
    remove_pods,
    replicas,
    together,
    train,
)
from support.servers.fake_api import FakeCluster
from support.virtual_time import now_s


def test_each_type_goes_to_the_job_that_gains_most() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        gains(little=1.1, much=8.0)(operator)
        before = cluster.submit("before", **SPEC)
        await operator.watch(2.0)
        await cluster.bind(await cluster.create_pods(before), "n1", "n2")
        little, much = cluster.submit("little", second=1, **LONG), cluster.submit("much", second=2, **OTHER)
        await operator.watch(15.0)
        assert operator.planned(little) == operator.planned(much) == "DeviceBusy"
        await cluster.edit(before, suspend=True)
        await operator.watch(2.0)
        await remove_pods(cluster, operator, before)
        assert await devices_of(cluster, little) == {T4: 1}
        assert await devices_of(cluster, much) == {A100: 1}

    together({"n1": T4, "n2": A100}, body)


def test_in_order_the_first_job_takes_the_fastest_type() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        little, much = cluster.submit("little", **LONG), cluster.submit("much", second=1, **LONG)
        await operator.watch(3.0)
        assert await devices_of(cluster, little) == {A100: 1}
        assert await devices_of(cluster, much) == {T4: 1}

    together({"n1": T4, "n2": A100}, body, on=False)


def test_job_that_ends_while_others_are_planned_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    """Fixed bug: the assignment ended with a KeyError, and the waiting job was planned alone."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", second=1, **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, first, "n1")
        before, ended = operator.planning._planner, list[str]()

        async def planner(question: ParsedJob, view: ClusterView, profiles: Profiles) -> StoredPlan | Infeasible:
            if question.observed.job.name == "second" and not ended:
                ended.append("first")
                operator.planning._assigning.forget(first)
            return await before(question, view, profiles)

        operator.planning._planner = planner
        cluster.submit("second", **SHORT)  # It is older, and therefore planned before the other.
        await operator.watch(10.0)
        assert ended and "KeyError" not in caplog.text

    together({"n1": T4}, body, gpus=4)


def test_running_job_gives_a_device_to_one_that_waits() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        assert await devices_of(cluster, first) == {T4: 4}
        await train(cluster, operator, first, "n1")
        second = cluster.submit("second", second=1, **SHORT)
        await operator.watch(45.0)
        assert operator.condition(first, "Resizing") == ("True", "DevicesReassigned")
        text = operator.message(first, "Resizing")
        assert (
            "what it releases speeds up job second more" in text
            and "(4 ranks each)" in text
            and "(2 ranks each)" in text
        )
        assert await replicas(cluster, first) == 0
        await remove_pods(cluster, operator, first)
        assert operator.condition(first, "Resizing") == ("False", "Resized")
        assert (await devices_of(cluster, first), await devices_of(cluster, second)) == ({T4: 2}, {T4: 2})

    together({"n1": T4}, body, gpus=4)


@pytest.mark.parametrize("how", ["deleted", "suspended"])
def test_no_job_moves_for_devices_that_a_stopping_job_is_about_to_free(how: str) -> None:
    """Fixed bug: while the pods of a deleted job stopped, another job restarted on fewer devices in vain."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        leaving = cluster.submit("leaving", **{**LONG, "planning": {"resize": "Never"}})
        await operator.watch(2.0)
        await train(cluster, operator, leaving, "n1")
        first = cluster.submit("first", second=1, **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, first, "n2")
        if how == "deleted":
            await cluster.api.delete(DLJOB, *leaving)
        else:
            await cluster.edit(leaving, suspend=True)
        await operator.watch(2.0)
        second = cluster.submit("second", second=2, **SHORT)
        await operator.watch(45.0)
        assert operator.condition(first, "Resizing") is None and await replicas(cluster, first) == 1
        await remove_pods(cluster, operator, leaving)
        assert await devices_of(cluster, second) == {T4: 4}

    together({"n1": T4, "n2": T4}, body, gpus=4)


def test_long_job_does_not_give_way_to_one_that_is_as_long() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, first, "n1")
        second = cluster.submit("second", second=1, **OTHER)
        await operator.watch(45.0)
        assert await replicas(cluster, first) == 1 and operator.planned(second) == "DeviceBusy"

    together({"n1": T4}, body, gpus=4)


def test_jobs_that_must_not_restart_keep_their_devices() -> None:
    async def stays(cluster: FakeCluster, operator: Operator, spec: Json) -> None:
        first = cluster.submit("first", **spec)
        await operator.watch(2.0)
        await train(cluster, operator, first, "n1")
        second = cluster.submit("second", second=1, **SHORT)
        await operator.watch(45.0)
        assert await replicas(cluster, first) == 1 and operator.planned(second) == "DeviceBusy"

    for spec in (
        {**LONG, "scheduling": {"disruption": "Avoid"}},
        {**LONG, "planning": {"resize": "Never"}},
        {**LONG, "checkpoint": {"enabled": False}},
    ):
        together({"n1": T4}, lambda cluster, operator, spec=spec: stays(cluster, operator, spec), gpus=4)  # type: ignore[misc]


def test_job_with_a_deadline_gives_devices_away_only_if_it_still_meets_it() -> None:
    """By the 90th percentile, it takes 31 of the 50 days until the near deadline, and 61 on half of the devices."""

    async def shares(cluster: FakeCluster, operator: Operator, finish_by: str, moves: bool) -> None:
        first = cluster.submit("first", **LONG, scheduling={"finishBy": finish_by})
        await operator.watch(2.0)
        assert await devices_of(cluster, first) == {T4: 4}
        await train(cluster, operator, first, "n1")
        cluster.submit("second", second=1, **SHORT)
        await operator.watch(45.0)
        assert await replicas(cluster, first) == (0 if moves else 1)

    for finish_by, moves in (("2226-03-01T12:00:00Z", True), ("2026-04-20T12:00:00Z", False)):
        together(
            {"n1": T4},
            lambda cluster, operator, by=finish_by, moves=moves: shares(cluster, operator, by, moves),  # type: ignore[misc]
            gpus=4,
        )


def test_job_that_needs_all_devices_for_its_deadline_starts_on_some() -> None:
    """Fixed bug: it waited for the end of the long job, which cannot give up all devices."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, first, "n1")
        second = cluster.submit("second", second=1, **SHORT, scheduling={"finishBy": "2026-03-01T14:00:00Z"})
        await operator.watch(45.0)
        assert await replicas(cluster, first) == 0
        await remove_pods(cluster, operator, first)
        assert (await devices_of(cluster, first), await devices_of(cluster, second)) == ({T4: 2}, {T4: 2})

    together({"n1": T4}, body, gpus=4)


def test_oldest_job_does_not_hold_up_those_that_get_devices_in_its_place() -> None:
    """Fixed bug: all devices stayed free, because the oldest job was the first in line, and was assigned none."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        before = cluster.submit("before", **{**LONG, "planning": {"resize": "Never"}})
        await operator.watch(2.0)
        await train(cluster, operator, before, "n1")
        cluster.submit("oldest", second=1, **LONG)
        short = [cluster.submit(f"short-{i}", second=2 + i, **{**SHORT, "seed": i}) for i in range(4)]
        await operator.watch(45.0)
        await cluster.edit(before, suspend=True)
        await operator.watch(2.0)
        await remove_pods(cluster, operator, before, seconds=30.0)
        assert [operator.planned(key) for key in short] == ["Planned"] * 4
        assert [await devices_of(cluster, key) for key in short] == [{T4: 1}] * 4

    together({"n1": T4}, body, gpus=4)


def test_job_of_a_higher_priority_gives_nothing_to_one_of_a_lower() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("urgent", 1000)
        first = cluster.submit("first", **{**LONG, "scheduling": {"priorityClassName": "urgent"}})
        await operator.watch(2.0)
        await train(cluster, operator, first, "n1")
        cluster.submit("second", second=1, **SHORT)
        await operator.watch(45.0)
        assert await replicas(cluster, first) == 1

    together({"n1": T4}, body, gpus=4)


def test_running_job_makes_room_for_jobs_of_a_higher_priority_that_could_use_all_devices() -> None:
    """Fixed bug: nothing was left for the running job, which thus kept all devices to its end."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("urgent", 1000)
        first = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        await train(cluster, operator, first, "n1")
        urgent = [
            cluster.submit(f"urgent-{i}", second=i, **SHORT, seed=i, scheduling={"priorityClassName": "urgent"})
            for i in range(1, 4)
        ]
        await operator.watch(45.0)
        assert operator.condition(first, "Resizing") == ("True", "DevicesReassigned")
        await remove_pods(cluster, operator, first)
        assert [await devices_of(cluster, key) for key in (first, *urgent)] == [{T4: 1}] * 4

    together({"n1": T4}, body, gpus=4)


def test_no_job_moves_for_one_for_which_another_was_preempted() -> None:
    """Fixed bug: a job on better devices moved to those of the preempted job, so that two jobs stopped for one."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("urgent", 1000)
        first = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        assert await devices_of(cluster, first) == {A100: 1}
        await train(cluster, operator, first, "n1")
        small: Json = {"model": {"name": "digits-cnn"}, "dataset": {"name": "digits"}, "planning": {"resize": "Never"}}
        victim = cluster.submit("victim", second=1, **{**LONG, **small})
        await operator.watch(2.0)
        await train(cluster, operator, victim, "n2")
        urgent = cluster.submit("urgent", second=2, **SHORT, scheduling={"priorityClassName": "urgent"})
        await operator.watch(45.0)
        assert operator.condition(victim, "Preempted") == ("True", "Preempted")
        await remove_pods(cluster, operator, victim)
        await operator.watch(15.0)
        assert operator.planned(urgent) == "Planned" and await devices_of(cluster, urgent) == {T4: 1}
        assert operator.condition(first, "Resizing") is None and await replicas(cluster, first) == 1

    together({"n1": A100, "n2": T4}, body, preempts=True)


def test_job_that_has_just_started_takes_part_but_does_not_move() -> None:
    """Otherwise, jobs that wait would be assigned only what it leaves, and would move again after its rest."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = operator.planning._assigning._running
        first = cluster.submit("first", **LONG)
        await operator.watch(2.0)
        await cluster.bind(await cluster.create_pods(first), "n1")
        cluster.submit("second", second=1, **SHORT)
        await operator.watch(45.0)
        assert not running[first].movable and await replicas(cluster, first) == 1

    together({"n1": T4}, body, gpus=4)


def test_job_that_comes_alone_may_use_all_devices() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        only = cluster.submit("only", **LONG)
        await operator.watch(2.0)
        found: Json = (await cluster.api.get(DLJOB, *only))["status"]
        assert found["plan"]["number"] == 1 and operator.planning._assigning.of(only) is None

    together({"n1": T4, "n2": A100}, body)


async def one_behind_another(cluster: FakeCluster, operator: Operator, watch_s: float) -> tuple[JobKey, JobKey]:
    """Let a job train on all devices, and another one wait for them for ``watch_s`` seconds. Return both keys."""
    first = cluster.submit("first", **LONG)
    await operator.watch(2.0)
    await train(cluster, operator, first, "n1")
    second = cluster.submit("second", second=1, **OTHER)
    await operator.watch(watch_s)
    assert operator.planned(second) == "DeviceBusy"
    return first, second


def test_wait_is_forecast_by_the_rule_that_decides_and_its_error_is_learned() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        outlooks = operator.planning._outlooks
        first, second = await one_behind_another(cluster, operator, 45.0)
        queue = operator.planning._assigning.queue(operator.planning._answers.for_devices(), 20.0, {})
        assert queue is not None and [job.key for job in queue.jobs] == [first, second]
        running, waiting = queue.jobs
        assert 0 < waiting.first_part < 1e-3  # 20 of a million epochs of steps.
        assert running.held.devices == {T4: 4} and waiting.held.devices == {} and queue.free[T4] == 0
        outlook, left_s = operator.planning.outlook(second), running.held.left_s
        assert outlook is not None and outlook.earliest is not None and outlook.start is not None
        assert (outlook.start - operator.now).total_seconds() == pytest.approx(left_s, rel=0.2)
        assert outlook.earliest < outlook.start and (outlook.latest is None or outlook.start < outlook.latest)
        made_s, forecast = outlooks._calibration._first[second]
        before = list(outlooks._calibration._high)
        await operator.watch(60.0)
        assert list(outlooks._calibration._high) == before  # It still waits.
        await cluster.edit(first, suspend=True)
        await operator.watch(2.0)
        await remove_pods(cluster, operator, first)
        assert operator.planned(second) == "Planned" and second not in outlooks._calibration._first
        wait_s, learned = now_s() - made_s, list(outlooks._calibration._high)
        assert learned[:-1] == before
        assert learned[-1] == pytest.approx((wait_s + OFFSET_S) / (forecast.p90 + OFFSET_S), rel=0.2)

    together({"n1": T4}, body, gpus=4)


def test_forecast_knows_the_part_of_a_job_that_moves() -> None:
    """Fixed bug: if a job came during a move, waiting jobs were predicted to start when the moving job ends."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first, second = await long_then_short(cluster, operator)
        assert operator.condition(first, "Resizing") == ("True", "DevicesReassigned")
        third = cluster.submit("third", second=2, **SHORT)
        await operator.watch(20.0)
        queue = operator.planning._assigning.queue(operator.planning._answers.for_devices(), 20.0, {})
        assert queue is not None
        assert {job.key: job.held.devices for job in queue.jobs} == {first: {T4: 2}, second: {}, third: {}}
        outlook = operator.planning.outlook(second)
        assert outlook is not None and outlook.start is not None
        assert (outlook.start - operator.now).total_seconds() < 60.0

    together({"n1": T4}, body, gpus=4)


@pytest.mark.parametrize("preempts", [True, False])
def test_forecast_expects_jobs_that_preempt_as_recent_ones_did(preempts: bool) -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        operator.now = cluster.now = datetime(2026, 1, 1, 0, 1, tzinfo=UTC)
        cluster.priority_class("usual", 0, default=True)
        await one_behind_another(cluster, operator, 45.0)
        queue = operator.planning._assigning.queue(operator.planning._answers.for_devices(), 20.0, {})
        assert queue is not None and len(queue.recent) == 2
        assert {each.job.preempts for each in queue.recent} == {job.preempts for job in queue.jobs} == {preempts}

    together({"n1": T4}, body, gpus=4, preempts=preempts)


def test_forecast_knows_when_a_job_ends_that_does_not_take_part() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        assigning = operator.planning._assigning
        first, second = await one_behind_another(cluster, operator, 45.0)
        assigning.forget(first)
        waiting = operator.planning._answers.for_devices()
        queue = assigning.queue(waiting, 20.0, {first: 7.0, ("team-a", "gone"): 9.0})
        assert queue is not None and [job.key for job in queue.jobs] == [second]
        assert queue.endings == [Ending(7.0, {T4: 4})]

    together({"n1": T4}, body, gpus=4)


def test_forecast_knows_when_devices_are_assigned_again() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        assigning = operator.planning._assigning
        await one_behind_another(cluster, operator, 100.0)
        queue = assigning.queue(operator.planning._answers.for_devices(), 20.0, {})
        assert queue is not None
        due_s = now_s() + queue.first_s
        assert 0.0 <= queue.first_s <= AGAIN_S
        await operator.watch(queue.first_s + TICK_S)
        assert due_s <= assigning._made_s <= due_s + TICK_S
        cluster.submit("third", second=2, **OTHER)
        await operator.watch(2.0)
        queue = assigning.queue(operator.planning._answers.for_devices(), 20.0, {})
        assert queue is not None and queue.first_s <= LOOK_S

    together({"n1": T4}, body, gpus=4)
