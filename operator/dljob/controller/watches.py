"""The only user of kopf: its watches feed the cache, and changes of the cache feed the queue.

Of kopf only ``index``, ``on.event`` and ``on.login`` are used: all else writes finalizers or annotations into
users' objects. An index runs before any handler, and for all kinds before the first handler, so that no job is
looked at before everything about it is known.
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
"""Of these only jobs' own objects concern us; the server filters."""
SETTLE_S = 1.0
"""Changes of nodes, classes and claims come in bursts; the jobs they concern are looked at once a burst."""


class Watches:
    """Registers with kopf, and turns what it brings into cache entries and keys."""

    def __init__(self, cache: Cache, queue: WorkQueue[JobKey], server: str, session: aiohttp.ClientSession) -> None:
        self.synced = asyncio.Event()
        """Everything that was there at the start has been seen."""
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
        """kopf without its own events, peering and scanning, and with limits on every request."""
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
        """Watch until ``stop`` is set or a signal comes. ``end`` ends the operator's own tasks.

        kopf takes whatever runs at its own end for its own: it would wait 5 s for it, and raise what it raises, such as
        an object refused at that moment. So the operator's tasks end before.
        """

        async def cleanup(**_: Any) -> None:
            stop.set()  # for which kopf itself waits, too
            await end()

        kopf.on.cleanup(id="end", registry=self.registry)(cleanup)
        await kopf.operator(
            registry=self.registry,
            settings=self.settings(),
            # Else kopf asks who runs it, and an arbitrary UID has no name.
            identity=peering.Identity(identity),
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stop,
        )

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        """The one session, for kopf's watches as for our own calls."""
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
        """Jobs that wait for the cluster, and those that may stand on a lost node, are looked at."""
        self._settling = None
        for key in self._cache.affected_by_cluster():
            self._queue.add(key)
