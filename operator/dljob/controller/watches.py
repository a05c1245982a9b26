"""Update the cache from kopf's watches, and add the jobs that a change affects to the work queue.

The module uses only kopf's handlers ``index``, ``on.event``, ``on.login`` and ``on.cleanup``, because the others write
finalizers or annotations into users' objects. kopf indexes the existing objects of all kinds before it calls the first
event handler. Workers wait for this call, so that no job is reconciled before the cache is complete.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import kopf
from kopf._core.engines import peering

from dljob.controller.work_queue import WorkQueue
from dljob.job.observed import JOB_LABEL
from dljob.kube import Cache, JobKey
from dljob.kube.kinds import CLAIM, CONFIG_MAP, DLJOB, NODE, POD, PROFILE, STATEFUL_SET, STORAGE_CLASS, Kind

WATCHED = (DLJOB, STATEFUL_SET, POD, CONFIG_MAP, CLAIM, NODE, STORAGE_CLASS, PROFILE)
LABELLED = (STATEFUL_SET, POD, CONFIG_MAP)
"""Kinds of which the operator needs only the objects of jobs. The API server selects these by their label."""
SETTLE_S = 1.0
"""Seconds between a change of a node, storage class, claim or pod and the reconcile of other affected jobs.

Such changes come in bursts, and with the delay each affected job is reconciled only once for a burst.
"""


class Watches:
    """kopf's handlers. They write watched objects to the cache and add the keys of affected jobs to the work queue."""

    def __init__(self, cache: Cache, queue: WorkQueue[JobKey], server: str, session: aiohttp.ClientSession) -> None:
        self.synced = asyncio.Event()
        """Event that is set when the cache contains all objects that existed at the start."""
        self.registry = kopf.OperatorRegistry()
        self._cache, self._queue, self._server, self._session = cache, queue, server, session
        self._settling: asyncio.TimerHandle | None = None
        kopf.on.login(registry=self.registry)(self._login)
        for kind in WATCHED:
            group, _, version = kind.api_version.rpartition("/")
            kopf.index(group, version, kind.plural, id=f"cache-{kind.plural}", registry=self.registry)(
                self._indexer(kind)
            )
            kopf.on.event(group, version, kind.plural, id=f"event-{kind.plural}", registry=self.registry)(
                self._handler(kind)
            )

    @staticmethod
    def settings() -> kopf.OperatorSettings:
        """Return settings for kopf: no events, peering and scanning; a time limit for each request."""
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.peering.standalone = True
        settings.scanning.disabled = True
        settings.watching.server_timeout = 300
        settings.watching.connect_timeout = 10
        settings.networking.connect_timeout = 10
        settings.networking.request_timeout = 60
        settings.process.ultimate_exiting_timeout = 20
        for kind in LABELLED:
            settings.watching.label_selectors[kind.plural] = JOB_LABEL
        return settings

    async def run(
        self, identity: str, namespaces: tuple[str, ...], stop: asyncio.Event, end: Callable[[], Awaitable[None]]
    ) -> None:
        """Watch until ``stop`` is set or a signal arrives. ``end`` stops the operator's own tasks.

        When kopf ends, it waits 5 s for all tasks that still run, and raises their errors. The operator's own tasks
        therefore end before kopf does.
        """

        async def cleanup(**_: Any) -> None:
            stop.set()  # kopf also waits for this event.
            await end()

        kopf.on.cleanup(id="end", registry=self.registry)(cleanup)
        await kopf.operator(
            registry=self.registry,
            settings=self.settings(),
            # Without an identity, kopf looks up the name of its user, but an arbitrary user id has no name.
            identity=peering.Identity(identity),
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stop,
        )

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        """Return the HTTP session for kopf's watches."""
        return kopf.AiohttpSession(server=self._server, aiohttp_session=self._session)

    def _indexer(self, kind: Kind) -> Callable[..., Awaitable[None]]:
        async def index(body: kopf.Body, **_: Any) -> None:
            if self._cache.put(kind, body):
                self._changed(kind, body)

        return index

    def _handler(self, kind: Kind) -> Callable[..., Awaitable[None]]:
        async def handle(type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002 - kopf's name
            self.synced.set()
            meta = body["metadata"]
            if type == "DELETED" and self._cache.drop(kind, meta.get("namespace") or "", meta["name"], meta["uid"]):
                self._changed(kind, body)

        return handle

    def _changed(self, kind: Kind, body: Mapping[str, Any]) -> None:
        meta = body["metadata"]
        if kind is DLJOB:
            self._queue.add((meta["namespace"], meta["name"]))
        elif job := (meta.get("labels") or {}).get(JOB_LABEL):
            self._queue.add((meta["namespace"], job))
        if kind in (NODE, STORAGE_CLASS, CLAIM, POD) and self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def _settle(self) -> None:
        """Queue the jobs that wait for nodes or volumes, and the jobs with pods on lost nodes."""
        self._settling = None
        for key in self._cache.affected_by_cluster():
            self._queue.add(key)
