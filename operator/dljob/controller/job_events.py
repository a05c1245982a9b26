"""Post the events of jobs: also those that the API server did not accept at first, and those of an earlier leader."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

from dljob.controller.work_queue import WorkQueue
from dljob.job.log_fields import log_fields
from dljob.job.observed import JobSeen
from dljob.kube import ApiError, JobKey, Kube
from dljob.kube.events.warning_events import EVENTS_S, RECHECK_S
from dljob.status import Event, events, previous

log = logging.getLogger("dljob")
MAX_UNSENT = 20
EVENTS_RESTORED = timedelta(minutes=10)
"""A new leader posts missing events for changes of conditions that are younger than this."""
FORBIDDEN_RECHECK_S = 15.0
"""Seconds between attempts to list a job's events, or to post one that is forbidden, such as by a full quota."""


class JobEvents:
    """Posts events about jobs and nodes. Only events may be slow or fail: nothing else waits for them.

    Use it in one event loop only.
    """

    def __init__(self, kube: Kube, queue: WorkQueue[JobKey], now: Callable[[], datetime]) -> None:
        """``queue``: gets the keys of jobs with events that must be tried again."""
        self._kube, self._queue, self._now = kube, queue, now
        self._unsent: dict[JobKey, list[Event]] = {}
        """Events that the API server has not accepted yet."""
        self._restored: dict[JobKey, str] = {}
        """Uids of the jobs for which this operator has looked for events that the previous leader did not send."""

    def begin(self) -> None:
        """Forget everything: this operator begins to lead, and another one may have sent events meanwhile."""
        self._restored.clear()
        self._unsent.clear()

    def forget(self, key: JobKey) -> None:
        self._unsent.pop(key, None)
        self._restored.pop(key, None)

    def add(self, key: JobKey, event: Event) -> None:
        """Add an event about a job, which is posted with those of its next status."""
        self._unsent.setdefault(key, []).append(event)

    async def restore(self, job: JobSeen) -> None:
        """Find a job's missing events, which the previous leader could not post before it ended, and add them.

        Conditions that changed less than ``EVENTS_RESTORED`` ago show which events must exist. Do nothing if this
        operator has already done so for the job. If the events cannot be listed, try again later: the rest of the
        reconcile does not need them.
        """
        if self._restored.get(job.key) == job.uid:
            return
        if job.key in self._restored:
            self._unsent.pop(job.key, None)  # They are about an earlier job of this name.
        now = self._now()
        lately = [c for c in previous(job).conditions if now - c.last_transition_time < EVENTS_RESTORED]
        if expected := events((), lately):
            try:
                async with asyncio.timeout(EVENTS_S):
                    posted = await self._kube.events.reasons(job)
            except (ApiError, TimeoutError) as error:
                about = log_fields(job.key, job)
                log.warning("the job's events were not listed (%r); trying again", error, extra=about)
                self._queue.add_after(job.key, FORBIDDEN_RECHECK_S)
                return
            unsent = self._unsent.setdefault(job.key, [])
            unsent += [event for event in expected if event.reason not in posted | {each.reason for each in unsent}]
        self._restored[job.key] = job.uid

    async def post(self, job: JobSeen, new: Iterable[Event]) -> None:
        """Post the unsent events about a job and the events ``new``, within ``EVENTS_S``.

        Keep those that could not be posted for a later reconcile.
        """
        pending, kept, about = [*self._unsent.pop(job.key, ()), *new], list[Event](), log_fields(job.key, job)
        try:
            async with asyncio.timeout(EVENTS_S):
                while pending:
                    try:
                        await self._kube.events.record(job, pending[0], self._now())
                    except ApiError as error:
                        log.warning("the event %s was not posted: %s", pending[0].reason, error, extra=about)
                        if not error.rejected:
                            break
                        kept += pending[:1] if error.not_found or error.forbidden else []
                    del pending[0]
        except TimeoutError:
            log.warning("%d events were not posted within %.0f s", len(pending), EVENTS_S, extra=about)
        if kept or pending:
            self._unsent[job.key] = [*kept, *pending][-MAX_UNSENT:]
            self._queue.add_after(job.key, RECHECK_S if pending else FORBIDDEN_RECHECK_S)

    async def post_about_node(self, node: str, event: Event) -> None:
        """Post an event about a node. Log an error instead of raising it.

        An operator that is limited to some namespaces has no permission to post such events.
        """
        try:
            async with asyncio.timeout(EVENTS_S):
                await self._kube.events.record_about_node(node, event, self._now())
        except (ApiError, TimeoutError) as error:
            level = logging.DEBUG if isinstance(error, ApiError) and error.forbidden else logging.WARNING
            log.log(level, "an event about node %s was not posted: %r", node, error)
