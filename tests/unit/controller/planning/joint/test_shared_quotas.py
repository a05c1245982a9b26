"""All jobs of a namespace together get no more in an assignment than its quotas allow."""

from typing import Any

import pytest

from dljob.kube import JobKey
from dljob.kube.kinds import NODE, QUOTA
from support.builders import T4
from support.controller.fake_operator import Operator
from support.controller.shared_devices import LONG, OTHER, SHORT, devices_of, remove_pods, replicas, together, train
from support.servers.fake_api import FakeCluster

Json = dict[str, Any]
HIGH: Json = {"priorityClassName": "high"}
MI300X = "AMD-Instinct-MI300X-OAM"
SIZES: Json = {"cpu": "1500m", "memory": "3Gi"}


def parts(operator: Operator, keys: list[JobKey]) -> list[str]:
    """Return the device type of each part that a job has."""
    shares = [operator.planning._assigning.of(key) for key in keys]
    return [share.part.device for share in shares if share is not None and share.part is not None]


def add_quota(cluster: FakeCluster, spec: Json) -> None:
    meta = {"name": "scoped", "namespace": "team-a"}
    cluster.api._store(QUOTA, {"metadata": meta, "spec": spec, "status": {"hard": spec["hard"], "used": {}}})


async def large_job(cluster: FakeCluster, operator: Operator) -> JobKey:
    """Let a job of another namespace train on all eight GPUs of the node."""
    cluster.priority_class("high", 100)
    large = cluster.submit("large", "team-b", **LONG)
    await operator.watch(2.0)
    await train(cluster, operator, large, "n1")
    assert await devices_of(cluster, large) == {T4: 8}
    return large


async def six_jobs(cluster: FakeCluster, operator: Operator, **spec: Any) -> list[JobKey]:
    """Submit six jobs, and wait for the next assignment that moves running jobs."""
    jobs = [{**SHORT, "seed": i, "resources": SIZES, **spec} for i in range(6)]
    keys = [cluster.submit(f"short-{i}", second=i + 1, **each) for i, each in enumerate(jobs)]
    await operator.watch(45.0)
    return keys


@pytest.mark.parametrize(
    "hard",
    [
        {"requests.nvidia.com/gpu": "1"},
        {"pods": "1"},
        {"count/pods": "1"},
        {"cpu": "2"},
        {"requests.cpu": "2900m"},
        {"memory": "3Gi"},
        {"requests.memory": "5Gi"},
        {"limits.memory": "5Gi"},
        {"count/statefulsets.apps": "1"},
        {"count/configmaps": "100", "pods": "10", "requests.cpu": "2", "requests.amd.com/gpu": "0"},
    ],
    ids=lambda hard: ", ".join(hard),
)
def test_jobs_of_a_namespace_get_no_more_together_than_its_quota_allows(hard: dict[str, str]) -> None:
    """Fixed bug: each was compared with the quota alone, and a running job gave up devices that none might use."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", **hard)
        large = await large_job(cluster, operator)
        keys = await six_jobs(cluster, operator)
        assert operator.condition(large, "Resizing") == ("True", "DevicesReassigned")
        assert parts(operator, [large]) == [T4] and len(parts(operator, keys)) == 1

    together({"n1": T4}, body, gpus=8)


@pytest.mark.parametrize(
    ("scope", "scheduling", "starts"),
    [
        ({"scopes": ["NotTerminating"]}, {}, 1),
        ({"scopes": ["NotBestEffort"]}, {}, 1),
        ({"scopes": ["BestEffort"]}, {}, 6),
        ({"scopes": ["Terminating", "NotBestEffort"]}, {}, 6),
        ({"scopes": ["PriorityClass"]}, HIGH, 1),
        ({"scopes": ["PriorityClass"]}, {}, 6),
    ],
)
def test_a_quota_with_scopes_counts_for_the_jobs_whose_pods_it_selects(
    scope: Json, scheduling: Json, starts: int
) -> None:
    """Fixed bug: assignments ignored quotas with scopes."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        add_quota(cluster, {"hard": {"pods": "1"}, **scope})
        await large_job(cluster, operator)
        keys = await six_jobs(cluster, operator, scheduling=scheduling)
        assert len(parts(operator, keys)) == starts

    together({"n1": T4}, body, gpus=8)


def test_a_quota_of_one_priority_class_is_not_in_the_way_of_others() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        selector = {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}
        add_quota(cluster, {"hard": {"pods": "1"}, "scopeSelector": {"matchExpressions": [selector]}})
        await large_job(cluster, operator)
        high = [cluster.submit(f"high-{i}", **{**SHORT, "seed": 10 + i, "scheduling": HIGH}) for i in range(3)]
        keys = await six_jobs(cluster, operator)
        assert len(parts(operator, high)) == 1 and len(parts(operator, keys)) >= 3

    together({"n1": T4}, body, gpus=8)


def test_each_vendor_has_its_own_quota() -> None:
    """Fixed bug: in a namespace with GPUs of two vendors, each job was compared with the quotas alone."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        node = await cluster.api.get(NODE, None, "n1")
        allocatable = {"cpu": "16", "memory": "64Gi", "amd.com/gpu": "8"}
        meta = {"name": "n2", "labels": {"amd.com/gpu.product-name": MI300X}}
        cluster.api._store(NODE, {"metadata": meta, "status": {**node["status"], "allocatable": allocatable}})
        cluster.quota("team-a", **{"requests.nvidia.com/gpu": "1", "requests.amd.com/gpu": "1"})
        for i, device in enumerate((T4, MI300X), 1):
            runs = cluster.submit(f"runs-{i}", "team-b", **{**LONG, "seed": i, "devices": [device]})
            await operator.watch(2.0)
            await train(cluster, operator, runs, f"n{i}")
        keys = await six_jobs(cluster, operator)
        assert sorted(parts(operator, keys)) == sorted([T4, MI300X])

    together({"n1": T4}, body, gpus=8)


def test_a_job_needs_no_more_quota_than_it_uses_to_stay_on_its_devices() -> None:
    """The quota left less to its pod than an option may need, which is planned as if nothing else used the quota."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-b", {"requests.cpu": "4"}, **{"requests.cpu": "12"})
        large = await large_job(cluster, operator)
        cluster.quota("team-b", {"requests.cpu": "12"}, **{"requests.cpu": "12"})
        await six_jobs(cluster, operator)
        assigning = operator.planning._assigning
        uses = assigning._candidates.held(large, movable=True).uses
        found = assigning._candidates.options(large, assigning._known[large], running=True)
        assert [each.needs for each in found if each.devices == 8] == [uses] and sum(uses) > 0
        assert parts(operator, [large]) == [T4]

    together({"n1": T4}, body, gpus=8)


def test_jobs_of_several_pods_get_no_more_pods_together_than_the_quota_allows() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", pods="2")
        for i in range(4):
            runs = cluster.submit(f"runs-{i}", "team-b", **{**LONG, "seed": i, "nodes": {"min": 1, "max": 2}})
            await operator.watch(2.0)
            await train(cluster, operator, runs, f"n{2 * i}", f"n{2 * i + 1}")
        keys = await six_jobs(cluster, operator, nodes={"min": 2, "max": 2})
        assert len(parts(operator, keys)) == 1

    together({f"n{i}": T4 for i in range(8)}, body)


GPU = "requests.nvidia.com/gpu"


async def trains(
    cluster: FakeCluster, operator: Operator, name: str, *nodes: str, used: int, hard: int = 4, **spec: Any
) -> JobKey:
    """Let a job train on nodes. ``used``, ``hard``: GPUs that the quota of its namespace then shows."""
    key = cluster.submit(name, **spec)
    await operator.watch(2.0)
    await train(cluster, operator, key, *nodes)
    cluster.quota("team-a", {GPU: str(used)}, **{GPU: str(hard)})
    return key


async def stopped(cluster: FakeCluster, operator: Operator, key: JobKey, used: int, hard: int, lag_s: float) -> None:
    """Remove the pods of a job. After ``lag_s`` seconds, the quota of its namespace shows what is used then."""
    await remove_pods(cluster, operator, key, lag_s)
    cluster.quota("team-a", {GPU: str(used)}, **{GPU: str(hard)})
    await operator.watch(15.0)


@pytest.mark.parametrize("lag_s", [0.0, 5.0])
def test_a_running_job_gives_up_quota_for_one_that_waits_for_it(lag_s: float) -> None:
    """Fixed bug: four of eight GPUs were free, and the short job waited for the end of the long one."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", **{GPU: "4"})
        first = await trains(cluster, operator, "first", "n1", used=4, **LONG)
        assert await devices_of(cluster, first) == {T4: 4}
        second = cluster.submit("second", second=1, **SHORT)
        await operator.watch(45.0)
        assert operator.planned(second) == "QuotaExceeded"
        assert operator.condition(first, "Resizing") == ("True", "DevicesReassigned")
        assert "speeds up job second more" in operator.message(first, "Resizing")
        assert await replicas(cluster, first) == 0
        await stopped(cluster, operator, first, 0, 4, lag_s)
        assert operator.condition(first, "Resizing") == ("False", "Resized")
        assert (await devices_of(cluster, first), await devices_of(cluster, second)) == ({T4: 2}, {T4: 2})

    together({"n1": T4}, body, gpus=8)


@pytest.mark.parametrize(
    ("spec", "bound_only"),
    [
        ({}, True),
        ({"planning": {"resize": "Never"}}, False),
        ({"scheduling": {"disruption": "Avoid"}}, False),
        ({"scheduling": {"priorityClassName": "high"}}, False),
    ],
    ids=["has just started", "must not be resized", "must not be disrupted", "has a higher priority"],
)
def test_jobs_that_keep_their_quota(spec: Json, bound_only: bool) -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.priority_class("high", 100)
        cluster.quota("team-a", **{GPU: "4"})
        if bound_only:
            first = cluster.submit("first", **LONG)
            await operator.watch(2.0)
            await cluster.bind(await cluster.create_pods(first), "n1")
            cluster.quota("team-a", {GPU: "4"}, **{GPU: "4"})
        else:
            first = await trains(cluster, operator, "first", "n1", used=4, **{**LONG, **spec})
        second = cluster.submit("second", second=1, **SHORT)
        await operator.watch(100.0)
        assert operator.planned(second) == "QuotaExceeded" and not parts(operator, [second])
        assert operator.condition(first, "Resizing") is None and await replicas(cluster, first) == 1

    together({"n1": T4}, body, gpus=8)


def test_no_job_gives_up_quota_for_one_of_another_namespace() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", **{GPU: "4"})
        cluster.quota("team-b", {GPU: "2"}, **{GPU: "2"})
        first = await trains(cluster, operator, "first", "n1", used=4, **LONG)
        second = cluster.submit("second", "team-b", second=1, **SHORT)
        await operator.watch(100.0)
        assert operator.planned(second) == "QuotaExceeded"
        assert operator.condition(first, "Resizing") is None and await replicas(cluster, first) == 1

    together({"n1": T4}, body, gpus=8)


@pytest.mark.parametrize("lag_s", [0.0, 5.0])
def test_quota_that_a_job_gives_up_goes_to_the_one_that_gains_most(lag_s: float) -> None:
    """The older one of two waiting jobs is as long as the one that runs, and comes first in the queue."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", **{GPU: "2"})
        first = await trains(cluster, operator, "first", "n1", used=2, hard=2, **LONG)
        older = cluster.submit("older", second=1, **OTHER)
        await operator.watch(45.0)
        assert operator.condition(first, "Resizing") is None
        short = cluster.submit("short", second=2, **SHORT)
        await operator.watch(45.0)
        assert operator.condition(first, "Resizing") == ("True", "DevicesReassigned")
        assert "speeds up job short more" in operator.message(first, "Resizing")
        await stopped(cluster, operator, first, 0, 2, lag_s)
        await operator.watch(20.0)
        assert (await devices_of(cluster, first), await devices_of(cluster, short)) == ({T4: 1}, {T4: 1})
        assert operator.planned(older) == "QuotaExceeded"

    together({"n1": T4}, body, gpus=8)


def test_no_second_job_gives_up_quota_while_the_first_one_stops() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", **{GPU: "4"})
        two: Json = {**LONG, "nodes": {"min": 1, "max": 2}}
        runs = [await trains(cluster, operator, "first", "n1", "n2", used=2, **two)]
        runs.append(await trains(cluster, operator, "second", "n3", "n4", used=4, **{**two, "seed": 1}))
        assert [await devices_of(cluster, key) for key in runs] == [{T4: 2}, {T4: 2}]
        waits = cluster.submit("waits", second=2, **SHORT)
        await operator.watch(100.0)
        found = [operator.condition(key, "Resizing") for key in runs]
        assert sorted(found, key=str) == [("True", "DevicesReassigned"), None]
        moved = runs[found.index(("True", "DevicesReassigned"))]
        await stopped(cluster, operator, moved, 2, 4, 0.0)
        assert await devices_of(cluster, moved) == await devices_of(cluster, waits) == {T4: 1}

    together({f"n{i}": T4 for i in range(1, 7)}, body)


def test_no_job_gives_up_quota_that_a_stopping_job_is_about_to_release() -> None:
    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", **{GPU: "4"})
        two: Json = {**LONG, "nodes": {"min": 1, "max": 2}}
        stays = {**two, "seed": 1, "planning": {"resize": "Never"}}
        leaving = await trains(cluster, operator, "leaving", "n1", "n2", used=2, **stays)
        first = await trains(cluster, operator, "first", "n3", "n4", used=4, **two)
        await cluster.edit(leaving, suspend=True)
        await operator.watch(2.0)
        waits = cluster.submit("waits", second=2, **SHORT)
        await operator.watch(45.0)
        assert operator.condition(first, "Resizing") is None and await replicas(cluster, first) == 2
        await stopped(cluster, operator, leaving, 2, 4, 0.0)
        assert operator.planned(waits) == "Planned"

    together({f"n{i}": T4 for i in range(1, 7)}, body)


def test_a_job_that_moves_in_a_full_quota_does_not_go_back_to_its_old_plan() -> None:
    """Fixed bug: it did if the quota still showed the pods that had just stopped, and restarted for nothing."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        cluster.quota("team-a", **{GPU: "4"})
        first = await trains(cluster, operator, "first", "n1", used=4, **LONG)
        second = cluster.submit("second", "team-b", second=1, **SHORT)
        await operator.watch(45.0)
        assert operator.condition(first, "Resizing") == ("True", "DevicesReassigned")
        await stopped(cluster, operator, first, 0, 4, 5.0)
        assert operator.condition(first, "Resizing") == ("False", "Resized")
        assert (await devices_of(cluster, first), await devices_of(cluster, second)) == ({T4: 2}, {T4: 2})

    together({"n1": T4}, body, gpus=4)
