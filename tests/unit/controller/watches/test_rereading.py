"""Tests that an object for which the cache had no room is read again once there is room, without an event of its own."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dljob.controller.watches import Watches
from dljob.controller.watches import watches as watches_module
from dljob.controller.watches.rereading import MAX_READS
from dljob.controller.work_queue import WorkQueue
from dljob.kube import Api, ApiError, Cache, JobKey
from dljob.kube.kinds import CONFIG_MAP, DLJOB, Kind
from dljob.kube.watch.reflector import SILENCE_S
from support.manifests.watched import DLJOB_OWNER, Json
from support.virtual_time import now_s, run

LONG, SHORT = 2500, 10


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave room for two long specs, or for two plans of 200,000 bytes, in each namespace."""
    monkeypatch.setattr(watches_module, "monotonic", now_s)
    monkeypatch.setattr("dljob.kube.objects.stored_texts.MAX_NAMESPACE_NBYTES", 500_000)
    yield


def job(name: str, values: int = LONG, version: int = 1) -> Json:
    meta = {"namespace": "team-a", "name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    meta |= {"creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": meta, "spec": {"podTemplateOverrides": [{}] * values}}


def plan(name: str, nbytes: int = 200_000) -> Json:
    owner = {**DLJOB_OWNER, "name": name, "uid": f"uid-{name}"}
    meta = {"namespace": "team-a", "name": f"{name}-plan", "uid": f"plan-{name}", "resourceVersion": "1"}
    meta |= {"labels": {"dljob.dev/job": name}, "ownerReferences": [owner]}
    return {"metadata": meta, "data": {"plan.json": "x" * nbytes}}


@dataclass
class Server(Api):
    """An API server that knows the objects ``bodies``, and counts how often each is read."""

    bodies: dict[tuple[str, str], Json] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    server: str = "https://api"

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        self.reads.append(name)
        if (kind.plural, name) not in self.bodies:
            raise ApiError(404, "NotFound", "")
        return self.bodies[kind.plural, name]

    async def metadata(self, *_: Any) -> tuple[list[Json], int | None]:
        return [], 1


@dataclass
class World:
    api: Server = field(default_factory=Server)
    cache: Cache = field(default_factory=Cache)
    queue: WorkQueue[JobKey] = field(default_factory=WorkQueue)

    def add(self, *objects: tuple[Kind, Json]) -> None:
        for kind, body in objects:
            self.api.bodies[kind.plural, body["metadata"]["name"]] = body
            self.cache.put(kind, body)

    def refused(self, name: str) -> bool:
        found = self.cache.job(("team-a", name))
        return found is not None and found.spec_problem is not None

    def plan(self, name: str) -> str | None:
        found = self.cache.found(CONFIG_MAP, "team-a", f"{name}-plan")
        assert found is not None
        text: str | None = found.seen.plan.get("plan.json")
        return text

    async def checked(self) -> list[JobKey]:
        """Run one check of the watches, and return the jobs that it has queued."""
        session: Any = object()
        watches = Watches(self.cache, self.queue, self.api, (), lambda _: session, lambda: None)
        checks = asyncio.create_task(watches._check_jobs())
        await asyncio.sleep(0.4 * SILENCE_S)
        checks.cancel()
        await asyncio.gather(checks, return_exceptions=True)
        return [await self.queue.get() for _ in range(len(self.queue))]


def in_world(body: Callable[[World], Any]) -> None:
    async def main() -> None:
        await body(World())

    run(main())


def test_refused_job_is_read_again_when_another_is_deleted() -> None:
    """Fixed bug: the job stayed refused until its next event."""

    async def body(world: World) -> None:
        world.add(*((DLJOB, job(f"job-{i}")) for i in range(4)))
        assert [world.refused(f"job-{i}") for i in range(4)] == [False, False, True, True]
        assert await world.checked() == [] and not world.api.reads, "nothing has changed"
        world.cache.drop(DLJOB, "team-a", "job-0")
        assert await world.checked() == [("team-a", "job-2")]
        assert (world.refused("job-2"), world.refused("job-3"), world.api.reads) == (False, True, ["job-2"])

    in_world(body)


def test_refused_job_is_read_again_when_another_becomes_shorter() -> None:
    async def body(world: World) -> None:
        world.add(*((DLJOB, job(f"job-{i}")) for i in range(3)))
        world.add((DLJOB, job("job-1", SHORT, version=2)))
        assert await world.checked() == [("team-a", "job-2")] and not world.refused("job-2")

    in_world(body)


def test_refused_plan_is_read_again_when_a_job_is_deleted() -> None:
    async def body(world: World) -> None:
        world.add(*((CONFIG_MAP, plan(f"job-{i}")) for i in range(3)))
        assert world.plan("job-2") is None
        world.cache.drop(CONFIG_MAP, "team-a", "job-0-plan")
        assert await world.checked() == [("team-a", "job-2")]
        assert world.plan("job-2") is not None

    in_world(body)


def test_refused_job_that_no_longer_exists_is_left_to_the_watch() -> None:
    async def body(world: World) -> None:
        world.add(*((DLJOB, job(f"job-{i}")) for i in range(3)))
        world.cache.drop(DLJOB, "team-a", "job-0")
        world.api.bodies.clear()
        assert await world.checked() == [] and world.refused("job-2")
        world.cache.drop(DLJOB, "team-a", "job-2")
        world.api.reads.clear()
        assert await world.checked() == [] and not world.api.reads

    in_world(body)


def test_one_check_reads_a_limited_number_of_objects() -> None:
    async def body(world: World) -> None:
        world.add(*((DLJOB, job(f"large-{i}", 2990)) for i in range(2)))
        names = [f"small-{i}" for i in range(2 * MAX_READS)]
        world.add(*((DLJOB, job(name, 510)) for name in names))
        refused = [name for name in names if world.refused(name)]
        assert len(refused) > MAX_READS
        world.cache.drop(DLJOB, "team-a", "large-0")
        assert len(await world.checked()) == MAX_READS
        assert [name for name in refused if world.refused(name)] == refused[MAX_READS:]

    in_world(body)
