"""Tests of an operator that leads again after another one has led: nothing is counted twice."""

from typing import Any

import pytest

from dlcontract import RunPhase
from dljob.calibrate.memory import MemoryPoint
from dljob.kube import ApiError, JobKey
from dljob.reconcile import RunMemory
from support.controller.fake_operator import SPEC, Operator, on_two_nodes
from support.job_lifecycle import done, step
from support.servers.fake_api import FakeCluster

NO_ETCD = ApiError(500, "InternalError", "no etcd")


def counts(cluster: FakeCluster) -> dict[str, int]:
    """Return how often each event was posted, by reason."""
    events = (body for (plural, _, _), body in cluster.api.objects.items() if plural == "events")
    return {str(event["reason"]): int(event["count"]) for event in events}


async def suspended_without_event(cluster: FakeCluster, operator: Operator) -> JobKey:
    """Return a job whose event Suspended could not be posted. The operator does not lead any more."""
    cluster.api.uncreated["Event"] = NO_ETCD
    key = cluster.submit("first", **SPEC, suspend=True)
    await operator.watch()
    del cluster.api.uncreated["Event"]
    await operator.__aexit__()
    return key


async def lead_again(cluster: FakeCluster, operator: Operator, key: JobKey) -> None:
    cluster.listed(operator.cache)
    operator.controller.begin()
    await operator.__aenter__()
    operator.queue.add(key)
    await operator.watch(30.0)


def test_event_that_another_operator_has_posted_meanwhile_is_counted_once() -> None:
    """Fixed bug: the operator posted its own unsent event again when it led again."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = await suspended_without_event(cluster, operator)
        async with Operator(cluster) as other:
            other.queue.add(key)
            await other.watch()
        assert counts(cluster)["Suspended"] == 1
        await lead_again(cluster, operator, key)
        assert counts(cluster)["Suspended"] == 1

    on_two_nodes(body)


def test_event_that_no_operator_has_posted_meanwhile_is_counted_once() -> None:
    """Fixed bug: the unsent event and the one that the condition of the job shows were both posted."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = await suspended_without_event(cluster, operator)
        assert "Suspended" not in counts(cluster)
        await lead_again(cluster, operator, key)
        assert counts(cluster)["Suspended"] == 1

    on_two_nodes(body)


def test_event_is_counted_once_if_events_could_neither_be_posted_nor_listed() -> None:
    """Fixed bug: the unsent event and the one that the condition of the job shows were both posted."""

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        key = cluster.submit("first", **SPEC, suspend=True)
        await operator.watch()
        await operator.__aexit__()
        cluster.api.uncreated["Event"] = cluster.api.unlisted["Event"] = NO_ETCD
        async with Operator(cluster) as other:
            await cluster.edit(key, suspend=False)
            await other.watch(1.0)
            assert other.planned(key) == "Planned" and counts(cluster) == {"Suspended": 1}
            del cluster.api.uncreated["Event"], cluster.api.unlisted["Event"]
            await other.watch(60.0)
        assert counts(cluster)["Planned"] == 1

    on_two_nodes(body)


class Profiles:
    """Counts the writes to profiles. The first one of each kind fails."""

    def __init__(self) -> None:
        self.runs, self.memories = -1, -1

    async def update_profiles(self, found: Any, namespace: str | None, now: object) -> None:
        self.runs += 1
        if not self.runs:
            raise NO_ETCD

    async def update_memory(self, found: Any, now: object) -> None:
        self.memories += 1
        if not self.memories:
            raise NO_ETCD


def test_run_that_another_operator_has_learned_from_meanwhile_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: measurements that the operator could not write were written again when it led again."""
    profiles, observed = Profiles(), done(RunPhase.SUCCEEDED)
    desired = step(observed)
    memory = RunMemory("program-1", "cpu", "team-a", MemoryPoint(1, None, "Data", 2**30, None))

    async def body(cluster: FakeCluster, operator: Operator) -> None:
        monkeypatch.setattr(operator.kube, "update_profiles", profiles.update_profiles)
        monkeypatch.setattr(operator.kube, "update_memory", profiles.update_memory)
        lessons = operator.controller._lessons
        assert await lessons.learn_all(observed.job, desired.measurements, memory) == [NO_ETCD, NO_ETCD]
        operator.controller.begin()  # Another operator has written both, and the outcome of the job.
        assert await lessons.learn_all(observed.job, None, None) == [None, None]
        assert (profiles.runs, profiles.memories) == (0, 0)
        for _ in range(2):  # If the status does not show the outcome yet, they are written, and once.
            assert await lessons.learn_all(observed.job, desired.measurements, memory) == [None, None]
            operator.controller.begin()
        assert (profiles.runs, profiles.memories) == (1, 1)

    on_two_nodes(body)
