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

from dljob.job.log_fields import log_fields
from dljob.job.observed import JOB_LABEL
from dljob.kube.answers import ApiError
from dljob.kube.kinds import POD, PROVISIONING_REQUEST, Kind
from dljob.kube.objects.bounds import decoded_event
from dljob.kube.objects.cache import Cache
from dljob.kube.objects.store import JobKey
from dljob.kube.objects.trim import version_number
from dljob.kube.rest import Api
from dljob.kube.watch.permission import Permission

log = logging.getLogger("dljob.kube.watch")

WATCH_S = 300
"""Duration of one watch request. The API server ends it, and the next one continues where it ended."""
SILENCE_S = 90.0
"""Default number of seconds without an event or a bookmark after which the operator opens a watch again.

The API server sends a bookmark (an event that contains only a resourceVersion) each minute. With an etcd older than
3.5, it sends none while no object of the kind changes.
"""
PAGE = 100
"""Number of objects on one page of a list. Until they are reduced, decoded pods need 20 to 50 KB each.

For 10,000 pods, the resident memory grows by 40 MB with pages of 500, and by 14 MB with pages of 100
(``benchmarks/cluster/pod_memory.py``).
"""
TEMPORARY = (0, 429, 500, 502, 503, 504)
"""HTTP status codes (0: no answer) after which a watch continues where it ended.

If the API server no longer has the changes since then, it answers 410, and the objects are listed again. After any
other code, they are listed again too.
"""
BACKOFF_FIRST_S, MAX_BACKOFF_S = 0.5, 15.0
FORGET_S = 900.0
"""Seconds without permission to list the pods of a namespace without DLJobs after which its pods no longer count.

The permission goes with a deleted namespace, often before its last pods. The cache would keep these, and the devices
that they had, until a restart. A restarted operator does not count such a namespace either."""


def back_off_s(failures: int) -> float:
    """Return the seconds to wait after a number of failures in a row."""
    return min(MAX_BACKOFF_S, BACKOFF_FIRST_S * 2.0 ** min(failures, 10)) * uniform(0.5, 1)


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
        silence_s: float = SILENCE_S,
    ) -> None:
        """``selector``: label selector of the objects; empty: all objects.

        ``changed``: called with the kind and the object after a deletion, or a change on which decisions depend.
        ``gone``: called with the key of a job if one of its cached objects is missing in a list. ``silence_s``: seconds
        without an event or a bookmark after which the watch is opened again.
        """
        self._api, self._cache, self._changed, self._gone = api, cache, changed, gone
        self.kind, self.namespace, self._selector, self._silence_s = kind, namespace, selector, silence_s
        self._permission = Permission(kind, namespace)
        self.synced = asyncio.Event()
        """Set when all objects that existed at the start are in the cache, or if these may not be read."""
        self.active_at = monotonic()
        """Monotonic time in seconds of the last sign that this reflector works. An old time means a broken watch.

        Signs are an event, a bookmark, a page of a list with which a watch begins, and a list after a silence without a
        change that the watch should have sent. If the API server refuses requests or answers none, this counts as a
        sign too, because the watch is then silent for a known reason.
        """
        self._heard_at = self._listed_at = monotonic()
        """Monotonic times in seconds of the last event or bookmark, and of the last complete list."""
        self._expiries = 0
        """Number of answers 410 (the objects must be listed again) in a row, without an event between them."""
        self._missed = False
        """True if the last list had a change that was not in the cache, and that the watch should have sent."""

    @property
    def name(self) -> str:
        return f"{self.kind.plural}{f' in {self.namespace}' if self.namespace else ''}"

    async def run(self) -> None:
        """List and watch the objects forever. Errors of the API server are logged and retried with back-off.

        A missing permission is logged once, when it begins.

        If the watch has sent nothing for ``silence_s`` seconds, list the objects again. If the list contains changes
        that the watch should have sent, the watch is broken. Such a list does not update ``active_at``.
        """
        failures, version, opened = 0, "", True
        while True:
            asked = False
            try:
                silent = monotonic() - max(self._heard_at, self._listed_at) >= self._silence_s
                if not version or silent:
                    first = not version
                    version = await self._list(first=first)
                    if opened and not self._missed:
                        self.active_at = monotonic()
                    self.synced.set()
                asked, opened = True, False
                version = await self._watch(version)
                failures, opened = 0, True
            except ApiError as error:
                if error.code == 410:
                    version, self._expiries = "", self._expiries + 1
                    if self._expiries > 1:
                        delay_s = back_off_s(self._expiries - 1)
                        log.warning("the watch of %s failed (%s); retrying in %.1f s", self.name, error, delay_s)
                        await asyncio.sleep(delay_s)
                    continue
                if error.code or not asked:  # Otherwise, only the watch has no answer, and lists may have one.
                    self.active_at = monotonic()
                failures += 1
                delay_s = back_off_s(failures)
                if error.forbidden:
                    self._permission.refused("watch" if asked else "list", error)
                    self._forget_deleted_namespace()
                else:
                    log.warning("the watch of %s failed (%s); retrying in %.1f s", self.name, error, delay_s)
                if error.code not in TEMPORARY:
                    version = ""
                stale = self.kind is PROVISIONING_REQUEST and not asked  # What was read before is of no use.
                if error.forbidden and self.kind.optional and (stale or not self.synced.is_set()):
                    self._cache.unread(self.kind, self.namespace)
                    self.synced.set()
                await asyncio.sleep(delay_s)

    def _forget_deleted_namespace(self) -> None:
        if self.kind is not POD or monotonic() - max(self._heard_at, self._listed_at) < FORGET_S:
            return
        if self.namespace is not None and all(job.namespace != self.namespace for job in self._cache.jobs()):
            self._cache.prune(self.kind, (), 2**63, self.namespace)

    async def _list(self, *, first: bool) -> str:
        """Put all objects into the cache, drop those that are gone, and return the list's resourceVersion.

        ``first``: True: a watch begins with this list, so that changes are expected. False: the watch was silent, and a
        change that the list has means that the watch is broken.
        """
        uids: list[str] = []
        token, missed = "", False
        while True:
            page = await self._api.page(self.kind, self.namespace, self._selector, PAGE, token)
            self._permission.granted("list")
            if first:
                self.active_at = monotonic()
            for body in page.get("items") or ():
                uids.append(body["metadata"]["uid"])
                missed = self._put(body) or missed
            meta = page.get("metadata") or {}
            token = meta.get("continue") or ""
            if not token:
                break
            await asyncio.sleep(0)
        version = str(meta.get("resourceVersion") or "")
        for job in self._cache.prune(self.kind, uids, version_number(version), self.namespace):
            missed = True
            self._gone(job)
        self._missed, self._listed_at = missed, monotonic()
        return version

    async def _watch(self, version: str) -> str:
        """Copy the changes since the resourceVersion ``version`` to the cache until the stream ends.

        Return the resourceVersion of the last change, from which the next watch continues.
        """
        stream = self._api.watch(self.kind, self.namespace, self._selector, version, WATCH_S, self._silence_s)
        async for line in stream:
            self._permission.granted("watch")
            self.active_at = self._heard_at = monotonic()
            event = decoded_event(line)
            kind, body = event["type"], event["object"]
            if kind == "ERROR":
                raise ApiError(body.get("code", 500), body.get("reason", ""), body.get("message", ""))
            version, self._expiries = body["metadata"]["resourceVersion"], 0
            if kind == "DELETED":
                meta = body["metadata"]
                if self._cache.drop(self.kind, meta.get("namespace") or "", meta["name"], meta["uid"]):
                    self._changed(self.kind, body)
            elif kind != "BOOKMARK":
                self._put(body)
        self._permission.granted("watch")
        self._expiries = 0
        return version

    def _put(self, body: Mapping[str, Any]) -> bool:
        """Put an object into the cache. Return True if that changed a field on which decisions depend.

        If the object cannot be parsed, log the error and ignore only this object.
        """
        try:
            changed = self._cache.put(self.kind, body)
        except Exception:
            meta = body.get("metadata", {})
            name, job = meta.get("name"), (meta.get("labels") or {}).get(JOB_LABEL)
            key = (meta.get("namespace") or "", str(job))
            about = log_fields(key, self._cache.job(key)) if job else None
            log.exception("%s %s cannot be parsed and is ignored", self.kind.kind, name, extra=about)
            return False
        if changed:
            self._changed(self.kind, body)
        return changed
