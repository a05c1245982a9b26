"""Tests of the watches, with real reflectors and kopf on an API server over HTTP.

An object that was deleted while no watch ran is noticed at the next list, and its job is reconciled. If kopf's
watch of DLJobs ends, the liveness probe fails.
"""

import asyncio
import signal
from typing import Any

import pytest
from kopf._cogs.aiokits.aiotasks import Scheduler
from kopf._cogs.aiokits.aiotoggles import ToggleSet
from kopf._core.engines import indexing

from dljob.controller import tasks
from dljob.controller.watches import REFLECTED
from dljob.controller.watches.kopf_settings import PAGE
from dljob.kube.kinds import DLJOB, POD, Kind
from support.controller.http_watches import SILENCE_S, WITHIN_S, HttpWatches, named, until, watching

Json = dict[str, Any]


@pytest.mark.parametrize("kind", REFLECTED, ids=lambda kind: kind.plural)
def test_object_that_was_deleted_while_no_watch_ran_is_dropped(kind: Kind) -> None:
    async def body(watched: HttpWatches) -> None:
        server, namespace = watched.server, "team-a" if kind.namespaced else ""

        def cached() -> set[str]:
            return {name for name in ("stays", "goes", "comes") if watched.cache.found(kind, namespace, name)}

        for name in ("stays", "goes"):
            server.put(kind, named(kind, name))
        await until(lambda: cached() == {"stays", "goes"} and server.watched(kind))
        watched.queued.clear()
        before = server.lists[kind.plural]
        server.delete(kind, namespace, "goes", heard=False)
        server.put(kind, named(kind, "comes"), heard=False)
        server.expire(kind)
        await until(lambda: cached() == {"stays", "comes"})
        assert server.lists[kind.plural] == before + 1
        assert not kind.namespaced or set(watched.queued) == {("team-a", "digits")}
        # The watch goes on where the list ended.
        await until(lambda: server.watched(kind))
        server.delete(kind, namespace, "comes")
        await until(lambda: cached() == {"stays"})

    watching(body)


@pytest.mark.parametrize("kind", [DLJOB, POD], ids=lambda kind: kind.plural)
def test_change_between_two_watches_is_in_the_second(kind: Kind) -> None:
    """A silent watch is closed and opened again, which takes long on a busy machine."""

    async def body(watched: HttpWatches) -> None:
        server = watched.server

        def cached() -> set[str]:
            return {name for name in ("first", "second", "third") if watched.cache.found(kind, "team-a", name)}

        for name in ("first", "second"):
            server.put(kind, named(kind, name))
        await until(lambda: cached() == {"first", "second"} and server.watched(kind))
        lists = server.lists[kind.plural]
        server.end_watches(kind)
        server.put(kind, named(kind, "third"))
        server.delete(kind, "team-a", "first")
        await until(lambda: cached() == {"second", "third"})
        assert server.lists[kind.plural] == lists

    watching(body, kopf=kind is DLJOB)


def test_job_that_was_deleted_while_no_watch_ran_is_dropped_and_reconciled() -> None:
    """Its key is queued, so that the operator forgets what it knows of the job."""

    async def body(watched: HttpWatches) -> None:
        server = watched.server

        def cached() -> set[str]:
            return {job.name for job in watched.cache.jobs()}

        for name in ("stays", "goes"):
            server.put(DLJOB, named(DLJOB, name))
        await until(lambda: cached() == {"stays", "goes"} and server.watched(DLJOB))
        watched.queued.clear()
        server.delete(DLJOB, "team-a", "goes", heard=False)
        server.put(DLJOB, named(DLJOB, "comes"), heard=False)
        server.expire(DLJOB)
        await until(lambda: cached() == {"stays", "comes"})
        assert {("team-a", "goes"), ("team-a", "comes")} <= set(watched.queued)

    watching(body, kopf=True)


def test_job_that_was_deleted_and_made_again_while_no_watch_ran_is_another_job() -> None:
    async def body(watched: HttpWatches) -> None:
        server, key = watched.server, ("team-a", "digits")

        def uid() -> str | None:
            job = watched.cache.job(key)
            return job.uid if job is not None else None

        server.put(DLJOB, named(DLJOB, "digits"))
        await until(lambda: uid() and server.watched(DLJOB))
        before = uid()
        watched.queued.clear()
        server.delete(DLJOB, *key, heard=False)
        server.put(DLJOB, named(DLJOB, "digits"), heard=False)
        server.expire(DLJOB)
        await until(lambda: uid() not in (None, before))
        assert key in watched.queued

    watching(body, kopf=True)


@pytest.mark.parametrize("changes", [False, True])
def test_end_of_the_watch_of_jobs_fails_the_probe(changes: bool) -> None:
    """kopf itself only logs it."""

    async def body(watched: HttpWatches) -> None:
        watched.server.put(DLJOB, named(DLJOB, "first"))
        await until(lambda: watched.cache.job(("team-a", "first")) and watched.server.watched(DLJOB))
        await until(lambda: watched.watches.dead() is None)
        [watcher] = [task for task in asyncio.all_tasks() if task.get_name().startswith("watcher for dljobs")]
        watcher.cancel()
        if changes:
            watched.server.put(DLJOB, named(DLJOB, "second"))
        await until(watched.watches.dead)
        assert str(watched.watches.dead()).startswith("the watch of dljobs ")

    watching(body, kopf=True)


@pytest.mark.parametrize("change", ["create", "change", "delete"])
def test_event_that_kopf_does_not_process_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch sends bookmarks, so that it counts as active. Only the task of one job hangs."""
    index_resource, hangs = indexing.index_resource, asyncio.Event()

    async def hanging(*, body: Json, **others: Any) -> None:
        if body["metadata"]["name"] == "digits" and hangs.is_set():
            await asyncio.Event().wait()
        await index_resource(body=body, **others)

    async def body(watched: HttpWatches) -> None:
        server, key = watched.server, ("team-a", "digits")

        def seen() -> Any:
            job = watched.cache.job(key)
            return None if job is None else job.spec

        server.put(DLJOB, named(DLJOB, "other"))
        if change != "create":
            server.put(DLJOB, named(DLJOB, "digits"))
        await until(lambda: (seen() == {} or change == "create") and server.watched(DLJOB))
        await until(lambda: watched.cache.job(("team-a", "other")))
        hangs.set()
        watched.queued.clear()
        if change == "delete":
            server.delete(DLJOB, *key)
            await until(lambda: seen() is None)
        else:
            uid = {} if change == "create" else {"uid": server.objects["dljobs", *key]["metadata"]["uid"]}
            changed = named(DLJOB, "digits")
            server.put(DLJOB, {**changed, "metadata": changed["metadata"] | uid, "spec": {"suspend": True}})
            await until(lambda: seen() == {"suspend": True})
        assert key in watched.queued
        # A busy machine may delay the bookmarks for longer than the limit. With the next one, the watch is active again.
        await until(lambda: watched.watches.dead() is None)

    monkeypatch.setattr(indexing, "index_resource", hanging)
    watching(body, kopf=True)


def test_no_job_waits_for_the_first_events_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index, kopf makes a toggle for each listed job, and each one that drops wakes up all jobs that wait."""
    make_toggle, toggles = ToggleSet.make_toggle, list[str]()

    async def noted(*args: Any, name: str | None = None, **others: Any) -> Any:
        toggles.append(str(name))
        return await make_toggle(*args, name=name, **others)

    async def body(watched: HttpWatches) -> None:
        names = {f"job-{i}" for i in range(50)}
        for name in names:
            watched.server.put(DLJOB, named(DLJOB, name))
        await until(lambda: {job.name for job in watched.cache.jobs()} == names)
        assert toggles and not [name for name in toggles if "dljobs" in name]

    monkeypatch.setattr(ToggleSet, "make_toggle", noted)
    watching(body, kopf=True)


def test_start_waits_for_all_jobs() -> None:
    """Regression: without kopf's index, the first jobs were planned before the others were known, and took their place.

    Those others may have waited for longer, or have plans whose pods do not exist yet.
    """

    async def body(watched: HttpWatches) -> None:
        names = {f"job-{i}" for i in range(2 * PAGE + 10)}
        for name in names:
            watched.server.put(DLJOB, named(DLJOB, name))
        await until(lambda: watched.watches.unsynced() == "dljobs")
        stop = asyncio.Event()

        async def end() -> None:
            return

        kopf = asyncio.create_task(watched.watches.run("test", stop, end))
        await watched.watches.synced()
        assert {job.name for job in watched.cache.jobs()} == names and watched.watches.unsynced() is None
        stop.set()
        await kopf

    watching(body)


def test_a_job_that_kopf_does_not_process_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    index_resource = indexing.index_resource

    async def hanging(*, body: Json, **others: Any) -> None:
        if body["metadata"]["name"] == "digits":
            await asyncio.Event().wait()
        await index_resource(body=body, **others)

    async def body(watched: HttpWatches) -> None:
        for name in ("digits", "other"):
            watched.server.put(DLJOB, named(DLJOB, name))
        await watched.watches.synced()
        await until(lambda: {job.name for job in watched.cache.jobs()} == {"digits", "other"})

    monkeypatch.setattr(indexing, "index_resource", hanging)
    watching(body, kopf=True)


def test_watch_of_jobs_goes_on_if_kopf_handles_an_event_for_longer_than_the_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the limit of a silence ended kopf's task for the watch if the task did not wait for an event then.

    On a busy machine, a short wait for a lock is enough.
    """
    spawn, busy, ended = Scheduler.spawn, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **others: Any) -> None:
        if busy.is_set():
            try:
                await asyncio.sleep(3 * SILENCE_S)
            finally:
                ended.set()
        await spawn(*args, **others)

    async def body(watched: HttpWatches) -> None:
        server = watched.server
        server.put(DLJOB, named(DLJOB, "first"))
        await until(lambda: watched.cache.job(("team-a", "first")) and server.watched(DLJOB))
        busy.set()
        server.put(DLJOB, named(DLJOB, "second"))
        await ended.wait()
        busy.clear()
        await until(lambda: watched.cache.job(("team-a", "second")))
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("watcher for dljobs")]

    monkeypatch.setattr(Scheduler, "spawn", slow)
    watching(body, kopf=True)


def deep(levels: int) -> Json:
    value: Json = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("listed", [True, False], ids=["in a list", "in an event"])
@pytest.mark.parametrize("levels", [450, 930])
def test_nesting_that_json_can_decode_does_not_stop_kopf_either(levels: int, listed: bool) -> None:
    """The JSON decoder reads fewer than about a thousand levels. A recursive function of kopf might read fewer."""

    async def body(watched: HttpWatches) -> None:
        server = watched.server

        def cached() -> set[str]:
            return {job.name for job in watched.cache.jobs()}

        if not listed:
            server.put(DLJOB, named(DLJOB, "first"))
            await until(lambda: cached() == {"first"} and server.watched(DLJOB))
        evil = {"podTemplateOverrides": [{"manager": "me", "spec": deep(levels)}]}
        server.put(DLJOB, {**named(DLJOB, "evil"), "spec": evil})
        server.put(DLJOB, named(DLJOB, "good"))
        await until(lambda: {"evil", "good"} <= cached() and server.watched(DLJOB))
        server.expire(DLJOB)
        server.put(DLJOB, named(DLJOB, "later"))
        await until(lambda: "later" in cached())
        job = watched.cache.job(("team-a", "evil"))
        assert job is not None and job.spec_problem is not None and job.spec == {}

    watching(body, kopf=True)


def test_second_signal_is_ignored_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fixed bug: the log had a traceback of an InvalidStateError from kopf."""

    async def body(watched: HttpWatches) -> None:
        await until(lambda: watched.server.watched(DLJOB))
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert watched.kopf is not None
        await watched.kopf

    monkeypatch.setattr(tasks, "STOP_S", 10 * WITHIN_S)
    watching(body, kopf=True)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    ignored = [record.getMessage() for record in caplog.records if "is stopping already" in record.getMessage()]
    assert [line.partition(":")[0] for line in ignored] == ["SIGTERM", "SIGINT"]
