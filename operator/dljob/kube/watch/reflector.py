"""Keep the cache equal to the API server's objects of one kind: list them, then watch their changes.

Objects that a list lacks were deleted while no watch ran, and are dropped at once. kopf, which watches DLJobs, copies
each object several times. For pods and nodes, which change every few seconds, these copies would be most of the
operator's work.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from random import uniform
from time import monotonic
from typing import Any

from dljob.kube.kinds import Kind
from dljob.kube.objects.bounds import decoded_event
from dljob.kube.objects.cache import Cache, JobKey
from dljob.kube.objects.trim import version_number
from dljob.kube.rest import Api, ApiError

log = logging.getLogger("dljob.kube.watch")

WATCH_S = 300
"""Duration of one watch request. The API server ends it, and the next one continues where it ended."""
SILENCE_S = 90.0
"""A watch without an event or a bookmark for this long is opened again.

The API server sends a bookmark each minute. With an etcd older than 3.5, it sends none
while no object of the kind changes.
"""
PAGE = 100
"""Number of objects on one page of a list. Until they are reduced, decoded pods need 20 to 50 KB each.

For 10,000 pods, the resident memory grows by 40 MB with pages of 500, and by 14 MB with pages of 100
(``benchmarks/cluster/pod_memory.py``).
"""
TEMPORARY = (0, 429, 500, 502, 503, 504)
"""HTTP status codes (0: no answer) after which a watch continues where it ended.

If the API server no longer has the changes since then, it answers 410, and the objects are listed again.
"""
BACKOFF_FIRST_S, MAX_BACKOFF_S = 0.5, 15.0

Changed = Callable[[Kind, Mapping[str, Any]], None]


class Reflector:
    """Lists and watches the objects of one kind in one namespace (None: all), and copies them to the cache."""

    def __init__(
        self,
        api: Api,
        cache: Cache,
        kind: Kind,
        namespace: str | None,
        selector: str,
        changed: Changed,
        gone: Callable[[JobKey], None],
    ) -> None:
        self._api, self._cache, self._changed, self._gone = api, cache, changed, gone
        self.kind, self._namespace, self._selector = kind, namespace, selector
        self.synced = asyncio.Event()
        """Set when all objects that existed at the start are in the cache, or if these may not be read."""
        self.active_at = monotonic()
        """Monotonic time in seconds when the API server last sent something, or a request to it ended or failed."""

    @property
    def name(self) -> str:
        return f"{self.kind.plural}{f' in {self._namespace}' if self._namespace else ''}"

    async def run(self) -> None:
        """List and watch forever. Errors of the API server are logged and retried with back-off."""
        failures, version = 0, ""
        while True:
            try:
                if not version:
                    version = await self._list()
                    self.synced.set()
                version = await self._watch(version)
                self.active_at = monotonic()
                failures = 0
            except ApiError as error:
                if error.code == 410:
                    version = ""
                    continue
                self.active_at = monotonic()  # The watch is not silent, but the API server does not answer.
                failures += 1
                delay_s = min(MAX_BACKOFF_S, BACKOFF_FIRST_S * 2 ** min(failures, 10)) * uniform(0.5, 1)
                log.warning("watch of %s: %s; retrying in %.1f s", self.name, error, delay_s)
                if error.code not in TEMPORARY:
                    version = ""
                if error.forbidden and self.kind.optional:
                    self.synced.set()
                await asyncio.sleep(delay_s)

    async def _list(self) -> str:
        """Put all objects into the cache, drop those that are gone, and return the list's resourceVersion."""
        uids: list[str] = []
        token = ""
        while True:
            page = await self._api.page(self.kind, self._namespace, self._selector, PAGE, token)
            self.active_at = monotonic()
            for body in page.get("items") or ():
                uids.append(body["metadata"]["uid"])
                self._put(body)
            meta = page.get("metadata") or {}
            token = meta.get("continue") or ""
            if not token:
                break
            await asyncio.sleep(0)
        version = str(meta.get("resourceVersion") or "")
        for job in self._cache.prune(self.kind, uids, version_number(version), self._namespace):
            self._gone(job)
        return version

    async def _watch(self, version: str) -> str:
        """Apply changes since ``version`` until the API server ends the stream. Return the last resourceVersion."""
        stream = self._api.watch(self.kind, self._namespace, self._selector, version, WATCH_S, SILENCE_S)
        async for line in stream:
            self.active_at = monotonic()
            event = decoded_event(line)
            kind, body = event["type"], event["object"]
            if kind == "ERROR":
                raise ApiError(body.get("code", 500), body.get("reason", ""), body.get("message", ""))
            version = body["metadata"]["resourceVersion"]
            if kind == "DELETED":
                meta = body["metadata"]
                if self._cache.drop(self.kind, meta.get("namespace") or "", meta["name"], meta["uid"]):
                    self._changed(self.kind, body)
            elif kind != "BOOKMARK":
                self._put(body)
        return version

    def _put(self, body: Mapping[str, Any]) -> None:
        """Put an object into the cache. If it cannot be parsed, log the error and ignore only this object."""
        try:
            changed = self._cache.put(self.kind, body)
        except Exception:
            log.exception("%s %s cannot be parsed and is ignored", self.kind.kind, body.get("metadata", {}).get("name"))
        else:
            if changed:
                self._changed(self.kind, body)
