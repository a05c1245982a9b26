"""Tests of the queue: jobs start in its order, and no job delays the first in line."""

import pytest

from dljob.job.remaining import remaining
from dljob.kube import JobKey
from dljob.kube.kinds import DLJOB, POD, STATEFUL_SET
from dljob.scheduling import QueuePolicy
from dljob.scheduling.forecasting.times import START_UP
from dljob.status import previous
from support.controller.fake_operator import LONG, SMALL, SPEC, Operator, on_two_nodes, run_on
from support.servers.fake_api import FakeCluster


async def stop(cluster: FakeCluster, operator: Operator, key: JobKey) -> None:
    """Suspend a job, and remove its pods."""
    await cluster.edit(key, suspend=True)
    for pod in await cluster.api.find(POD, key[0]):
        if pod["metadata"]["name"].startswith(f"{key[1]}-"):
            await cluster.api.delete(POD, key[0], pod["metadata"]["name"])
    await operator.watch(10.0)


def test_small_jobs_do_not_starve_a_big_one() -> None:
    """Fixed bug: any job that fitted was started, so a job that needs all nodes waited for ever."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **SMALL)
        await run_on(cluster, operator, running, "n1")
        big = cluster.submit("big", second=1, **SPEC)
        await operator.watch()
        small = cluster.submit("small", second=2, **LONG)
        await operator.watch()
        assert (operator.planned(big), operator.planned(small)) == ("DeviceBusy", "Queued")
        await stop(cluster, operator, running)
        assert (operator.planned(big), operator.planned(small)) == ("Planned", "DeviceBusy")

    on_two_nodes(body)


def test_waiting_jobs_show_their_place() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **LONG)
        await run_on(cluster, operator, running, "n1")
        big = cluster.submit("big", second=1, **SPEC)
        await operator.watch()
        assert "the only waiting job" in operator.message(big, "Admitted")
        later = cluster.submit("later", second=3, **SPEC)
        between = cluster.submit("between", second=2, **SPEC)
        await operator.watch(90.0)
        places = [operator.message(key, "Admitted").split(";")[0][-26:] for key in (big, between, later)]
        assert places == [f"number {n} of 3 in the queue" for n in (1, 2, 3)]

    on_two_nodes(body)


def test_job_that_ends_in_time_overtakes() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **LONG)
        await run_on(cluster, operator, running, "n1")
        big = cluster.submit("big", second=1, **SPEC)
        await operator.watch()
        small = cluster.submit("small", second=2, **SMALL)
        await operator.watch()
        assert (operator.planned(big), operator.planned(small)) == ("DeviceBusy", "Planned")

    on_two_nodes(body)


def test_running_job_that_asks_for_more_nodes_does_not_overtake() -> None:
    """Fixed bug: kubectl scale of a running job took the devices that the first in line was waiting for."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("urgent", 1000)
        running = cluster.submit("running", **LONG)
        await run_on(cluster, operator, running, "n1")
        big = cluster.submit("big", second=1, **SPEC)
        await operator.watch()
        await cluster.edit(running, nodes={"min": 2, "max": 2})
        await operator.watch(15.0)
        assert (operator.planned(big), operator.planned(running)) == ("DeviceBusy", "Queued")
        assert "the job continues with plan 1" in operator.message(running, "Planned")
        assert [item["spec"]["replicas"] for item in await cluster.api.find(STATEFUL_SET, "team-a")] == [1]
        await cluster.edit(running, scheduling={"priorityClassName": "urgent"})
        await operator.watch(15.0)
        assert (operator.planned(big), operator.planned(running)) == ("DeviceBusy", "Planned")

    on_two_nodes(body)


def test_running_job_keeps_its_own_devices_for_a_changed_spec() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **LONG)
        await run_on(cluster, operator, running, "n1")
        big = cluster.submit("big", second=1, **SPEC)
        await operator.watch()
        await cluster.edit(running, epochs=900_000)
        await operator.watch(15.0)
        assert (operator.planned(big), operator.planned(running)) == ("DeviceBusy", "Planned")
        assert operator.condition(running, "Running") == ("False", "Replacing")

    on_two_nodes(body)


def test_job_that_is_nearly_done_overtakes_when_it_continues() -> None:
    """Fixed bug: it counted with the time of its whole training, and waited behind the first in line."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.claim("data", "ReadWriteMany")
        running = cluster.submit("running", **LONG)
        await run_on(cluster, operator, running, "n1")
        spec = {**LONG, "checkpoint": {"volume": {"claimName": "data"}}}
        resumed = cluster.submit("resumed", second=5, **spec)
        await run_on(cluster, operator, resumed, "n2")
        await stop(cluster, operator, resumed)
        big = cluster.submit("big", second=1, **SPEC)
        await operator.watch()
        assert operator.planned(big) == "DeviceBusy"
        steps = {"step": 999_999_000, "steps": 1_000_000_000, "display": "99%"}
        mark = {"step": 999_999_000, "time": "2026-01-01T00:00:00Z"}
        await cluster.api.merge(DLJOB, *resumed, {"status": {"progress": steps, "lastCheckpoint": mark}})
        await cluster.edit(resumed, suspend=False)
        await operator.watch()
        assert operator.condition(resumed, "Admitted") == ("True", "Starting")

    on_two_nodes(body)


def test_job_that_can_never_run_blocks_nobody() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **SMALL)
        await run_on(cluster, operator, running, "n1")
        cluster.submit("huge", second=1, **{**SPEC, "nodes": {"min": 3, "max": 3}})
        await operator.watch()
        small = cluster.submit("small", second=2, **LONG)
        await operator.watch()
        assert operator.planned(small) == "Planned"

    on_two_nodes(body)


def test_pods_of_others_make_a_job_impossible_and_it_blocks_nobody() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        request = {"resources": {"requests": {"nvidia.com/gpu": "1"}}, "name": "web"}
        meta = {"name": "web", "namespace": "web"}
        cluster.api._store(POD, {"metadata": meta, "spec": {"nodeName": "n1", "containers": [request]}})
        big = cluster.submit("big", second=1, **SPEC)
        await operator.watch()
        small = cluster.submit("small", second=2, **LONG)
        await operator.watch()
        assert (operator.planned(big), operator.planned(small)) == ("DeviceBusy", "Planned")

    on_two_nodes(body)


def test_higher_priority_starts_first() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("urgent", 1000)
        running = cluster.submit("running", **SPEC)
        await run_on(cluster, operator, running, "n1", "n2")
        low = cluster.submit("low", second=1, **SPEC)
        high = cluster.submit("high", second=2, scheduling={"priorityClassName": "urgent"}, **SPEC)
        await operator.watch()
        await stop(cluster, operator, running)
        assert (operator.planned(high), operator.planned(low)) == ("Planned", "DeviceBusy")

    on_two_nodes(body)


def test_namespace_that_holds_less_starts_first() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first, other = cluster.submit("first", "team-a", **SMALL), cluster.submit("other", "team-b", **SMALL)
        await operator.watch(1.0)
        await cluster.bind(await cluster.create_pods(first), "n1")
        await cluster.bind(await cluster.create_pods(other), "n2")
        await operator.watch(1.0)
        older = cluster.submit("older", "team-a", second=1, **SMALL)
        newer = cluster.submit("newer", "team-b", second=2, **SMALL)
        await operator.watch()
        await stop(cluster, operator, other)
        assert (operator.planned(newer), operator.planned(older)) == ("Planned", "DeviceBusy")

    on_two_nodes(body)


def test_deadline_starts_first_unless_it_is_lost_or_switched_off() -> None:
    async def first(cluster: FakeCluster, operator: Operator, finish_by: str) -> list[str | None]:
        running = cluster.submit("running", **SPEC)
        await run_on(cluster, operator, running, "n1", "n2")
        older = cluster.submit("older", second=1, **SPEC)
        due = cluster.submit("due", second=2, scheduling={"finishBy": finish_by}, **SPEC)
        await operator.watch()
        await stop(cluster, operator, running)
        return [operator.planned(due), operator.planned(older)]

    async def met(cluster: FakeCluster, operator: Operator) -> None:
        assert await first(cluster, operator, "2027-01-01T00:00:00Z") == ["Planned", "DeviceBusy"]

    async def other(cluster: FakeCluster, operator: Operator) -> None:
        assert await first(cluster, operator, "2027-01-01T00:00:00Z") == ["DeviceBusy", "Planned"]

    async def lost(cluster: FakeCluster, operator: Operator) -> None:
        """The training takes longer than 10 ms."""
        assert await first(cluster, operator, "2026-03-01T12:00:00.01Z") == ["DeviceBusy", "Planned"]

    on_two_nodes(met)
    on_two_nodes(other, QueuePolicy(deadlines=False))
    on_two_nodes(lost)


def test_weight_gives_a_namespace_more() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first, other = cluster.submit("first", "team-a", **SMALL), cluster.submit("other", "team-b", **SMALL)
        await operator.watch(1.0)
        await cluster.bind(await cluster.create_pods(first), "n1")
        await cluster.bind(await cluster.create_pods(other), "n2")
        await operator.watch(1.0)
        older = cluster.submit("older", "team-b", second=1, **SMALL)
        newer = cluster.submit("newer", "team-a", second=2, **SMALL)
        await operator.watch()
        assert operator.planning.place(newer) == (1, 2)
        assert operator.planning.place(older) == (2, 2)

    on_two_nodes(body, QueuePolicy(weights={"team-a": 2.0}))


def test_next_operator_lets_nobody_overtake() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **SMALL)
        await run_on(cluster, operator, running, "n1")
        big = cluster.submit("big", second=1, **SPEC)
        small = cluster.submit("small", second=2, **LONG)
        await operator.watch()
        await operator.__aexit__()
        async with Operator(cluster) as following:
            for key in (big, small):
                following.queue.add(key)
            await following.watch()
            assert (following.planned(big), following.planned(small)) == ("DeviceBusy", "Queued")

    on_two_nodes(body)


def test_queued_jobs_cost_no_planning_while_nothing_changes() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **SMALL)
        await run_on(cluster, operator, running, "n1")
        cluster.submit("big", second=1, **SPEC)
        small = cluster.submit("small", second=2, **LONG)
        await operator.watch()
        assert operator.planned(small) == "Queued"
        operator.asked.clear()
        await operator.watch(120.0)
        assert operator.asked == []

    on_two_nodes(body)


def test_plans_that_are_only_shown_cost_no_new_search_for_the_start_of_the_first_in_line() -> None:
    """Fixed bug: after each of them, the start of the first in line was searched for again."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **SMALL)
        await run_on(cluster, operator, running, "n1")
        big = cluster.submit("big", second=1, **SPEC)
        cluster.submit("small", second=2, **LONG)
        await operator.watch()
        operator.asked.clear()
        cluster.submit("shown", second=3, **SMALL, planning={"mode": "PlanOnly"})
        other = cluster.submit("other", second=4, **LONG)
        await operator.watch()
        assert operator.planned(other) == "Queued"
        assert big not in operator.asked

    on_two_nodes(body)


def test_job_that_is_overtaken_shows_its_new_place() -> None:
    """Fixed bug: a waiting job showed the place at which it was last planned, for up to five minutes."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **{**SPEC, "epochs": 100_000})
        await run_on(cluster, operator, running, "n1", "n2")
        waits = cluster.submit("waits", second=1, **SPEC)
        await operator.watch(20.0)
        shown = operator.cache.job(waits).status["queue"]  # type: ignore[union-attr]
        assert (shown["position"], shown["jobs"]) == (1, 1)
        due = cluster.submit("due", second=2, scheduling={"finishBy": "2026-03-02T12:00:00Z"}, **SPEC)
        await operator.watch(20.0)
        found = [operator.cache.job(key).status["queue"] for key in (due, waits)]  # type: ignore[union-attr]
        assert [(each["position"], each["jobs"]) for each in found] == [(1, 2), (2, 2)]
        await stop(cluster, operator, running)

    on_two_nodes(body)


def test_waiting_job_shows_its_forecast_and_its_deadline() -> None:
    """Fixed bug: a waiting job did not say when it might start."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **{**SPEC, "epochs": 100_000})
        await run_on(cluster, operator, running, "n1", "n2")
        late = {"finishBy": "2026-03-01T12:00:01Z"}
        waits, due = (
            cluster.submit("waits", second=1, **SPEC),
            cluster.submit("due", second=2, scheduling=late, **SPEC),
        )
        await operator.watch(4.0)
        first, second = (operator.cache.job(key).status["queue"] for key in (due, waits))  # type: ignore[union-attr]
        assert [(each["position"], each["jobs"]) for each in (first, second)] == [(1, 2), (2, 2)]
        assert first["earliestStart"] <= first["forecastStart"] <= first["latestStart"] <= first["latestFinish"]
        assert first["forecastStart"] <= second["forecastStart"]
        assert "the job is predicted to start at 2026-" in operator.message(due, "Admitted")
        assert operator.condition(due, "DeadlineFeasible") == ("False", "TooLate")
        assert operator.condition(waits, "DeadlineFeasible") is None
        operator.controller.count_jobs()
        text = operator.metrics.text().decode()
        assert 'dljob_operator_deadlines{feasible="False"} 1.0' in text
        assert "dljob_operator_queue_jobs_without_forecast 0.0" in text
        assert 'dljob_operator_queue_start_seconds{percentile="p50",position="last"} 0.0' not in text
        await stop(cluster, operator, running)
        started = operator.cache.job(due)
        assert started is not None and "queue" not in started.status

    on_two_nodes(body)


def test_forecast_knows_that_a_job_starts_with_a_smaller_plan() -> None:
    """Fixed bug: an elastic job was predicted to start when its largest plan fits, days after it really started."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        long, short = cluster.submit("long", **LONG), cluster.submit("short", **{**SMALL, "epochs": 1_000})
        await operator.watch(1.0)
        await cluster.bind(await cluster.create_pods(long), "n1")
        await cluster.bind(await cluster.create_pods(short), "n2")
        await operator.watch(1.0)
        elastic = cluster.submit("elastic", second=1, **{**SPEC, "nodes": {"min": 1, "max": 2}})
        rigid = cluster.submit("rigid", second=2, **SPEC)
        await operator.watch(70.0)
        found = {key: operator.cache.job(key).status["queue"]["latestStart"] for key in (elastic, rigid)}  # type: ignore[union-attr]
        ends = operator.cache.job(short).status["forecast"]  # type: ignore[union-attr]
        assert found[elastic] < found[rigid], (found, ends)

    on_two_nodes(body)


def test_forecast_counts_the_start_of_pods() -> None:
    """Fixed bug: a job was predicted to end as if its pods started and ranks connected in no time."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **SPEC)
        await run_on(cluster, operator, running, "n1", "n2")
        waits = cluster.submit("waits", second=1, **SPEC)
        await operator.watch(4.0)
        job, found = operator.cache.job(running), operator.planning.outlook(waits)
        assert job is not None and found is not None and found.earliest is not None and found.latest is not None
        left = remaining(previous(job))
        assert (found.latest - found.earliest).total_seconds() == pytest.approx(
            left.p90 + START_UP.p90 - left.p10 - START_UP.p10
        )

    on_two_nodes(body)


def test_pods_are_freed_once() -> None:
    """Fixed bug: a job that was named twice made more room than its pods took."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("one", **SMALL)
        await run_on(cluster, operator, key, "n1")
        holdings = operator.planning._queue.holdings
        assert holdings.view_without(key, {key}) == holdings.view_without(key, ())

    on_two_nodes(body)
