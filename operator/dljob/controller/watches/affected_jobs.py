"""Queue the jobs that a change of an object affects."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from dljob.controller.work_queue import WorkQueue
from dljob.job.observed import JOB_LABEL
from dljob.kube import Cache, JobKey
from dljob.kube.kinds import (
    CLAIM,
    DLJOB,
    LIMIT_RANGE,
    NODE,
    POD,
    PRIORITY_CLASS,
    QUOTA,
    STATEFUL_SET,
    STORAGE_CLASS,
    VOLUME,
    Kind,
)
from dljob.scheduling.limits.quotas import overdrawn

CAPACITY = {NODE, POD, QUOTA, LIMIT_RANGE}
"""Kinds whose changes may let a job that waits be planned."""
SETTLE_S = 1.0
"""Seconds between a change of a node, storage class, claim, quota or pod and the reconcile of other affected jobs.

Such changes come in bursts, and with the delay each affected job is reconciled only once for a burst.
"""

BURST_S = 0.1
"""Seconds between a change of a job's pod or StatefulSet and the job's reconcile.

The pods of a job start and end together. Without the delay, the job's status would be written for each pod.
"""


class AffectedJobs:
    """Adds the jobs that a change affects to the work queue. Use it in one event loop only."""

    def __init__(self, cache: Cache, queue: WorkQueue[JobKey], capacity_changed: Callable[[], None]) -> None:
        """``capacity_changed``: called after changes of objects of the kinds ``CAPACITY``."""
        self._cache, self._queue, self._capacity_changed = cache, queue, capacity_changed
        self._settling: asyncio.TimerHandle | None = None
        self._unsettled: set[Kind] = set()
        """Kinds whose changes may affect other jobs, and have not been handled yet."""
        self._overdrawn: dict[str, set[tuple[str, str, int]]] = {}
        """Namespace → (quota, resource, limit) of the limits that were lowered below what is used."""

    def changed(self, kind: Kind, body: Mapping[str, Any]) -> None:
        """Queue the jobs that the change of an object affects, at once or soon."""
        meta = body["metadata"]
        if kind is DLJOB:
            self._queue.add((meta["namespace"], meta["name"]))
        elif kind.namespaced and (job := (meta.get("labels") or {}).get(JOB_LABEL)):
            key = (meta["namespace"], job)
            if kind in (POD, STATEFUL_SET):
                self._queue.add_after(key, BURST_S)
            else:
                self._queue.add(key)
        elif kind is PRIORITY_CLASS:
            for each in self._cache.jobs():
                if (each.spec.get("scheduling") or {}).get("priorityClassName") == meta["name"]:
                    self._queue.add(each.key)
        elif kind is QUOTA and self._overdraws_anew(meta["namespace"]):
            for each in self._cache.jobs():
                if each.namespace == meta["namespace"] and self._cache.runs(each.key):
                    self._queue.add(each.key)
        if kind in CAPACITY or kind in (STORAGE_CLASS, CLAIM, VOLUME):
            self._unsettled.add(kind)
            if self._settling is None:
                self._settling = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def _overdraws_anew(self, namespace: str) -> bool:
        """Return True if other quotas of a namespace than before, or other limits, are below what is used.

        The usage of a quota changes with each pod. Jobs are queued only if that matters to their condition WithinQuota.
        """
        found = overdrawn(self._cache.limits(namespace).quotas)
        before = self._overdrawn.pop(namespace, set())
        if found:
            self._overdrawn[namespace] = found
        return found != before

    def _settle(self) -> None:
        """Handle the changes of the last ``SETTLE_S``: report those of capacity, and queue the jobs that are affected.

        Claims, classes and volumes affect jobs that wait for them. Nodes affect jobs with pods on lost nodes.
        """
        self._settling, changed = None, self._unsettled
        self._unsettled = set()
        if changed & CAPACITY:
            self._capacity_changed()
        lost = self._cache.on_lost_nodes() if NODE in changed else ()
        for key in (*self._cache.waiting_for_volumes(changed), *lost):
            self._queue.add(key)
