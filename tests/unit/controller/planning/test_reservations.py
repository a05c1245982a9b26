"""Tests that two jobs never get the same devices, and that no job blocks devices that it does not use."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from dljob.controller.planning.answers import TURN_ANSWERS, PlanningError
from dljob.job.waiting import FIRST_STATUS_S
from dljob.kube import JobKey
from dljob.kube.kinds import DLJOB, POD, STATEFUL_SET, Kind
from dljob.scheduling.book import PATIENCE_S
from support.builders import NOW, T4
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.servers.fake_api import FakeCluster
from support.virtual_time import now_s

Json = dict[str, Any]


def test_bound_pods_of_another_job_are_not_free() -> None:
    """Fixed bug: the list of pods was reused for 2 s, and the reservation ended when the pods were bound."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **SPEC)
        await operator.watch(0.5)
        await cluster.bind(await cluster.create_pods(first), "n1", "n2")
        await operator.watch(0.5)
        second = cluster.submit("second", **SPEC)
        await operator.watch()
        assert operator.planned(first) == "Planned" and operator.planned(second) == "DeviceBusy"

    on_two_nodes(body)


def test_two_jobs_at_once_do_not_get_the_same_devices() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        keys = [cluster.submit(f"job-{i}", **SPEC) for i in range(5)]
        await operator.watch()
        assert sorted(str(operator.planned(key)) for key in keys) == [*["DeviceBusy"] * 4, "Planned"]

    on_two_nodes(body)


def test_accepted_plan_counts_while_the_watch_lags_behind() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.submit("first", **SPEC)
        second = cluster.submit("second", second=1, **SPEC)
        for key in cluster.watch(operator.cache):
            operator.queue.add(key)
        await asyncio.sleep(3)  # No watch event arrives any more.
        [stored] = [
            name for plural, _, name in cluster.api.objects if plural == "configmaps" and name.endswith("-plan")
        ]
        assert stored == "first-plan" and operator.planned(second) == "DeviceBusy"

    on_two_nodes(body)


def test_next_operator_keeps_the_reservations() -> None:
    """Fixed bug: reservations existed only in the memory of the operator that made them."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **SPEC)
        await operator.watch()
        assert operator.planned(first) == "Planned", "its pods are not created yet"
        await operator.__aexit__()
        async with Operator(cluster) as following:
            second = cluster.submit("second", **SPEC)
            await following.watch()
            assert following.planned(second) == "DeviceBusy"

    on_two_nodes(body)


def test_pods_that_never_come_do_not_block_others() -> None:
    """Fixed bug: a job whose pods a quota refused kept its reservation, and nothing showed that."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **SPEC)
        await operator.watch()
        second = cluster.submit("second", "team-b", **SPEC)
        await operator.watch()
        assert (operator.planned(first), operator.planned(second)) == ("Planned", "DeviceBusy")
        await operator.watch(PATIENCE_S + 10)
        assert operator.planned(second) == "Planned"

    on_two_nodes(body)


def test_job_whose_pods_are_refused_reserves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dljob.kube.events.warning_events.monotonic", now_s)

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **SPEC)
        await operator.watch()
        event = {
            "metadata": {"name": "refused", "namespace": "team-a"}, "type": "Warning", "reason": "FailedCreate",
            "involvedObject": {}, "message": "pods is forbidden: exceeded quota",
            "lastTimestamp": NOW.isoformat(),
        }  # fmt: skip
        [created] = [name for plural, _, name in cluster.api.objects if plural == "statefulsets"]
        event["involvedObject"] = {"name": created}
        cluster.api.objects["events", "team-a", "refused"] = event
        second = cluster.submit("second", "team-b", **SPEC)
        began = now_s()
        await operator.watch(1.0)
        while operator.planned(second) != "Planned":
            operator.queue.add(first)
            await operator.watch(1.0)
            assert now_s() - began < PATIENCE_S / 2

    on_two_nodes(body)


def test_refused_plan_reserves_nothing() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.api.refused.add("ConfigMap")
        cluster.submit("first", **SPEC)
        await operator.watch(1.0)
        cluster.api.refused.clear()
        second = cluster.submit("second", "team-b", **SPEC)
        for key in cluster.watch(operator.cache):
            operator.queue.add(key)
        await operator.watch(1.0)
        assert operator.planned(second) == "Planned"

    on_two_nodes(body)


def test_suspended_job_reserves_nothing() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **SPEC)
        await operator.watch()
        second = cluster.submit("second", **SPEC)
        await operator.watch()
        assert operator.planned(second) == "DeviceBusy"
        await cluster.edit(first, suspend=True)
        await operator.watch()
        assert operator.planned(second) == "Planned"

    on_two_nodes(body)


def test_replacement_of_a_lost_pod_gets_its_device_back() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        first = cluster.submit("first", **SPEC)
        await operator.watch()
        pods = await cluster.create_pods(first)
        await cluster.bind(pods, "n1", "n2")
        await operator.watch(2 * PATIENCE_S)
        meta = pods[0]["metadata"]
        await cluster.api.delete(*_pod(meta))
        second = cluster.submit("second", **{**SPEC, "nodes": {"min": 1, "max": 1}})
        await operator.watch()
        assert operator.planned(second) == "DeviceBusy"

    on_two_nodes(body)


def test_place_of_a_lost_pod_is_on_another_node_than_the_pods_that_are_left() -> None:
    """Fixed bug: the node with the most free devices counted, although it had a pod of the job."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.node("n1", T4, 3)
        pair = {**SPEC, "planning": {"mode": "Fixed", "groups": [{"device": T4, "nodes": 2, "ranksPerNode": 1}]}}
        first = cluster.submit("first", **pair)
        await operator.watch()
        pods = await cluster.create_pods(first)
        await cluster.bind(pods, "n1", "n2")
        await operator.watch(2 * PATIENCE_S)
        await cluster.api.delete(*_pod(pods[1]["metadata"]))
        second = cluster.submit("second", **pair)
        await operator.watch()
        assert (operator.planned(first), operator.planned(second)) == ("Planned", "DeviceBusy")

    on_two_nodes(body)


def test_job_that_is_planned_again_with_the_same_plan_keeps_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: its reservation ended with the next event about it, because its plan was stored already."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        async def later(seconds: float) -> None:
            operator.now += timedelta(seconds=seconds)
            operator.queue.add(first)
            await operator.watch(3.0)

        first = cluster.submit("first", **SPEC)
        await operator.watch()
        for pod in await cluster.create_pods(first):
            unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
            await cluster.api.merge(POD, "team-a", pod["metadata"]["name"], {"status": {"conditions": [unplaced]}})
        await later(1.0)
        await later(400.0)
        assert operator.condition(first, "Admitted") == ("False", "StartTimedOut")
        for pod in await cluster.api.find(POD, "team-a"):
            await cluster.api.delete(POD, "team-a", pod["metadata"]["name"])
        await operator.watch()
        apply = cluster.api.apply

        async def slow(kind: Kind, body: Json, *args: Any, **options: Any) -> Json:
            await asyncio.sleep(20.0 if kind is STATEFUL_SET else 0.0)
            return await apply(kind, body, *args, **options)

        monkeypatch.setattr(cluster.api, "apply", slow)
        await later(60.0)
        await cluster.api.merge(DLJOB, *first, {"metadata": {"annotations": {"note": "of a user"}}})
        await operator.watch(1.0)
        second = cluster.submit("second", "team-b", second=1, **SPEC)
        await operator.watch(5.0)
        assert operator.planned(second) == "DeviceBusy"
        await operator.watch(40.0)
        assert operator.condition(first, "Admitted") == ("True", "Starting")
        assert operator.planned(second) == "DeviceBusy"

    on_two_nodes(body)


def _pod(meta: Json) -> tuple[Kind, str, str]:
    return POD, meta["namespace"], meta["name"]


def accepted(operator: Operator, key: JobKey) -> tuple[str, str]:
    """Return status and reason of the condition Accepted."""
    job = operator.cache.job(key)
    assert job is not None
    [found] = [c for c in job.status["conditions"] if c["type"] == "Accepted"]
    return found["status"], found["reason"]


class TestFailures:
    @pytest.mark.parametrize("error", [PlanningError("it took too long"), TypeError("cannot pickle")], ids=repr)
    def test_failure_concerns_its_job_alone_and_is_retried(self, error: Exception) -> None:
        async def body(cluster: FakeCluster, operator: Operator) -> None:
            operator.error = error
            operator.breaks = cluster.submit("broken", **SPEC)
            other = cluster.submit("other", "team-b", **SPEC)
            await operator.watch()
            assert accepted(operator, operator.breaks) == ("False", "InternalError")
            assert operator.planned(other) == "Planned"
            await operator.watch(60.0)
            assert 2 < operator.asked.count(operator.breaks) < 15, "it is retried with back-off"
            broken, operator.breaks = operator.breaks, None
            await operator.watch(60.0)
            assert accepted(operator, broken) == ("True", "Accepted")

        on_two_nodes(body)

    def test_running_job_is_managed_while_planning_fails(self) -> None:
        async def body(cluster: FakeCluster, operator: Operator) -> None:
            key = cluster.submit("edited", **SPEC)
            await operator.watch()
            pods = await cluster.create_pods(key)
            await cluster.bind(pods, "n1", "n2")
            await operator.watch()
            operator.breaks = key
            await cluster.edit(key, epochs=7)
            await operator.watch(5.0)
            assert accepted(operator, key) == ("False", "InternalError") and operator.planned(key) == "Planned"
            replicas = [item["spec"]["replicas"] for item in await cluster.api.find(STATEFUL_SET, "team-a")]
            assert replicas == [2], "its pods run on"
            operator.breaks = None
            await operator.watch(20.0)
            assert accepted(operator, key) == ("True", "Accepted")
            assert [item["spec"]["replicas"] for item in await cluster.api.find(STATEFUL_SET, "team-a")] == [0]

        on_two_nodes(body)

    def test_hang_delays_no_running_job(self) -> None:
        async def body(cluster: FakeCluster, operator: Operator) -> None:
            key = cluster.submit("running", **SPEC)
            await operator.watch()
            await cluster.bind(await cluster.create_pods(key), "n1", "n2")
            await operator.watch()
            operator.hangs = cluster.submit("hanging", **SPEC)
            for i in range(20):
                cluster.submit(f"more-{i}", **SPEC)
            await operator.watch()
            await cluster.edit(key, suspend=True)
            await operator.watch(1.0)
            assert [item["spec"]["replicas"] for item in await cluster.api.find(STATEFUL_SET, "team-a")] == [0]
            assert operator.asked.count(operator.hangs) == 1, "the question is asked once"

        on_two_nodes(body)

    def test_job_has_a_status_within_seconds_even_without_a_plan(self) -> None:
        """With a loaded planner, 60 new jobs had no status for 20 s."""

        async def body(cluster: FakeCluster, operator: Operator) -> None:
            key = operator.hangs = cluster.submit("hanging", **SPEC)
            body = await cluster.api.get(DLJOB, *key)
            began_s, created = now_s(), datetime.fromisoformat(body["metadata"]["creationTimestamp"])
            operator.now = created

            async def until(seconds: float) -> None:
                while now_s() - began_s < seconds:
                    await operator.watch(0.5)
                    operator.now = created + timedelta(seconds=now_s() - began_s)

            await until(FIRST_STATUS_S - 1.0)
            job = operator.cache.job(key)
            assert job is not None and not job.status, "most plans take less time, and need no other status"
            await until(FIRST_STATUS_S + 1.0)
            assert accepted(operator, key) == ("True", "Accepted") and operator.planned(key) is None
            job = operator.cache.job(key)
            assert job is not None and job.status["phase"] == "Pending"
            await until(FIRST_STATUS_S + 60.0)
            operator.hangs = None
            assert operator.asked.count(key) == 1, "the question does not change by the status"

        on_two_nodes(body)

    def test_namespaces_take_turns(self) -> None:
        async def body(cluster: FakeCluster, operator: Operator) -> None:
            operator.hangs = cluster.submit("first", "crowded", **SPEC)
            await operator.watch(1.0)
            many = [cluster.submit(f"more-{i}", "crowded", **SPEC) for i in range(20)]
            other = cluster.submit("other", "team-b", **SPEC)
            await operator.watch(1.0)
            operator.hangs = None
            await operator.watch()
            assert operator.asked.index(other) == 1 and set(many) <= set(operator.asked)

        on_two_nodes(body)


class TestWaiting:
    def test_namespace_with_many_jobs_does_not_delay_one_that_holds_more(self) -> None:
        """Fixed bug: all jobs of a namespace that holds nothing came first, also those that can never run."""

        async def body(cluster: FakeCluster, operator: Operator) -> None:
            plan = operator.planning._planner

            async def planned_slowly(*question: Any) -> Any:
                await asyncio.sleep(1.0)
                return await plan(*question)

            operator.planning._planner = planned_slowly
            one = {**SPEC, "nodes": {"min": 1, "max": 1}}
            holds = cluster.submit("holds", "team-a", **one)
            await operator.watch(3.0)
            await cluster.bind(await cluster.create_pods(holds), "n1")
            await operator.watch(2.0)
            for i in range(60):
                cluster.submit(f"many-{i}", "team-b", second=1, **{**SPEC, "nodes": {"min": 9, "max": 9}})
            wants = cluster.submit("wants", "team-a", second=2, **one)
            await operator.watch(2.0 * TURN_ANSWERS + 5.0)
            assert operator.planned(wants) == "Planned"

        on_two_nodes(body)

    def test_waiting_job_is_planned_again_only_when_capacity_grows(self) -> None:
        async def body(cluster: FakeCluster, operator: Operator) -> None:
            first = cluster.submit("first", **SPEC)
            await operator.watch()
            pods = await cluster.create_pods(first)
            await cluster.bind(pods, "n1", "n2")
            await operator.watch()
            second = cluster.submit("second", **SPEC)
            await operator.watch()
            operator.asked.clear()
            for _ in range(20):  # Events of pods that take nothing from anybody.
                cluster.api._store(*_pod_of_others())
                operator.queue.add(second)
                await operator.watch(5.0)
            assert operator.asked == []
            await cluster.edit(first, suspend=True)
            for pod in pods:
                await cluster.api.delete(*_pod(pod["metadata"]))
            await operator.watch()
            assert operator.asked == [second] and operator.planned(second) == "Planned"

        on_two_nodes(body)

    def test_waiting_job_is_planned_again_after_a_new_node(self) -> None:
        async def body(cluster: FakeCluster, operator: Operator) -> None:
            key = cluster.submit("large", **{**SPEC, "nodes": {"min": 3, "max": 3}})
            await operator.watch()
            assert operator.planned(key) == "TooFewNodes"
            cluster.node("n3", T4, 1)
            await operator.watch()
            assert operator.planned(key) == "Planned"

        on_two_nodes(body)

    def test_edited_job_is_planned_again(self) -> None:
        async def body(cluster: FakeCluster, operator: Operator) -> None:
            key = cluster.submit("large", **{**SPEC, "nodes": {"min": 3, "max": 3}})
            await operator.watch()
            await cluster.edit(key, nodes={"min": 2, "max": 2})
            await operator.watch()
            assert operator.planned(key) == "Planned"

        on_two_nodes(body)


def _pod_of_others() -> tuple[Kind, Json]:
    return POD, {"metadata": {"name": "web", "namespace": "web"}, "spec": {"nodeName": "n1", "containers": []}}
