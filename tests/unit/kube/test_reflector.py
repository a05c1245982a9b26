"""Tests of the reflector: objects that the decoder cannot read concern themselves alone, in lists and in watches."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dljob.kube import Api, ApiError, Cache, kinds
from dljob.kube.kinds import (
    CONFIG_MAP,
    DLJOB,
    LIMIT_RANGE,
    POD,
    PRIORITY_CLASS,
    PROVISIONING_REQUEST,
    QUOTA,
    STORAGE_CLASS,
    VOLUME,
    Kind,
)
from dljob.kube.watch import Reflector, reflector
from dljob.kube.watch.permission import EFFECTS
from dljob.kube.watch.reflector import SILENCE_S
from support.manifests.watched import dljob
from support.virtual_time import now_s, run

Json = dict[str, Any]
NO_SESSION: Any = None
DEEP = '{"f:a":' * 3000 + "{}" + "}" * 3000


def config_map(name: str, version: int, fields: str = "{}", text: str = "") -> str:
    """Return the plan of job ``name`` as the API server sends it. Its writer chooses ``metadata.managedFields``."""
    owner = f'{{"apiVersion":"dljob.dev/v1alpha1","kind":"DLJob","name":"{name}","uid":"j","controller":true}}'
    meta = f'{{"name":"{name}-plan","namespace":"a","uid":"u-{name}","resourceVersion":"{version}",'
    meta += (
        f'"ownerReferences":[{owner}],"labels":{{"dljob.dev/job":"{name}"}},"managedFields":[{{"fieldsV1":{fields}}}]}}'
    )
    return f'{{"metadata":{meta},"data":{json.dumps({"plan.json": text})}}}'


async def mirrored(listed: list[str], events: list[str]) -> tuple[Cache, bool]:
    """Run a reflector against a server. Return its cache, and True if the reflector is still running."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            text = f'{{"metadata":{{"resourceVersion":"9"}},"items":[{",".join(listed)}]}}'
            return web.Response(text=text, content_type="application/json")
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(f'{{"type":"ADDED","object":{event}}}\n'.encode())
        sent.set()
        await asyncio.Event().wait()
        return response

    sent, changed, cache = asyncio.Event(), asyncio.Event(), Cache()
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as session:
        api = Api(session, f"http://127.0.0.1:{port}")

        def seen(*_: Any) -> None:
            if cache.found(CONFIG_MAP, "a", "last-plan") is not None:
                changed.set()

        task = asyncio.create_task(Reflector(api, cache, CONFIG_MAP, None, "", seen, lambda _: None).run())
        await asyncio.wait(
            {task, waiting := asyncio.ensure_future(changed.wait())}, timeout=120, return_when="FIRST_COMPLETED"
        )
        running = not task.done()
        for each in (task, waiting):
            each.cancel()
            with suppress(asyncio.CancelledError, RecursionError):
                await each
    await runner.cleanup()
    return cache, running


def names(cache: Cache) -> dict[str, str | None]:
    found = {name: cache.found(CONFIG_MAP, "a", f"{name}-plan") for name in ("first", "deep", "last")}
    return {
        name: entry.seen.plan and entry.seen.plan["plan.json"] for name, entry in found.items() if entry is not None
    }


def test_deep_object_in_a_list_does_not_hide_the_others() -> None:
    plan = "x" * 700_000  # A plan for thousands of ranks is larger than a DLJob may be.
    listed = [config_map("first", 1, text=plan), config_map("deep", 2, DEEP, "y"), config_map("last", 3, text="z")]
    cache, running = asyncio.run(mirrored(listed, []))
    assert running and names(cache) == {"first": plan, "deep": None, "last": "z"}


def test_deep_object_in_a_watch_does_not_end_it() -> None:
    plan = "x" * 700_000
    events = [config_map("first", 11, text=plan), config_map("deep", 12, DEEP, "y"), config_map("last", 13, text="z")]
    cache, running = asyncio.run(mirrored([], events))
    assert running and names(cache) == {"first": plan, "deep": None, "last": "z"}


@pytest.mark.parametrize(
    ("kind", "code", "synced"),
    [
        (QUOTA, 403, True),
        (LIMIT_RANGE, 403, True),
        (PRIORITY_CLASS, 403, True),
        (VOLUME, 403, True),
        (STORAGE_CLASS, 403, True),
        (POD, 403, False),
        (QUOTA, 500, False),
    ],
)
def test_operator_starts_without_permission_to_read_what_it_can_do_without(kind: Kind, code: int, synced: bool) -> None:
    """Roles of an older release, which an administrator may manage, do not have this permission."""

    class Refusing:
        async def page(self, *_: Any) -> Json:
            asked.set()
            raise ApiError(code, "Forbidden", "no")

    async def main() -> bool:
        api: Any = Refusing()
        observer = Reflector(api, Cache(), kind, None, "", lambda *_: None, lambda _: None)
        task = asyncio.create_task(observer.run())
        await asyncio.wait_for(asked.wait(), 10)
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return observer.synced.is_set()

    asked = asyncio.Event()
    assert asyncio.run(main()) == synced


def test_storage_classes_are_unknown_until_the_operator_may_list_them() -> None:
    """Regression: an operator without this permission stayed unready. An empty list would mean that there are none."""

    async def body() -> list[Any]:
        cache = Cache()
        cache.put(DLJOB, dljob())
        observer = Reflector(Guarded("list", 0.0), cache, STORAGE_CLASS, None, "", lambda *_: None, lambda _: None)
        task, found = asyncio.create_task(observer.run()), []
        for wait_s in (60, 2 * 3600):
            await asyncio.sleep(wait_s)
            observed = cache.observe(("ns", "digits"))
            assert observed is not None
            found.append((observer.synced.is_set(), observed.classes))
        task.cancel()
        return found

    assert run(body()) == [(True, None), (True, ())]


def test_requests_to_autoscalers_are_unknown_only_where_the_operator_may_not_list_them() -> None:
    """Fixed bug: if one of the watched namespaces was deleted, jobs in all others could ask for no nodes."""

    async def body() -> list[bool]:
        cache = Cache()
        cache.put(DLJOB, dljob())
        found = []
        for namespace in ("gone", "ns"):
            api = Guarded("list", 0.0)
            observer = Reflector(api, cache, PROVISIONING_REQUEST, namespace, "", lambda *_: None, lambda _: None)
            task = asyncio.create_task(observer.run())
            await asyncio.sleep(60)
            task.cancel()
            observed = cache.observe(("ns", "digits"))
            assert observed is not None
            found.append(observed.provisioning_readable)
        return found

    assert run(body()) == [True, False]


class Guarded(Api):
    """An API server that takes away a permission for an hour, after it has granted it for some seconds."""

    def __init__(self, verb: str, first_s: float = 60.0) -> None:
        super().__init__(NO_SESSION, "https://api")
        self._verb, self._first_s, self.refusals = verb, first_s, 0

    def _check(self, verb: str) -> None:
        if verb == self._verb and self._first_s <= now_s() < self._first_s + 3600:
            self.refusals += 1
            raise ApiError(403, "Forbidden", f"cannot {verb} resource")

    async def page(self, *_: Any) -> Json:
        self._check("list")
        return {"metadata": {"resourceVersion": "9"}, "items": []}

    async def watch(self, *_: Any) -> AsyncIterator[bytes]:
        self._check("watch")
        await asyncio.sleep(SILENCE_S)
        if now_s() > self._first_s + 3600:
            yield json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}).encode()
        raise ApiError(410, "Gone", "the version is too old")


@pytest.mark.parametrize("verb", ["list", "watch"])
@pytest.mark.parametrize("kind", [VOLUME, PRIORITY_CLASS, QUOTA, STORAGE_CLASS], ids=lambda kind: str(kind.plural))
def test_missing_permission_is_logged_when_it_begins_and_when_it_ends(
    kind: Kind, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator tried again every 15 s and logged a warning each time, for as long as it ran."""
    caplog.set_level("INFO", "dljob.kube.watch")

    async def body() -> int:
        api = Guarded(verb)
        observer = Reflector(api, Cache(), kind, None, "", lambda *_: None, lambda _: None)
        task = asyncio.create_task(observer.run())
        await asyncio.sleep(2 * 3600)
        task.cancel()
        return api.refusals

    assert run(body()) > 100
    began, ended = caplog.records
    assert (began.levelname, ended.levelname) == ("WARNING", "INFO")
    for text in (f"permission to {verb} {kind.plural}", "cannot", "Until then", "Grant the verbs list and watch"):
        assert text in began.getMessage()
    assert f"permission to {verb} {kind.plural}" in ended.getMessage()


@pytest.mark.parametrize(
    "kind",
    [each for each in vars(kinds).values() if isinstance(each, Kind) and each.optional],
    ids=lambda kind: str(kind.plural),
)
def test_each_optional_kind_has_an_effect_that_the_warning_names(kind: Kind) -> None:
    assert kind in EFFECTS


@pytest.mark.parametrize("has_jobs", [False, True])
def test_pods_of_a_deleted_namespace_do_not_hold_their_devices_for_ever(
    monkeypatch: pytest.MonkeyPatch, has_jobs: bool
) -> None:
    """Fixed bug: the RoleBinding was deleted before the pods, so that the operator never saw the end of these."""
    monkeypatch.setattr(reflector, "monotonic", now_s)
    cache = Cache()

    class Deleted(Guarded):
        async def page(self, *_: Any) -> Json:
            if now_s() > 1.0:
                raise ApiError(403, "Forbidden", "no RoleBinding")
            meta = {"name": "p", "namespace": "a", "uid": "p", "resourceVersion": "4"}
            return {"metadata": {"resourceVersion": "9"}, "items": [{"metadata": meta, "spec": {"nodeName": "n"}}]}

        async def watch(self, *_: Any) -> AsyncIterator[bytes]:
            await asyncio.sleep(300)
            for line in ():
                yield line
            raise ApiError(403, "Forbidden", "no RoleBinding")

    async def body() -> list[bool]:
        task = asyncio.create_task(
            Reflector(Deleted("list", 0.0), cache, POD, "a", "", lambda *_: None, lambda _: None).run()
        )
        found = []
        for seconds in (1, 800, 400):
            await asyncio.sleep(seconds)
            found.append(cache.ledger.holds("p"))
        task.cancel()
        return found

    if has_jobs:  # An administrator has taken the permission away. The pods may still run.
        meta = {"name": "j", "namespace": "a", "uid": "j", "creationTimestamp": "2026-01-01T00:00:00Z"}
        cache.put(DLJOB, {"metadata": meta, "spec": {}})
    assert run(body()) == [True, True, has_jobs]


def test_other_errors_during_a_missing_permission_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Guarded):
        async def page(self, *_: Any) -> Json:
            if now_s() > 1800:
                raise ApiError(500, "InternalError", "etcd")
            return await super().page()

    async def body() -> None:
        observer = Reflector(Failing("list", 0.0), Cache(), VOLUME, None, "", lambda *_: None, lambda _: None)
        task = asyncio.create_task(observer.run())
        await asyncio.sleep(1900)
        task.cancel()

    run(body())
    assert "permission to list" in caplog.text and "500 InternalError: etcd" in caplog.text


def test_watch_that_is_opened_again_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """With etcd 3.4, the API server sends no bookmarks of kinds that never change. The operator was restarted for it."""
    clock_s, opened, enough = [0.0], 0, asyncio.Event()
    monkeypatch.setattr(reflector, "monotonic", lambda: clock_s[0])

    class SilentApi(Api):
        async def page(self, *_: Any) -> Json:
            return {"metadata": {"resourceVersion": "9"}, "items": []}

        async def watch(self, *_: Any) -> AsyncIterator[bytes]:
            nonlocal opened
            opened += 1
            if opened == 5:
                enough.set()
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            clock_s[0] += SILENCE_S
            for line in ():
                yield line

    async def body() -> float:
        session: Any = None
        observer = Reflector(
            SilentApi(session, "https://api"), Cache(), CONFIG_MAP, None, "", lambda *_: None, lambda _: None
        )
        task = asyncio.create_task(observer.run())
        await enough.wait()
        task.cancel()
        return clock_s[0] - observer.active_at

    assert asyncio.run(body()) <= SILENCE_S


@pytest.mark.parametrize("active", [False, True], ids=["at once", "after an event"])
def test_objects_are_listed_after_a_pause_if_watches_expire_again_and_again(active: bool) -> None:
    """Regression: the operator listed all objects of a kind again and again, without a pause."""

    class ExpiringApi(Api):
        async def page(self, *_: Any) -> Json:
            listed_at.append(now_s())
            await asyncio.sleep(0.01)
            return {"metadata": {"resourceVersion": "9"}, "items": []}

        async def watch(self, *_: Any) -> AsyncIterator[bytes]:
            if active:
                await asyncio.sleep(1)
                yield b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9"}}}'
            raise ApiError(410, "Expired", "too old resource version")

    async def body() -> None:
        api = ExpiringApi(NO_SESSION, "https://api")
        task = asyncio.create_task(Reflector(api, Cache(), POD, None, "", lambda *_: None, lambda _: None).run())
        await asyncio.sleep(60)
        task.cancel()

    listed_at: list[float] = []
    run(body())
    between = [after - before for before, after in itertools.pairwise(listed_at)]
    if active:
        assert max(between) < 1.1, "an event between them shows that the watch works"
    else:
        assert between[0] < 0.1 and min(between[1:]) > 0.2 and max(between) <= reflector.MAX_BACKOFF_S + 0.1
