"""Tests that the operator notices a watch that no longer sends anything, and only such a watch.

The real classes run in virtual time, on an API server whose watch of one kind is silent.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from dljob.controller.planning.background import Planning
from dljob.controller.queues import Queues
from dljob.controller.watches import REFLECTED, Watches
from dljob.controller.watches import watches as watches_module
from dljob.controller.watches.watches import DEAD_SILENCES
from dljob.controller.work_queue import WorkQueue
from dljob.job.observed import JOB_LABEL
from dljob.kube import Api, ApiError, Cache, JobKey
from dljob.kube.kinds import DLJOB, Kind
from dljob.kube.leader import Leader
from dljob.kube.watch import activity, reflector
from dljob.kube.watch.reflector import SILENCE_S
from support.builders import T4
from support.controller.fake_operator import SPEC, Operator
from support.servers.fake_api import FakeCluster
from support.virtual_time import now_s, run

Json = dict[str, Any]
DEAD_S = DEAD_SILENCES * SILENCE_S
BOOKMARK_S = 60.0
NO_ANSWER = ApiError(0, "ServerTimeoutError", "GET /")


@dataclass
class WatchedApi(Api):
    """An API server in virtual time. Objects of all kinds change all the time, except of the kinds ``quiet``."""

    silent: set[str] = field(default_factory=set)
    """Kinds whose watches begin, and send nothing."""
    unanswered: set[str] = field(default_factory=set)
    """Kinds whose watches do not begin."""
    quiet: set[str] = field(default_factory=set)
    """Kinds without changes. Their watches send no bookmarks, as with an etcd older than 3.5."""
    down: bool = False
    server: str = "https://api"

    def _version(self, plural: str) -> str:
        return "1" if plural in self.quiet else str(int(1 + now_s()))

    def _object(self, kind: Kind) -> Json:
        version = self._version(kind.plural)
        meta = {"name": f"x-{version}", "uid": f"u-{version}", "creationTimestamp": "2026-01-01T00:00:00Z"}
        meta |= {"resourceVersion": version} | ({"namespace": "team-a"} if kind.namespaced else {})
        affinity = {"required": {"nodeSelectorTerms": []}}  # Without it, the cache would not hold a volume.
        spec = {"podSets": [], "nodeAffinity": affinity}
        return {"metadata": {**meta, "labels": {JOB_LABEL: "digits"}}, "spec": spec, "status": {}}

    async def page(self, kind: Kind, *_: Any) -> Json:
        if self.down:
            await asyncio.sleep(60)
            raise NO_ANSWER
        return {"metadata": {"resourceVersion": self._version(kind.plural)}, "items": [self._object(kind)]}

    async def metadata(self, kind: Kind, *_: Any) -> tuple[list[Json], int | None]:
        page = await self.page(kind)
        return [{"namespace": "", **item["metadata"]} for item in page["items"]], 1

    async def versions_of(self, _: str) -> tuple[str, ...]:
        return ("v1beta2",)

    async def watch(self, kind: Kind, *args: Any) -> AsyncIterator[bytes]:
        if self.down or kind.plural in self.unanswered:
            await asyncio.sleep(SILENCE_S)
            raise NO_ANSWER
        while kind.plural not in self.silent | self.quiet:
            await asyncio.sleep(BOOKMARK_S)
            if kind.plural not in self.silent:
                yield b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"%d"}}}' % (1 + now_s())
        await asyncio.sleep(SILENCE_S)


@pytest.fixture(autouse=True)
def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (reflector, activity, watches_module):
        monkeypatch.setattr(module, "monotonic", now_s)
    yield


class Observer:
    """The watches of an operator on a ``WatchedApi``."""

    def __init__(self, api: WatchedApi, namespaces: tuple[str, ...] = ()) -> None:
        session: Any = object()
        self.cache, queue = Cache(queues=True), WorkQueue[JobKey]()
        self.watches = Watches(self.cache, queue, api, namespaces, lambda _: session, lambda: None)
        self.queues = Queues(api, self.cache, namespaces, queue.add)

    def dead(self) -> str | None:
        return self.watches.dead(self.queues.reflectors)

    async def run(self, seconds: float, heard: Callable[[], None] = lambda: None) -> None:
        """Watch for some seconds. ``heard``: called each second, in place of kopf's watch of DLJobs."""
        running = [asyncio.create_task(self.watches.reflect()), asyncio.create_task(self.queues.run())]
        for _ in range(int(seconds)):
            await asyncio.sleep(1)
            heard()
        assert not any(task.done() for task in running)
        self.found = self.dead()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def jobs_heard_in(world: Observer, namespace: str | None = None, *, works: bool = True) -> Callable[[], None]:
    """Return a callback that acts as kopf's watch of DLJobs. ``works``: False: it sends requests and gets no event."""
    found = world.watches._activity.active if works else world.watches._activity.asked
    return lambda: found(namespace)


def found_after(api: WatchedApi, seconds: float, *, jobs_heard: bool = True) -> str | None:
    async def body() -> str | None:
        world = Observer(api)
        await world.run(seconds, jobs_heard_in(world) if jobs_heard else lambda: None)
        return world.found

    return run(body())


KINDS = [*(kind.plural for kind in REFLECTED), "workloads"]


@pytest.mark.parametrize("how", ["silent", "unanswered"])
@pytest.mark.parametrize("plural", KINDS)
def test_one_silent_watch_is_dead_although_the_others_go_on(plural: str, how: str) -> None:
    api = WatchedApi()
    getattr(api, how).add(plural)
    assert found_after(api, DEAD_S - 30) is None
    found = found_after(api, DEAD_S + SILENCE_S)
    assert found is not None and found.startswith(f"the watch of {plural} ")


def test_watch_of_jobs_that_misses_changes_is_dead() -> None:
    assert found_after(WatchedApi(), DEAD_S - 1, jobs_heard=False) is None
    found = found_after(WatchedApi(), DEAD_S + 1, jobs_heard=False)
    assert found is not None and found.startswith("the watch of dljobs ")


@pytest.mark.parametrize("plural", [*KINDS, "dljobs"])
def test_watch_is_not_dead_while_nothing_changes(plural: str) -> None:
    """With an etcd older than 3.5, there are no bookmarks. The operator was restarted every four minutes."""
    api = WatchedApi(quiet={plural})
    if plural == "dljobs":
        body = {**api._object(DLJOB), "spec": {}}
        api.metadata = _as_in(body)  # type: ignore[method-assign]

    async def main() -> str | None:
        world = Observer(api)
        if plural == "dljobs":
            world.cache.put(DLJOB, body)
        # While no event arrives, kopf opens the watch of DLJobs again and again.
        await world.run(4 * DEAD_S, jobs_heard_in(world, works=plural != "dljobs"))
        return world.found

    assert run(main()) is None


def test_watch_of_jobs_that_kopf_no_longer_opens_is_dead_although_no_job_changes() -> None:
    """A task of kopf that has ended would otherwise be noticed only with the next change of a job."""

    async def main() -> list[str | None]:
        api = WatchedApi()
        body = {**api._object(DLJOB), "spec": {}}
        api.metadata = _as_in(body)  # type: ignore[method-assign]
        world, found = Observer(api), list[str | None]()
        world.cache.put(DLJOB, body)
        for seconds in (DEAD_S - 1, DEAD_S + 2 * SILENCE_S):
            await world.run(seconds)
            found.append(world.found)
        return found

    before, after = run(main())
    assert before is None and after is not None and after.startswith("the watch of dljobs ")


def _as_in(body: Json) -> Callable[..., Any]:
    async def metadata(*_: Any) -> tuple[list[Json], int | None]:
        return [body["metadata"]], 1

    return metadata


def test_job_that_cannot_be_read_does_not_make_the_watch_dead() -> None:
    """Its owner could otherwise restart the operator again and again."""

    async def main() -> str | None:
        api = WatchedApi()
        body = api._object(DLJOB)
        api.metadata = _as_in(body)  # type: ignore[method-assign]
        world = Observer(api)
        unreadable: Any = {**body, "spec": 1}
        with pytest.raises(TypeError):
            await world.watches._put(unreadable)
        await world.run(4 * DEAD_S, jobs_heard_in(world, works=False))
        return world.found

    assert run(main()) is None


def test_watches_are_not_dead_while_the_api_server_is_down() -> None:
    """A restart would not help."""
    api = WatchedApi()

    async def main() -> list[str | None]:
        world, found = Observer(api), []
        asyncio.get_running_loop().call_later(300, lambda: setattr(api, "down", True))
        for seconds in (300 + 4 * DEAD_S, 0):
            await world.run(seconds)
            found.append(world.found)
        return found

    assert run(main()) == [None, None]


def test_watches_are_not_dead_when_the_api_server_is_back() -> None:
    """Each watch notices that at another time."""
    api = WatchedApi(down=True)

    async def main() -> list[str | None]:
        world, found = Observer(api), list[str | None]()
        loop = asyncio.get_running_loop()
        loop.call_later(1000, lambda: setattr(api, "down", False))

        def each_second() -> None:
            if not api.down:
                jobs_heard_in(world)()
            found.append(world.dead())

        await world.run(2000, each_second)
        return found

    assert set(run(main())) == {None}


def test_watches_of_many_namespaces_are_not_dead_while_the_api_server_is_down() -> None:
    """The answers about the namespaces together take longer than a watch may be silent."""
    api = WatchedApi(down=True)

    async def main() -> set[str | None]:
        world, found = Observer(api, tuple(f"team-{i}" for i in range(30))), set[str | None]()
        await world.run(4 * DEAD_S, lambda: found.add(world.watches.dead()))
        return found

    assert run(main()) == {None}


def test_namespace_whose_list_has_no_answer_does_not_hide_a_dead_watch() -> None:
    class HalfDownApi(WatchedApi):
        async def metadata(self, kind: Kind, namespace: str | None = None, *_: Any) -> tuple[list[Json], int | None]:
            if namespace == "team-a":
                await asyncio.sleep(60)
                raise NO_ANSWER
            return await super().metadata(kind)

    async def main() -> str | None:
        world = Observer(HalfDownApi(), ("team-a", "team-b", "team-c"))
        asks, works = jobs_heard_in(world, "team-a", works=False), jobs_heard_in(world, "team-c")

        def each_second() -> None:
            asks()
            works()

        await world.run(3 * DEAD_S, each_second)
        return world.found

    found = run(main())
    assert found is not None and found.startswith("the watch of dljobs in team-b ")


def test_planning_that_hangs_is_noticed() -> None:
    """The planner has a time limit, but what is around it has none."""

    async def main() -> tuple[str | None, str | None, str | None]:
        cluster = FakeCluster()
        cluster.node("n1", T4, 1)
        operator = Operator(cluster)
        planning: Planning = operator.planning
        idle = planning.stuck(0.0)
        async with operator:
            await operator.watch(100.0)
            works = planning.stuck(10.0)
            operator.hangs = cluster.submit("first", **SPEC)
            await operator.watch(100.0)
            return idle, works, planning.stuck(60.0)

    idle, works, hangs = run(main())
    assert idle is None and works is None and hangs is not None and "planning" in hangs


@pytest.mark.parametrize("leads", [False, True])
def test_lease_that_is_not_renewed_is_noticed(leads: bool) -> None:
    class Hanging(Api):
        def __init__(self) -> None:
            self.hangs = not leads

        async def find(self, *_: Any, **__: Any) -> list[Json]:
            return []

        async def get(self, *_: Any) -> Json:
            if self.hangs:
                with pytest.raises(asyncio.CancelledError):  # As code that ignores the time limit.
                    await asyncio.sleep(1e6)
                await asyncio.sleep(1e6)
            raise ApiError(404, "NotFound", "")

        async def create(self, *_: Any) -> Json:
            return {"metadata": {"resourceVersion": "1"}}

    async def main() -> list[str | None]:
        api = Hanging()
        leader = Leader(api, "dljob-system", "one", clock=now_s)
        found = [leader.stuck(0.0)]
        task = asyncio.create_task(leader.acquire())
        if leads:
            await task
            api.hangs = True
            task = asyncio.create_task(leader.hold())
        await asyncio.sleep(100)
        found += [leader.stuck(300.0), leader.stuck(60.0)]
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    before, soon, late = run(main())
    assert before is None and soon is None and late is not None and "Lease" in late
