"""Tests of running jobs that grow beside others, with the operator's planning and its reservations."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import dlcontract
from dlcontract import CheckpointMark, Report, RunPhase
from dljob.cluster import ClusterView
from dljob.controller.planning.growing import LOOK_AGAIN_S
from dljob.controller.planning.parsed_objects import Profiles
from dljob.controller.planning.reserving import STOP_MARGIN_S
from dljob.job.identity import profile_key
from dljob.job.plan.stored import StoredPlan
from dljob.job.waiting import devices_waited_for
from dljob.kube import JobKey
from dljob.kube.kinds import CONFIG_MAP, NODE, POD, STATEFUL_SET
from dljob.planner import Infeasible, Learned, LearnedPoint
from dljob.reconcile import ParsedJob
from dljob.scheduling.book import PATIENCE_S
from dljob.status import find
from dljob.status.build import readable_status
from support.builders import A100, NOW, T4
from support.controller.fake_operator import SPEC, Operator, planned_here
from support.servers.fake_api import FakeCluster
from support.virtual_time import run

Json = dict[str, Any]
ELASTIC: Json = {
    "model": {"name": "digits-cnn"}, "dataset": {"name": "digits"}, "globalBatchSize": 96, "steps": 100_000,
    "nodes": {"min": 1, "max": 3},
    "checkpoint": {"volume": {"claimName": "shared"}},
}  # fmt: skip
ONE_NODE: Json = {**SPEC, "nodes": {"min": 1, "max": 1}}
SCALES = Learned(
    (LearnedPoint(32, 0.1, 50), LearnedPoint(48, 0.15, 50), LearnedPoint(96, 0.3, 50)),
    link_latency_s=1e-5, link_bandwidth_Bps=1e9,
)  # fmt: skip
"""More nodes are better."""


class Growing(Operator):
    """An operator of a cluster on which jobs are faster on more nodes."""

    async def _plan(self, question: ParsedJob, view: ClusterView, profiles: Profiles) -> StoredPlan | Infeasible:
        self.asked.append(question.observed.job.key)
        assert question.spec is not None
        # A second device is as slow, so that the planner believes these times.
        learned = {(profile_key(question.spec), device): SCALES for device in (T4, A100)}
        return await planned_here(question, view, {**profiles, **learned})

    def resizing(self, key: JobKey) -> str | None:
        """Return the reason of the condition Resizing."""
        job = self.cache.job(key)
        assert job is not None
        found = find(readable_status(job.status).conditions, "Resizing")
        return None if found is None else found.reason


async def plan(cluster: FakeCluster, key: JobKey) -> StoredPlan:
    return StoredPlan.parse((await cluster.api.get(CONFIG_MAP, key[0], f"{key[1]}-plan"))["data"])


async def trains(cluster: FakeCluster, operator: Operator, key: JobKey, *nodes: str, step: int = 500) -> None:
    """Let the pods of a job run on some nodes, and report that it trains."""
    for pod, node in zip(await cluster.create_pods(key), nodes, strict=True):
        meta = pod["metadata"]
        ready = {"type": "Ready", "status": "True"}
        await cluster.bind([pod], node)
        await cluster.api.merge(POD, meta["namespace"], meta["name"], {"status": {"conditions": [ready]}})
    await operator.watch(1.0)
    await report(cluster, key, step)
    await operator.watch()


async def report(cluster: FakeCluster, key: JobKey, step: int = 500) -> None:
    found = (await plan(cluster, key)).plan
    text = Report(
        uid=found.uid, plan_number=found.number, plan_digest=found.digest(), term=found.term, phase=RunPhase.RUNNING,
        unix_s=NOW.timestamp(), step=step, steps=100_000, step_s=0.3 / len(found.ranks), world_size=len(found.ranks),
        last_checkpoint=CheckpointMark(step=500, unix_s=NOW.timestamp()),
    ).to_json()  # fmt: skip
    await cluster.api.merge(CONFIG_MAP, key[0], f"{key[1]}-report", {"data": {dlcontract.REPORT_KEY: text}})


async def replicas(cluster: FakeCluster, key: JobKey) -> int:
    found = await cluster.api.find(STATEFUL_SET, key[0])
    return sum(item["spec"]["replicas"] for item in found if item["metadata"]["name"].startswith(f"{key[1]}-"))


async def stop_pods(cluster: FakeCluster, key: JobKey) -> None:
    for pod in await cluster.api.find(POD, key[0]):
        meta = pod["metadata"]
        if meta["labels"]["dljob.dev/job"] == key[1]:
            await cluster.api.delete(POD, meta["namespace"], meta["name"])


def on_nodes(test: Callable[[FakeCluster, Growing], Awaitable[None]], number: int = 2) -> None:
    """Run a test on a cluster of nodes n1, n2, … with one GPU each."""

    async def main() -> None:
        cluster = FakeCluster()
        for i in range(number):
            cluster.node(f"n{i + 1}", T4, 1)
        for namespace in ("team-a", "first", "second"):
            cluster.claim("shared", "ReadWriteMany", namespace)
        async with Growing(cluster) as operator:
            await test(cluster, operator)

    run(main())


def test_job_grows_onto_a_new_node_and_nobody_takes_its_place() -> None:
    async def body(cluster: FakeCluster, operator: Growing) -> None:
        key = cluster.submit("elastic", **ELASTIC)
        await operator.watch()
        await trains(cluster, operator, key, "n1", "n2")
        assert operator.resizing(key) in (None, "NotWorthwhile") and await replicas(cluster, key) == 2
        cluster.node("n3", T4, 1)
        await operator.watch(1.0)
        await report(cluster, key, 600)
        await operator.watch()
        assert operator.resizing(key) == "BetterPlan" and await replicas(cluster, key) == 0
        other = cluster.submit("other", "team-b", **ONE_NODE)
        await operator.watch()
        assert operator.planned(other) == "DeviceBusy", "the new node is reserved while the pods stop"
        await stop_pods(cluster, key)
        await operator.watch()
        assert operator.resizing(key) == "Resized" and await replicas(cluster, key) == 3
        assert operator.planned(other) == "DeviceBusy"
        found = await plan(cluster, key)
        assert (found.nodes, found.plan.number, found.resizes) == (3, 2, 1)
        assert 'dljob_operator_resizes_total{reason="BetterPlan"} 1.0' in operator.metrics.text().decode()

    on_nodes(body)


SLOW_STOP: Json = {**ELASTIC, "runPolicy": {"terminationGracePeriodSeconds": 600}}


async def stops_to_grow(cluster: FakeCluster, operator: Growing, spec: Json) -> JobKey:
    """Return the key of a job on two nodes whose pods stop because a third node has joined."""
    key = cluster.submit("elastic", **spec)
    await operator.watch()
    await trains(cluster, operator, key, "n1", "n2")
    cluster.node("n3", T4, 1)
    await operator.watch(1.0)
    await report(cluster, key, 600)
    await operator.watch()
    assert operator.resizing(key) == "BetterPlan" and await replicas(cluster, key) == 0
    return key


def test_reservation_lasts_while_pods_write_their_checkpoint() -> None:
    """Fixed bug: it ended after 60 s. Another job took the new node, and the restart was for nothing."""

    async def body(cluster: FakeCluster, operator: Growing) -> None:
        key = await stops_to_grow(cluster, operator, SLOW_STOP)
        await operator.watch(500.0)
        other = cluster.submit("other", "team-b", **ONE_NODE)
        await operator.watch()
        assert operator.planned(other) == "DeviceBusy", "the pods still have some of their grace period"
        await stop_pods(cluster, key)
        await operator.watch()
        assert operator.resizing(key) == "Resized" and await replicas(cluster, key) == 3

    on_nodes(body)


def test_pods_that_never_end_do_not_reserve_devices_for_ever() -> None:
    async def body(cluster: FakeCluster, operator: Growing) -> None:
        await stops_to_grow(cluster, operator, SLOW_STOP)
        other = cluster.submit("other", "team-b", **ONE_NODE)
        await operator.watch(600.0)
        assert operator.planned(other) == "DeviceBusy"
        await operator.watch(STOP_MARGIN_S + PATIENCE_S + 10)
        assert operator.planned(other) == "Planned"

    on_nodes(body)


def test_job_waits_if_another_takes_its_devices_while_no_operator_runs() -> None:
    """Fixed bug: it started with its old plan, and its pods found no nodes until the start time-out."""

    async def body(cluster: FakeCluster, operator: Growing) -> None:
        cluster.priority_class("urgent", 1000)
        key = await stops_to_grow(cluster, operator, {**ELASTIC, "nodes": {"min": 2, "max": 3}})
        await operator.__aexit__()
        await stop_pods(cluster, key)
        async with Growing(cluster) as following:
            other = cluster.submit("other", "team-b", **SPEC, scheduling={"priorityClassName": "urgent"})
            await following.watch()
            assert following.planned(other) == "Planned" and await replicas(cluster, key) == 0
            assert following.planned(key) == "DeviceBusy" and following.resizing(key) == "NotWorthwhile"
            assert following.condition(key, "Admitted") == ("False", "NoPlan")
            job = following.cache.job(key)
            assert job is not None and devices_waited_for(job) is not None and job.status["phase"] == "Pending"
            cluster.node("n4", T4, 1)
            await following.watch()
            assert following.planned(key) == "Planned" and await replicas(cluster, key) == 2

    on_nodes(body)


def test_waiting_jobs_come_first() -> None:
    """The new node is not enough for the waiting job. With another one, it could start."""

    async def body(cluster: FakeCluster, operator: Growing) -> None:
        key = cluster.submit("elastic", **ELASTIC)
        await operator.watch()
        await trains(cluster, operator, key, "n1", "n2")
        waiting = cluster.submit("waiting", "team-b", **SPEC)
        await operator.watch()
        assert operator.planned(waiting) == "DeviceBusy"
        operator.asked.clear()
        cluster.node("n3", T4, 1)
        for step in range(600, 605):
            await report(cluster, key, step)
            await operator.watch()
        assert key not in operator.asked and await replicas(cluster, key) == 2
        await cluster.edit(waiting, suspend=True)
        await operator.watch()
        await report(cluster, key, 700)
        await operator.watch()
        assert operator.resizing(key) == "BetterPlan"

    on_nodes(body)


@pytest.mark.parametrize("ends_first", [True, False], ids=["delays it", "does not delay it"])
def test_job_grows_into_a_quota_only_if_that_delays_no_job_that_waits_for_it(ends_first: bool) -> None:
    """Fixed bug: it took what was left, so that the first in line of its namespace did not start when another ended."""

    async def body(cluster: FakeCluster, operator: Growing) -> None:
        key = cluster.submit("elastic", **ELASTIC)
        await operator.watch()
        await trains(cluster, operator, key, "n1", "n2")
        if ends_first:
            cluster.node("n3", T4, 1)
            short = cluster.submit("short", **ONE_NODE)
            await operator.watch()
            await cluster.bind(await cluster.create_pods(short), "n3")
        used, most = ("3", "4") if ends_first else ("2", "3")
        cluster.quota("team-a", {"pods": used}, pods=most)
        waiting = cluster.submit("waiting", **SPEC)
        for name in ("n4", "n5"):
            cluster.node(name, T4, 1)
        await operator.watch(LOOK_AGAIN_S)
        assert operator.planned(waiting) == "QuotaExceeded"
        await report(cluster, key, 600)
        await operator.watch()
        assert (operator.resizing(key) == "BetterPlan") is not ends_first
        if ends_first:
            await cluster.edit(short, suspend=True)
            await operator.watch(1.0)
            await cluster.api.delete(POD, "team-a", "short-tesla-t4-0")
            cluster.quota("team-a", {"pods": "2"}, pods="4")
            await operator.watch()
            assert operator.planned(waiting) == "Planned" and await replicas(cluster, key) == 2

    on_nodes(body)


def test_one_of_two_jobs_grows() -> None:
    async def body(cluster: FakeCluster, operator: Growing) -> None:
        keys = []
        for name, node in (("first", "n1"), ("second", "n2")):
            cluster.node(node, T4, 1)
            keys.append(cluster.submit(name, name, **ELASTIC))
            await operator.watch()
        for key, node in zip(keys, ("n1", "n2"), strict=True):
            await trains(cluster, operator, key, node)
        cluster.node("n3", T4, 1)
        await operator.watch(LOOK_AGAIN_S)
        for step in range(600, 605):
            for key in keys:
                await report(cluster, key, step)
            await operator.watch(1.0)
        assert sorted([await replicas(cluster, key) for key in keys]) == [0, 1]

    on_nodes(body, 0)


async def large_and_small(cluster: FakeCluster, operator: Growing, large: Json, small: Json) -> tuple[JobKey, JobKey]:
    """Return two running jobs that were submitted to three nodes: that of team-a has n1 and n2, the other one n3.

    ``large``, ``small``: changes of their specs.
    """
    cluster.node("n1", T4, 1)
    cluster.node("n2", T4, 1)
    one = cluster.submit("large", "team-a", **{**ELASTIC, **large})
    await operator.watch()
    await trains(cluster, operator, one, "n1", "n2")
    cluster.node("n3", T4, 1)
    other = cluster.submit("small", "second", **{**ELASTIC, **small})
    await operator.watch()
    await trains(cluster, operator, other, "n3")
    await operator.watch(2 * LOOK_AGAIN_S)
    operator.asked.clear()
    return one, other


def test_job_of_the_namespace_with_the_smaller_share_grows_first() -> None:
    """Fixed bug: the job grew that was reconciled first, whatever its namespace had."""

    async def body(cluster: FakeCluster, operator: Growing) -> None:
        large, small = await large_and_small(cluster, operator, {}, {})
        cluster.node("n4", T4, 1)
        await operator.watch(1.0)
        for step in range(600, 605):
            await report(cluster, large, step)
            await operator.watch(1.0)
        assert operator.asked[0] == small and operator.resizing(small) == "BetterPlan"
        assert await replicas(cluster, large) == 2, "the other job has reserved the node"

    on_nodes(body, 0)


@pytest.mark.parametrize(
    "small",
    [
        {"planning": {"resize": "Never"}},
        {"nodes": {"min": 1, "max": 1}},
        {"scheduling": {"disruption": "Avoid"}},
        {"devices": [A100]},
    ],
    ids=["resize Never", "at nodes.max", "no disruption", "other devices"],
)
def test_job_that_cannot_grow_lets_others_grow(small: Json) -> None:
    async def body(cluster: FakeCluster, operator: Growing) -> None:
        if "devices" in small:
            cluster.node("n0", A100, 1)
        large, _ = await large_and_small(cluster, operator, {"devices": [T4]}, small)
        cluster.node("n4", T4, 1)
        await operator.watch(1.0)
        await report(cluster, large, 600)
        await operator.watch(1.0)
        assert operator.resizing(large) == "BetterPlan"

    on_nodes(body, 0)


def test_job_that_gains_nothing_looks_seldom() -> None:
    """Pods come and go, and each one that goes leaves capacity that could be of use."""

    async def body(cluster: FakeCluster, operator: Growing) -> None:
        key = cluster.submit("content", **{**ELASTIC, "nodes": {"min": 1, "max": 2}})
        await operator.watch()
        await trains(cluster, operator, key, "n1", "n2")
        operator.asked.clear()
        for step in range(600, 610):
            cluster.node("n3", T4, 1)
            await operator.watch(1.0)
            await report(cluster, key, step)
            await operator.watch(1.0)
            await cluster.api.delete(NODE, None, "n3")
            await operator.watch(1.0)
        assert operator.asked == [key], operator.resizing(key)

    on_nodes(body)
