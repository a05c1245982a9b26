"""Post the operator's events, and find out which of them an earlier leader has posted."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Set
from datetime import datetime
from functools import partial

from dljob.api import API_VERSION
from dljob.job.observed import JobSeen
from dljob.kube import kinds
from dljob.kube.answers import ApiError
from dljob.kube.objects.cache import Cache
from dljob.kube.rest import FIELD_OWNER, Api
from dljob.kube.transport import Body
from dljob.status import Event

PAGE = 500
LIST_S = 30.0
"""Time limit for the list of the events of a namespace."""
KEPT_S = 60.0
"""Seconds for which the reasons of the events of a namespace are kept after the list."""
MAX_NODE_NAME = 230
"""Maximum length of the part of an event's name that is a node's name. A digest follows."""

Listing = asyncio.Task[Mapping[str, Set[str]]]


class PostedEvents:
    def __init__(self, api: Api, cache: Cache) -> None:
        self._api, self._cache = api, cache
        self._lists: dict[str, Listing] = {}
        """Namespace → the list of the reasons of its events."""

    async def record(self, job: JobSeen, event: Event, now: datetime) -> None:
        """Post an event about the job. A repeated event raises the count of the existing one."""
        about = {"apiVersion": API_VERSION, "kind": "DLJob", "namespace": job.namespace, "name": job.name}
        await self._post(event, event.name(job.name, job.uid), job.namespace, {**about, "uid": job.uid}, now)

    async def record_about_node(self, node: str, event: Event, now: datetime) -> None:
        """Post an event about a node. Kubernetes keeps events about cluster-wide objects in the namespace default."""
        found = self._cache.found(kinds.NODE, "", node)
        uid = found.uid if found is not None else ""
        about = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
        await self._post(event, event.name(node[:MAX_NODE_NAME].rstrip(".-"), uid), "default", about, now)

    async def reasons(self, job: JobSeen) -> Set[str]:
        """Return the reasons of all events about a job that were posted before this operator began to lead.

        For each list, the API server reads all events of the namespace, whatever the field selector. Events of young
        jobs are many: those of their pods are among them. Therefore all jobs of a namespace share one list.
        Raise ApiError or TimeoutError if the events cannot be listed. The next call then tries again.
        """
        listing = self._lists.get(job.namespace)
        if listing is None:
            listing = self._lists[job.namespace] = asyncio.create_task(self._listed(job.namespace))
            listing.add_done_callback(partial(self._keep, job.namespace))
        # A caller has a time limit. A list that takes longer is there when the caller asks again.
        return (await asyncio.shield(listing)).get(job.uid, frozenset())

    def forget_all(self) -> None:
        """Forget what was listed: another operator may have led since."""
        self._lists.clear()

    async def _listed(self, namespace: str) -> Mapping[str, Set[str]]:
        """Return uid of a job → reasons of its events, for all jobs of a namespace."""
        found, token, more = defaultdict[str, set[str]](set), "", True
        async with asyncio.timeout(LIST_S):
            while more:
                page = await self._api.page(kinds.EVENT, namespace, "", PAGE, token, "involvedObject.kind=DLJob")
                for event in page.get("items") or ():
                    found[str(event["involvedObject"].get("uid"))].add(str(event.get("reason")))
                token = (page.get("metadata") or {}).get("continue") or ""
                more = bool(token)
        return found

    def _keep(self, namespace: str, listing: Listing) -> None:
        """Keep a list for the other jobs of its namespace, but only for ``KEPT_S``, and nothing of one that failed."""
        if listing.cancelled() or listing.exception() is not None:
            self._drop(namespace, listing)
        else:
            asyncio.get_running_loop().call_later(KEPT_S, self._drop, namespace, listing)

    def _drop(self, namespace: str, listing: Listing) -> None:
        if self._lists.get(namespace) is listing:
            del self._lists[namespace]

    async def _post(self, event: Event, name: str, namespace: str, about: Body, now: datetime) -> None:
        stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": about,
            "type": event.type,
            "reason": event.reason,
            "message": event.message,
            "source": {"component": FIELD_OWNER},
            "reportingComponent": FIELD_OWNER,
            "reportingInstance": FIELD_OWNER,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            await self._api.create(kinds.EVENT, body)
        except ApiError as error:
            if not error.conflict:
                raise
            existing = await self._api.get(kinds.EVENT, namespace, name)
            again = {"count": existing.get("count", 1) + 1, "lastTimestamp": stamp}
            await self._api.merge(kinds.EVENT, namespace, name, again)
