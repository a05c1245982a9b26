"""Run the watches of an operator, with real reflectors and kopf, against an ``HttpApiServer``."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from dljob.controller.watches import Watches
from dljob.controller.work_queue import WorkQueue
from dljob.job.observed import JOB_LABEL
from dljob.kube import Api, Cache, JobKey
from dljob.kube.kinds import VOLUME, Kind
from support.servers.http_api import HttpApiServer

Json = dict[str, Any]
WITHIN_S = 120.0
SILENCE_S = 0.3


class HttpWatches:
    """The watches of an operator, with real HTTP sessions."""

    def __init__(self, server: HttpApiServer, session: aiohttp.ClientSession, namespaces: tuple[str, ...] = ()) -> None:
        self.server, self.cache, self.queued = server, Cache(), list[JobKey]()

        class Queue(WorkQueue[JobKey]):
            def add(_, key: JobKey) -> None:  # noqa: N805 - ``self`` is the HttpWatches
                self.queued.append(key)

            def add_after(_, key: JobKey, delay_s: float) -> None:  # noqa: N805
                self.queued.append(key)

        def opened(responses: type[aiohttp.ClientResponse]) -> aiohttp.ClientSession:
            return aiohttp.ClientSession(response_class=responses)

        self.watches = Watches(
            self.cache, Queue(), Api(session, server.url), namespaces, opened, lambda: None, silence_s=SILENCE_S
        )
        self.kopf: asyncio.Task[None] | None = None


def watching(
    body: Callable[[HttpWatches], Coroutine[Any, Any, None]],
    *,
    kopf: bool = False,
    namespaces: tuple[str, ...] = (),
    forbidden: tuple[str, ...] = (),
) -> None:
    """Run a test while the watches run. ``kopf``: with the watch of DLJobs. ``namespaces``: those to watch.

    ``forbidden``: those in which nothing may be read at the start.
    """

    async def main() -> None:
        async with HttpApiServer() as server, aiohttp.ClientSession() as session:
            server.forbidden.update(forbidden)
            watched, stop = HttpWatches(server, session, namespaces), asyncio.Event()

            async def end() -> None:
                running[0].cancel()
                await asyncio.gather(running[0], return_exceptions=True)

            async with watched.watches.session:
                running = [asyncio.create_task(watched.watches.reflect())]
                if kopf:
                    watched.kopf = asyncio.create_task(watched.watches.run("test", stop, end), name="the test")
                    running.append(watched.kopf)
                try:
                    async with asyncio.timeout(WITHIN_S):
                        await body(watched)
                finally:
                    stop.set()
                    if not kopf:
                        await end()
                    await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(main())


async def until(holds: Callable[[], object]) -> None:
    """Wait until ``holds()`` is true. ``watching`` has the deadline."""
    while not holds():
        await asyncio.sleep(0.01)


def named(kind: Kind, name: str) -> Json:
    meta: Json = {"name": name, "labels": {JOB_LABEL: "digits"}, "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec: Json = {"nodeAffinity": {"required": {"nodeSelectorTerms": []}}} if kind is VOLUME else {}
    return {"metadata": meta | ({"namespace": "team-a"} if kind.namespaced else {}), "spec": spec, "status": {}}
