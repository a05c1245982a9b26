"""Tests that plans fit the quotas of their namespaces, and that jobs wait for a quota only as long as it is in the way."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from dljob.kube import JobKey
from dljob.kube.kinds import POD, PRIORITY_CLASS, QUOTA, STATEFUL_SET, STORAGE_CLASS
from dljob.reconcile.gang import FIRST_BACK_OFF_S, START_TIMEOUT_S
from support.builders import T4
from support.controller.fake_operator import SPEC, Operator
from support.servers.fake_api import FakeCluster
from support.virtual_time import now_s, run

Json = dict[str, Any]
DEFAULT_CLASS: Json = {"storageclass.kubernetes.io/is-default-class": "true"}
CLAIM_OF_FIRST = "team-a", "first-checkpoints"


def on_six_nodes(test: Callable[[FakeCluster, Operator], Awaitable[None]]) -> None:
    """Run a test on a cluster in which only a quota can prevent two jobs from running."""

    async def main() -> None:
        cluster = FakeCluster()
        for i in range(6):
            cluster.node(f"n{i}", T4, 1)
        async with Operator(cluster) as operator:
            await test(cluster, operator)

    run(main())


async def reconciled(operator: Operator, key: JobKey, seconds: float = 3.0) -> None:
    """Reconcile a job, as after a change of its pods, and let time pass."""
    await operator.watch(1.0)
    operator.queue.add(key)
    await operator.watch(seconds)


async def replicas(cluster: FakeCluster) -> int:
    [created] = await cluster.api.find(STATEFUL_SET, "team-a")
    return int(created["spec"]["replicas"])


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


def test_quota_for_the_default_priority_class_counts_jobs_that_name_no_class() -> None:
    """Fixed bug: the job was planned again and again, and the API server rejected its pods each time."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("normal", 100, default=True)
        cluster.priority_class("higher", 200, default=True)
        selector = {"scopeName": "PriorityClass", "operator": "In", "values": ["normal"]}
        spec = {"hard": {"pods": "1"}, "scopeSelector": {"matchExpressions": [selector]}}
        status = {"hard": {"pods": "1"}, "used": {"pods": "0"}}
        meta = {"name": "normal", "namespace": "team-a"}
        cluster.api._store(QUOTA, {"metadata": meta, "spec": spec, "status": status})
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        assert operator.planned(key) == "QuotaExceeded", (
            "of several default classes, the one with the least value counts"
        )
        await cluster.api.delete(PRIORITY_CLASS, "", "normal")
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


def test_job_that_resumes_needs_no_quota_for_the_claim_that_it_has() -> None:
    """Fixed bug: a job whose claim filled the quota of its namespace never started again after a suspension."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", persistentvolumeclaims="1")
        cluster.api._store(STORAGE_CLASS, {"metadata": {"name": "shared", "annotations": DEFAULT_CLASS}})
        key = cluster.submit("first", **{**SPEC, "checkpoint": {"enabled": True}})
        await operator.watch()
        assert operator.planned(key) == "Planned" and ("persistentvolumeclaims", *CLAIM_OF_FIRST) in cluster.api.objects
        cluster.quota("team-a", {"persistentvolumeclaims": "1"}, persistentvolumeclaims="1")
        await cluster.edit(key, suspend=True)
        await operator.watch()
        assert operator.condition(key, "Admitted") == ("False", "Suspended")
        await cluster.edit(key, suspend=False)
        await operator.watch()
        assert operator.planned(key) == "Planned" and operator.condition(key, "Admitted") == ("True", "Starting")

    on_six_nodes(body)


def test_quota_below_what_runs_stops_nothing_and_is_named() -> None:
    """Fixed bug: no condition said that lost pods could not be replaced."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", pods="2")
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        await cluster.bind(await cluster.create_pods(key), "n0", "n1")
        cluster.quota("team-a", {"pods": "2"}, pods="2")
        await reconciled(operator, key)
        assert operator.condition(key, "WithinQuota") is None
        cluster.quota("team-a", {"pods": "2"}, pods="1")
        await reconciled(operator, key)
        assert operator.planned(key) == "Planned" and await replicas(cluster) == 2
        assert operator.condition(key, "WithinQuota") == ("False", "QuotaBelowUsage")
        assert "ResourceQuota full: pods: found 2 used; the quota allows 1" in operator.message(key, "WithinQuota")
        cluster.quota("team-a", {"pods": "2"}, pods="2")
        await reconciled(operator, key)
        assert operator.condition(key, "WithinQuota") == ("True", "WithinQuota")
        posted = [body for (kind, _, _), body in cluster.api.objects.items() if kind == "events"]
        assert sum(event["reason"] == "QuotaBelowUsage" for event in posted) == 1

    on_six_nodes(body)


def test_quota_of_resources_that_the_job_does_not_use_is_not_its_concern() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        await cluster.bind(await cluster.create_pods(key), "n0", "n1")
        cluster.quota("team-a", {"count/cronjobs.batch": "2"}, **{"count/cronjobs.batch": "1"})
        await reconciled(operator, key)
        assert operator.condition(key, "WithinQuota") is None

    on_six_nodes(body)


def test_job_that_loses_a_pod_under_a_lowered_quota_waits_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server rejects the replacement. The job is not lost: it waits until the quota grows."""
    monkeypatch.setattr("dljob.kube.events.warning_events.monotonic", now_s)

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", pods="2")
        key = cluster.submit("first", **SPEC)
        await operator.watch()
        pods = await cluster.create_pods(key)
        await cluster.bind(pods, "n0", "n1")
        await reconciled(operator, key)
        await cluster.api.delete(POD, "team-a", pods[0]["metadata"]["name"])
        cluster.quota("team-a", {"pods": "1"}, pods="1")
        [created] = await cluster.api.find(STATEFUL_SET, "team-a")
        cluster.warn(created, "FailedCreate", "pods is forbidden: exceeded quota: full")
        await reconciled(operator, key, 30)
        assert operator.condition(key, "PodsReady") == ("False", "PodsRejected")
        assert "exceeded quota: full" in operator.message(key, "PodsReady")
        operator.now += timedelta(seconds=START_TIMEOUT_S)
        await reconciled(operator, key)
        assert operator.condition(key, "Admitted") == ("False", "StartTimedOut") and await replicas(cluster) == 0
        await cluster.api.delete(POD, "team-a", pods[1]["metadata"]["name"])
        cluster.quota("team-a", {"pods": "0"}, pods="1")
        operator.now += timedelta(seconds=2 * FIRST_BACK_OFF_S)
        await reconciled(operator, key)
        assert operator.planned(key) == "QuotaExceeded" and operator.condition(key, "Failed") is None
        cluster.quota("team-a", {"pods": "0"}, pods="2")
        await reconciled(operator, key, 10)
        assert operator.condition(key, "Admitted") == ("True", "Starting") and await replicas(cluster) == 2

    on_six_nodes(body)


@pytest.mark.parametrize(("epochs", "starts"), [(1_000_000, False), (1, True)], ids=["long", "ends in time"])
def test_later_job_takes_no_quota_for_which_an_earlier_one_waits(epochs: int, starts: bool) -> None:
    """Fixed bug: small jobs took what was left again and again, so that a large one never started."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", **{**SPEC, "epochs": 100_000})
        await operator.watch(1.0)
        await cluster.bind(await cluster.create_pods(running), "n0", "n1")
        cluster.quota("team-a", {"pods": "2"}, pods="4")
        large = cluster.submit("large", second=1, **{**SPEC, "nodes": {"min": 4, "max": 4}})
        await operator.watch()
        later = cluster.submit("later", second=2, **{**SPEC, "epochs": epochs})
        elsewhere = cluster.submit("elsewhere", "team-b", second=3, **{**SPEC, "epochs": 1_000_000})
        await operator.watch()
        assert operator.planned(large) == "QuotaExceeded" and operator.planned(elsewhere) == "Planned"
        assert operator.planned(later) == ("Planned" if starts else "QuotaExceeded")
        if not starts:
            assert "job large" in operator.message(later, "Planned")
            await cluster.edit(large, suspend=True)
            await operator.watch(10.0)
            assert operator.planned(later) == "Planned"

    on_six_nodes(body)


def test_job_that_its_namespace_never_admits_blocks_no_other_namespace() -> None:
    """Fixed bug: as the first in line, it kept all nodes that it asked for from the jobs of other namespaces."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", **{"limits.cpu": "100"})
        refused = cluster.submit("refused", **{**SPEC, "nodes": {"min": 6, "max": 6}})
        await operator.watch()
        other = cluster.submit("other", "team-b", second=1, **{**SPEC, "epochs": 1_000_000})
        await operator.watch()
        assert (operator.planned(refused), operator.planned(other)) == ("QuotaNeedsLimit", "Planned")

    on_six_nodes(body)


def test_job_waits_for_no_devices_that_its_quota_would_not_give_it() -> None:
    """Fixed bug: with too few free nodes for it, a job with too small a quota was the first in line."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        running = cluster.submit("running", "team-b", **{**SPEC, "epochs": 100_000, "nodes": {"min": 3, "max": 3}})
        await operator.watch(1.0)
        await cluster.bind(await cluster.create_pods(running), "n0", "n1", "n2")
        cluster.quota("team-a", pods="2")
        large = cluster.submit("large", second=1, **{**SPEC, "nodes": {"min": 6, "max": 6}})
        await operator.watch()
        other = cluster.submit("other", "team-b", second=2, **{**SPEC, "epochs": 100_000})
        await operator.watch()
        assert (operator.planned(large), operator.planned(other)) == ("QuotaExceeded", "Planned")
        cluster.quota("team-a", pods="6")
        await operator.watch()
        one = {"nodes": {"min": 1, "max": 1}, "epochs": 1_000_000}  # longer than the others
        newer = cluster.submit("newer", "team-b", second=3, **{**SPEC, **one})
        await operator.watch(15.0)
        assert (operator.planned(large), operator.planned(newer)) == ("DeviceBusy", "Queued")

    on_six_nodes(body)
