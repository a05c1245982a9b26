"""Tests that no answer of the API server ends kopf's watch of DLJobs, which would end the operator."""

import asyncio
from typing import Any

import pytest

from dljob.controller.watches import kopf_settings
from dljob.controller.watches.kopf_settings import PAGE
from dljob.kube.kinds import DLJOB
from dljob.kube.watch import reflector
from support.controller.http_watches import HttpWatches, named, until, watching

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon, also in kopf, which gives up after as many attempts as usual."""
    usual = kopf_settings.settings

    def settings() -> Any:
        found = usual()
        found.networking.error_backoffs = (0.01,) * 8
        return found

    monkeypatch.setattr(kopf_settings, "settings", settings)
    monkeypatch.setattr(reflector, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(reflector, "MAX_BACKOFF_S", 0.1)


def in_team(namespace: str, name: str) -> Json:
    found = named(DLJOB, name)
    return {**found, "metadata": found["metadata"] | {"namespace": namespace}}


def known(watched: HttpWatches) -> set[tuple[str, str]]:
    return {job.key for job in watched.cache.jobs()}


def test_forbidden_namespace_does_not_hold_up_the_others_at_the_start() -> None:
    """Regression: the operator never got ready. A deleted namespace in ``watchNamespaces`` is enough."""

    async def body(watched: HttpWatches) -> None:
        for name in ("first", "second"):
            watched.server.put(DLJOB, in_team("team-a", name))
        watched.server.put(DLJOB, in_team("team-b", "third"))
        await watched.watches.synced()
        assert known(watched) == {("team-a", "first"), ("team-a", "second")} and watched.watches.unsynced() is None
        watched.server.forbidden.clear()
        await until(lambda: ("team-b", "third") in known(watched))
        assert all(each.synced.is_set() for each in watched.watches._reflectors), "its pods are known before its jobs"

    watching(body, kopf=True, namespaces=("team-a", "team-b"), forbidden=("team-b",))


def test_operator_that_may_list_no_namespace_is_not_ready() -> None:
    async def body(watched: HttpWatches) -> None:
        await until(lambda: watched.watches._events.skipped == {"team-a"})
        assert "dljobs" in (watched.watches.unsynced() or "")
        watched.server.forbidden.clear()
        await watched.watches.synced()

    watching(body, kopf=True, namespaces=("team-a",), forbidden=("team-a",))


def test_namespace_that_becomes_forbidden_ends_nothing() -> None:
    """Regression: kopf raised the error after some attempts, which ended the operator for all namespaces."""

    async def body(watched: HttpWatches) -> None:
        server = watched.server
        for namespace in ("team-a", "team-b"):
            server.put(DLJOB, in_team(namespace, "first"))
        await until(lambda: len(known(watched)) == 2 and server.watched(DLJOB))
        server.forbidden.add("team-b")
        for number in range(12):
            server.end_watches(DLJOB)
            server.put(DLJOB, in_team("team-a", f"job-{number}"))
            await until(lambda number=number: ("team-a", f"job-{number}") in known(watched))  # type: ignore[misc]
        assert watched.watches.dead() is None and watched.kopf is not None and not watched.kopf.done()
        server.forbidden.clear()
        server.put(DLJOB, in_team("team-b", "second"))
        await until(lambda: ("team-b", "second") in known(watched))

    watching(body, kopf=True, namespaces=("team-a", "team-b"))


@pytest.mark.parametrize("what", ["error event", "410 for a watch", "410 in a list"])
def test_errors_of_the_server_end_nothing(what: str) -> None:
    async def body(watched: HttpWatches) -> None:
        server = watched.server
        names = [f"job-{i}" for i in range(PAGE + 5)]
        for name in names:
            server.put(DLJOB, in_team("team-a", name))
        if what == "410 in a list":
            server.expired.append(DLJOB.plural)
        await until(lambda: len(known(watched)) == len(names) and server.watched(DLJOB))
        if what == "410 for a watch":
            server.expired.append(DLJOB.plural)
            server.end_watches(DLJOB)
        elif what == "error event":
            server.fail_watches(DLJOB)
        await until(lambda: not server.expired)
        server.put(DLJOB, in_team("team-a", "later"))
        await until(lambda: ("team-a", "later") in known(watched))
        watchers = [task for task in asyncio.all_tasks() if task.get_name().startswith("watcher for dljobs")]
        assert watched.kopf is not None and not watched.kopf.done() and len(watchers) == 1

    watching(body, kopf=True)


def test_silent_watch_of_one_namespace_fails_the_probe_while_another_is_active() -> None:
    """Regression: one time counted for all namespaces, so that the bookmarks of one hid the silence of another."""

    async def body(watched: HttpWatches) -> None:
        server = watched.server
        for namespace in ("team-a", "team-b"):
            server.put(DLJOB, in_team(namespace, "first"))
        await until(lambda: len(known(watched)) == 2 and server.watched(DLJOB, watches=2))
        server.silent.add("team-b/dljobs")
        server.put(DLJOB, in_team("team-b", "second"))
        await until(lambda: str(watched.watches.dead()).startswith("the watch of dljobs in team-b "))
        server.end_watches(DLJOB)  # Before a bookmark hides that the silent watch has swallowed an event.
        server.silent.clear()
        await until(lambda: watched.watches.dead() is None and ("team-b", "second") in known(watched))

    watching(body, kopf=True, namespaces=("team-a", "team-b"))


def test_jobs_are_not_listed_without_a_pause_if_each_watch_expires(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: kopf listed all jobs again ten times a second."""

    async def body(watched: HttpWatches) -> None:
        server = watched.server
        server.put(DLJOB, in_team("team-a", "first"))
        await until(lambda: known(watched) and server.watched(DLJOB))
        server.expired += [DLJOB.plural] * 4
        server.end_watches(DLJOB)
        await until(lambda: not server.expired and server.watched(DLJOB))
        server.put(DLJOB, in_team("team-a", "later"))
        await until(lambda: ("team-a", "later") in known(watched))

    watching(body, kopf=True)
    assert sum("the watch of dljobs expires at its beginning" in each.getMessage() for each in caplog.records) == 3
