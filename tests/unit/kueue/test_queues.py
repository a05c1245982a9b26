"""Tests of the operator's access to Kueue, which may appear, forbid access, or disappear while the operator runs."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from dljob.controller import queues
from dljob.controller.queues import FIRST_LOOK_S, FLAVOR_S, FORBIDDEN, NOT_SERVED, RECHECK_S, Queues
from dljob.job.observed import Observed
from dljob.job.queue import Flavor
from dljob.kube import ApiError, Cache, JobKey, RejectedError
from dljob.kube.kinds import DLJOB, Kind
from dljob.kube.kinds import WORKLOAD as WORKLOADS
from dljob.kueue import Stage, turn
from dljob.reconcile import WorkloadChange
from dljob.render import Names
from support.builders import UID
from support.kueue import replay
from support.virtual_time import run

Json = dict[str, Any]
KEY = ("team-a", "digits")
JOB: Json = {
    "metadata": {
        "name": "digits", "namespace": "team-a", "uid": UID, "creationTimestamp": "2026-03-01T11:59:58Z",
        "labels": {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "high"},
    },
    "spec": {"scheduling": {"priorityClassName": "pods"}},
}  # fmt: skip
WORKLOAD: Json = {
    "apiVersion": "kueue.x-k8s.io/v1beta2",
    "kind": "Workload",
    "metadata": {
        "name": f"dljob-digits-{UID[:8]}", "namespace": "team-a", "uid": "w", "resourceVersion": "5",
        "labels": {"dljob.dev/job": "digits"}, "annotations": {"dljob.dev/spec": "v1-1"},
        "ownerReferences": [{"kind": "DLJob", "name": "digits", "uid": UID, "controller": True}],
    },
    "spec": {"queueName": "q", "podSets": [{"name": "cpu", "count": 2, "template": {}}]},
}  # fmt: skip


class Api:
    """The API server. ``served``: versions of Kueue's API. ``error``: raised by the next write or list."""

    def __init__(self) -> None:
        self.served: tuple[str, ...] = ()
        self.error: ApiError | None = None
        self.errors: dict[str | None, ApiError] = {}
        """By namespace: raised by each list."""
        self.workloads: list[Json] = []
        self.objects: dict[tuple[str, str], Json] = {}
        self.calls: list[tuple[str, Json]] = []

    async def versions_of(self, group: str) -> tuple[str, ...]:
        assert group == "kueue.x-k8s.io"
        return self.served

    async def page(self, _: Kind, namespace: str | None, *__: object) -> Json:
        if self.error is not None:
            raise self.error
        if namespace in self.errors:
            raise self.errors[namespace]
        if namespace is not None:
            found = [each for each in self.workloads if each["metadata"]["namespace"] == namespace]
            return {"items": found, "metadata": {"resourceVersion": "9"}}
        return {"items": self.workloads, "metadata": {"resourceVersion": "9"}}

    async def watch(self, *_: object) -> AsyncIterator[bytes]:
        await asyncio.sleep(1e9)
        yield b""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        assert namespace is None
        if (kind.plural, name) not in self.objects:
            raise ApiError(404, "NotFound", name)
        return self.objects[kind.plural, name]

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Json, subresource: str = "") -> Json:
        self.calls.append((f"merge {kind.api_version} {name} {subresource}".strip(), patch))
        if self.error is not None:
            raise self.error
        return replay.merged(WORKLOAD, {key: value for key, value in patch.items() if key != "metadata"})


class World:
    def __init__(self, *namespaces: str) -> None:
        self.api, self.cache, self.queued = Api(), Cache(queues=True), list[JobKey]()
        self.cache.put(DLJOB, JOB)
        api: Any = self.api
        self.queues = Queues(api, self.cache, namespaces, self.queued.append)

    async def look(self) -> None:
        """Run the watch of Kueue's API for a while."""
        task = asyncio.create_task(self.queues.run())
        await asyncio.sleep(2 * RECHECK_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def observed(self, key: JobKey = KEY) -> Observed:
        found = self.cache.observe(key)
        assert found is not None
        return found


@pytest.mark.parametrize(
    ("served", "error", "expected"),
    [
        ((), None, ("", NOT_SERVED)),
        (("v1alpha1",), None, ("", NOT_SERVED)),
        (("v1beta1",), None, ("kueue.x-k8s.io/v1beta1", "")),
        (("v1beta1", "v1beta2"), None, ("kueue.x-k8s.io/v1beta2", "")),
        (("v1beta2",), ApiError(403, "Forbidden", "no"), ("", FORBIDDEN)),
    ],
)
def test_version_of_kueue_is_found(served: tuple[str, ...], error: ApiError | None, expected: tuple[str, str]) -> None:
    async def body() -> None:
        world = World()
        world.api.served, world.api.error = served, error
        await world.look()
        queue = world.observed().queue
        assert (queue.api_version, queue.problem) == expected and world.queues.looked.is_set()

    run(body())


@pytest.mark.parametrize(
    ("error", "problem"),
    [(ApiError(403, "Forbidden", "no"), FORBIDDEN), (ApiError(500, "InternalError", "no"), "does not list")],
)
def test_namespace_that_cannot_be_read_does_not_affect_the_others(error: ApiError, problem: str) -> None:
    """Fixed bug: jobs of all watched namespaces waited if the Workloads of one of them could not be read."""

    async def body() -> None:
        world = World("team-a", "team-b")
        world.api.served, world.api.workloads = ("v1beta2",), [WORKLOAD]
        world.api.errors["team-b"] = error
        other = {**JOB, "metadata": {**JOB["metadata"], "namespace": "team-b", "uid": "other"}}
        world.cache.put(DLJOB, other)
        task = asyncio.create_task(world.queues.run())
        async with asyncio.timeout(2 * FIRST_LOOK_S):
            await world.queues.looked.wait()
        queue, unread = world.observed().queue, world.observed(("team-b", "digits")).queue
        assert (queue.api_version, queue.problem) == ("kueue.x-k8s.io/v1beta2", "") and queue.workload is not None
        assert unread.api_version == "" and problem in unread.problem
        assert turn(unread).stage is Stage.NO_KUEUE, "not ABSENT, so that its pods run on"
        change = WorkloadChange("name", "w", "5", status={"admission": None})
        await world.queues.change(world.observed(("team-b", "digits")).job, change)
        assert world.api.calls == []
        world.queued.clear()
        del world.api.errors["team-b"]
        await asyncio.sleep(2 * RECHECK_S + FIRST_LOOK_S)
        assert world.observed(("team-b", "digits")).queue.api_version == "kueue.x-k8s.io/v1beta2"
        assert world.queued == [("team-b", "digits")]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert world.queues.reflectors == ()

    run(body())


def test_permission_that_is_missing_later_keeps_what_was_read() -> None:
    async def body() -> None:
        world = World("team-a", "team-b")
        world.api.served, world.api.workloads = ("v1beta2",), [WORKLOAD]
        task = asyncio.create_task(world.queues.run())
        await asyncio.sleep(1)
        world.api.errors["team-a"] = ApiError(403, "Forbidden", "no")
        await asyncio.sleep(10 * RECHECK_S)
        queue = world.observed().queue
        assert queue.api_version and queue.workload is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(body())


def test_kueue_that_is_installed_later_is_noticed() -> None:
    async def body() -> None:
        world = World()
        task = asyncio.create_task(world.queues.run())
        await asyncio.sleep(1)
        assert world.observed().queue.problem == NOT_SERVED and not world.queued
        world.api.served, world.api.workloads = ("v1beta2",), [WORKLOAD]
        await asyncio.sleep(2 * RECHECK_S)
        workload = world.observed().queue.workload
        assert workload is not None and workload.queue == "q" and KEY in world.queued
        world.api.served = ()
        await asyncio.sleep(2 * RECHECK_S)
        assert world.observed().queue.problem == NOT_SERVED
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(body())


def test_watch_that_fails_is_begun_again() -> None:
    async def body() -> None:
        world = World()
        world.api.served, world.api.workloads = ("v1beta2",), []
        watch = world.api.watch

        async def broken(*_: object) -> AsyncIterator[bytes]:
            raise RuntimeError("a defect")
            yield b""

        world.api.watch = broken  # type: ignore[method-assign]
        task = asyncio.create_task(world.queues.run())
        await asyncio.sleep(1)
        world.api.watch, world.api.workloads = watch, [WORKLOAD]  # type: ignore[method-assign]
        await asyncio.sleep(2 * RECHECK_S)
        assert world.observed().queue.workload is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(body())


OVERLOADED = ApiError(500, "InternalError", "conversion webhook")


@pytest.mark.parametrize("when", ["before the first look", "between the look and the list"])
def test_workloads_that_cannot_be_listed_do_not_stop_the_operator(when: str) -> None:
    """Jobs in a queue wait and say why, until the API server lists the Workloads."""

    async def body() -> None:
        world = World()
        world.api.served, world.api.workloads = ("v1beta2",), [WORKLOAD]
        pages, page = 0, world.api.page

        async def failing(*args: object) -> Json:
            nonlocal pages
            pages += 1
            if pages > 1 or when == "before the first look":
                raise OVERLOADED
            return await page(*args)

        world.api.page = failing  # type: ignore[method-assign]
        task = asyncio.create_task(world.queues.run())
        async with asyncio.timeout(2 * FIRST_LOOK_S):
            await world.queues.looked.wait()
        queue = world.observed().queue
        assert queue.api_version == "" and "does not list the Workloads" in queue.problem and KEY in world.queued
        world.queued.clear()
        await asyncio.sleep(10 * RECHECK_S)
        assert world.queued == [], "nothing has changed"
        world.api.page = page  # type: ignore[method-assign]
        await asyncio.sleep(2 * RECHECK_S + FIRST_LOOK_S)
        queue = world.observed().queue
        assert (queue.api_version, queue.problem) == ("kueue.x-k8s.io/v1beta2", "") and queue.workload is not None
        assert KEY in world.queued
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(body())


def test_workload_of_another_owner_is_not_the_jobs() -> None:
    async def body() -> None:
        world = World()
        owners = [{"kind": "DLJob", "name": "digits", "uid": "other", "controller": True}]
        world.api.served = ("v1beta2",)
        world.api.workloads = [{**WORKLOAD, "metadata": {**WORKLOAD["metadata"], "ownerReferences": owners}}]
        await world.look()
        assert world.observed().queue.workload is None

    run(body())


def test_flavors_and_priority_are_read_when_they_are_needed() -> None:
    async def body() -> None:
        world = World()
        world.api.served = ("v1beta2",)
        await world.look()
        assert (await world.queues.added_to(world.observed())).queue.priority is None, "there is no such class"
        world.api.objects["workloadpriorityclasses", "high"] = {"value": 100}
        world.api.objects["priorityclasses", "pods"] = {"value": 5}
        assert (await world.queues.added_to(world.observed())).queue.priority == 100, "Kueue's class comes first"
        world.api.objects["resourceflavors", "a"] = {"spec": {"nodeLabels": {"zone": "a"}}}
        world.cache.put(WORKLOADS, replay.admitted(WORKLOAD, None, "a"))
        assert (await world.queues.added_to(world.observed())).queue.flavors == {"a": Flavor({"zone": "a"})}

    run(body())


def test_only_flavors_that_were_just_read_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed bug: the operator kept each class that a job ever named, also those that never existed."""
    at_s, kind = 0.0, Kind("kueue.x-k8s.io/v1beta2", "ResourceFlavor", "resourceflavors", namespaced=False)

    async def body() -> None:
        nonlocal at_s
        world = World()
        for i in range(20):
            world.api.objects[kind.plural, f"flavor-{i}"] = {}
            assert await world.queues._read(kind, f"flavor-{i}") == {}
            assert await world.queues._read(kind, f"missing-{i}") is None
            at_s += FLAVOR_S / 2
        assert len(world.queues._known) == 2

    monkeypatch.setattr(queues, "monotonic", lambda: at_s)
    run(body())


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (None, None),
        (ApiError(409, "Conflict", "Kueue wrote first"), None),
        (ApiError(404, "NotFound", "gone"), None),
        (ApiError(422, "Invalid", "immutable"), RejectedError),
        (ApiError(500, "InternalError", "failed calling webhook"), ApiError),
    ],
)
def test_changes_of_a_workload(error: ApiError | None, raised: type[Exception] | None) -> None:
    async def body() -> None:
        world = World()
        world.api.served = ("v1beta2",)
        await world.look()
        world.api.error = error
        job = world.observed().job
        change = WorkloadChange(Names.of(job).workload, "w", "5", status={"admission": None})
        if raised is None:
            await world.queues.change(job, change)
        else:
            with pytest.raises(raised):
                await world.queues.change(job, change)
        [(call, patch)] = world.api.calls
        assert call == f"merge kueue.x-k8s.io/v1beta2 {change.name} status"
        assert patch["metadata"] == {"uid": "w", "resourceVersion": "5"}, "Kueue's writes must not be overwritten"

    run(body())


def test_label_has_no_effect_if_the_installation_ignores_it() -> None:
    cache = Cache()
    cache.put(DLJOB, JOB)
    job = cache.job(KEY)
    assert job is not None and not job.queue
    assert replace(job, queue="q").queue
