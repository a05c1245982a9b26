"""Events of DLJobs that kopf has received and not processed yet.

kopf processes the events of each object in a task of its own. If one of these tasks hangs or loses an event, kopf
itself neither ends nor says so.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Unprocessed:
    """The last event of an object that kopf has not processed. ``version``: resourceVersion of the object in it.

    ``since_s``: monotonic time in seconds of the first event that was not processed.
    """

    namespace: str
    name: str
    uid: str
    version: str
    since_s: float


class UnprocessedEvents:
    """Collects the events of DLJobs from their reception to the end of their processing, at most one for each object.

    All times are monotonic, in seconds.
    """

    def __init__(self, namespaces: Iterable[str] = ()) -> None:
        """``namespaces``: those of which kopf lists DLJobs; empty: it lists all at once."""
        self._events: dict[str, Unprocessed] = {}
        self._unlisted: set[str | None] = {*namespaces} or {None}
        """Namespaces (None: all) of which kopf has not received a whole list yet."""
        self._first = set[str]()
        """Uids in the first list of each namespace whose events have not been processed yet."""
        self.skipped = set[str]()
        """Namespaces whose jobs the operator may not list, and for which the start did not wait."""
        self._has_list = False
        self.first_processed = asyncio.Event()
        """Set when the events of all objects in the first lists have been processed."""
        self._processed_s = 0.0
        """Time at which an event was processed last."""
        self._received_s = 0.0
        """Latest reception of an event that has been processed."""

    def received(self, body: Mapping[str, Any], now_s: float) -> None:
        """Note that kopf has received an event or a list with the object ``body``. Ignore what is not an object."""
        meta = body.get("metadata") or {}
        uid, name, version = meta.get("uid"), meta.get("name"), meta.get("resourceVersion")
        if not (uid and name and version):  # A bookmark or an error.
            return
        if found := self._events.get(uid):
            found.version = version
        else:
            self._events[uid] = Unprocessed(meta.get("namespace") or "", name, uid, version, now_s)

    def listed(self, namespace: str | None, uids: Collection[str]) -> None:
        """Note that kopf has received a whole list of a namespace (None: of all), with objects of these uids.

        kopf processes the objects of each page before it reads the next one, so that some are processed already.
        """
        if namespace in self._unlisted or (namespace in self.skipped and not self._has_list):
            self._unlisted.discard(namespace)
            self.skipped.discard(namespace)
            self._first.update(uid for uid in uids if uid in self._events)
            self._has_list = True
            self._look()

    def refused(self, namespace: str | None) -> None:
        """Note that kopf may not list a namespace. The start waits for the others, if one of them can be listed."""
        if namespace is not None and namespace in self._unlisted:
            self._unlisted.discard(namespace)
            self.skipped.add(namespace)
            self._look()

    def _look(self) -> None:
        if self._has_list and not self._unlisted and not self._first:
            self.first_processed.set()

    def processed(self, body: Mapping[str, Any], now_s: float) -> None:
        """Note that the event with the object ``body`` has been processed."""
        self._processed_s = now_s
        meta = body["metadata"]
        self._first.discard(meta["uid"])
        self._look()
        found = self._events.get(meta["uid"])
        if found is None:
            return
        self._received_s = max(self._received_s, found.since_s)
        if found.version == meta.get("resourceVersion"):
            del self._events[found.uid]
        else:
            found.since_s = now_s

    def overdue(self, limit_s: float, now_s: float, most: int) -> list[Unprocessed]:
        """Return the events that kopf does not process any more, at most ``most``, the oldest first.

        They were received more than ``limit_s`` seconds ago. In addition, kopf has processed events that it received
        later, or it has processed nothing for ``limit_s`` seconds. Otherwise, kopf only has much to do, for example
        after its first list of thousands of jobs. Each event is returned only once.
        """
        stands = now_s - self._processed_s > limit_s
        found = [
            each
            for each in self._events.values()
            if now_s - each.since_s > limit_s and (stands or self._received_s > each.since_s + limit_s / 3)
        ]
        found = sorted(found, key=lambda each: each.since_s)[:most]
        for each in found:
            del self._events[each.uid]
            self._first.discard(each.uid)
        self._look()
        return found
