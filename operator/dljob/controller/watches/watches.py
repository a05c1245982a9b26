"""Watch the API server, and update the cache.

kopf watches the DLJobs. Only its handlers ``on.event``, ``on.login`` and ``on.cleanup`` are used. With its index, kopf
would handle no event before it has indexed all jobs, and wake up the tasks of all jobs after each of them, which takes
a time that grows with the square of the number of jobs. The other handlers write finalizers or annotations into users'
objects. Reflectors watch the other kinds.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from time import monotonic
from typing import Any

import aiohttp
import kopf
from kopf._core.engines import peering

from dljob.controller.tasks import run_until_one_ends, stop_on_signals
from dljob.controller.watches import kopf_settings
from dljob.controller.watches.affected_jobs import AffectedJobs
from dljob.controller.watches.rereading import Rereader
from dljob.controller.watches.unprocessed import UnprocessedEvents
from dljob.controller.work_queue import WorkQueue
from dljob.job.log_fields import log_fields
from dljob.job.observed import JOB_LABEL
from dljob.kube import Api, ApiError, Cache, JobKey
from dljob.kube.kinds import (
    CLAIM,
    CONFIG_MAP,
    DLJOB,
    LIMIT_RANGE,
    NODE,
    POD,
    PRIORITY_CLASS,
    PROFILE,
    QUOTA,
    STATEFUL_SET,
    STORAGE_CLASS,
    VOLUME,
    Kind,
)
from dljob.kube.objects.trim import older, version_number
from dljob.kube.watch import Reflector, WatchActivity, bounded_responses
from dljob.kube.watch.reflector import SILENCE_S

log = logging.getLogger("dljob.watches")

REFLECTED = (
    STATEFUL_SET, POD, CONFIG_MAP, CLAIM, NODE, STORAGE_CLASS, VOLUME, PRIORITY_CLASS, PROFILE, QUOTA, LIMIT_RANGE,
)  # fmt: skip
WATCHED = (DLJOB, *REFLECTED)
LABELLED = (STATEFUL_SET, CONFIG_MAP)
"""Kinds of which the operator needs only the objects of jobs. The API server selects these by their label.

The operator needs all pods, because each pod takes resources from its node.
"""
DEAD_SILENCES = 8 / 3
"""A watch that is silent for this many times ``silence_s`` counts as dead, and the operator must be restarted.

With the default of ``silence_s``, these are 240 s. A silent watch is opened again earlier, after ``silence_s`` seconds.
"""
MAX_UNREADABLE = 10_000
MAX_OVERDUE = 100
"""Maximum number of jobs that one check reads because kopf does not process their events."""


class Watches:
    """All watches of the operator except those of Kueue: kopf's for DLJobs, and Reflectors for the other kinds.

    They write watched objects to the cache and add the keys of affected jobs to the work queue.
    """

    def __init__(
        self,
        cache: Cache,
        queue: WorkQueue[JobKey],
        api: Api,
        namespaces: tuple[str, ...],
        session: Callable[[type[aiohttp.ClientResponse]], aiohttp.ClientSession],
        capacity_changed: Callable[[], None],
        *,
        all_pods: bool = False,
        silence_s: float = SILENCE_S,
        more: Iterable[Kind] = (),
    ) -> None:
        """``namespaces``: those to watch; empty: all. ``session``: opens an HTTP session with the given response class.

        ``capacity_changed``: called after changes of objects of the kinds ``CAPACITY``. ``all_pods``: True: watch pods
        in all namespaces. ``silence_s``: seconds without an event after which a watch is opened again.
        ``more``: further kinds of objects of jobs to watch.
        """
        self.registry = kopf.OperatorRegistry()
        self._affected = AffectedJobs(cache, queue, capacity_changed)
        self._cache, self._queue, self._api, self._namespaces = cache, queue, api, namespaces
        self._silence_s, self._events = silence_s, UnprocessedEvents(namespaces)
        self._activity = WatchActivity(namespaces, silence_s)
        self._rereader = Rereader(cache, api, self._put, self._affected.changed)
        self.session = session(
            bounded_responses(
                self._activity.asked,
                self._activity.active,
                self._jobs_listed,
                self._jobs_received,
                self._jobs_refused,
                silence_s,
            )
        )
        """The session of kopf. The caller closes it."""
        self._unreadable: set[str] = set()
        """Uids of DLJobs that could not be put into the cache."""
        self._reflectors = [
            Reflector(
                api,
                cache,
                kind,
                namespace,
                JOB_LABEL if kind in (*LABELLED, *more) else "",
                self._affected.changed,
                queue.add,
                silence_s,
            )
            for kind in (*REFLECTED, *more)
            for namespace in kind.watched_in(namespaces, all_pods=all_pods)
        ]
        kopf.on.login(registry=self.registry)(self._login)
        group, _, version = DLJOB.api_version.rpartition("/")
        kopf.on.event(group, version, DLJOB.plural, id="event", registry=self.registry)(self._event)

    async def reflect(self) -> None:
        """Watch all kinds except DLJobs, which kopf watches. Never return.

        Also check again and again that kopf's watch has missed no change of a DLJob. If one of the watches ends with an
        error, raise this error.
        """
        watches = {f"watch of {reflector.name}": reflector.run() for reflector in self._reflectors}
        await run_until_one_ends({**watches, "check of DLJobs": self._check_jobs()})

    async def synced(self) -> None:
        """Wait until all objects that existed at the start are in the cache.

        A job could otherwise be reconciled before its pods are known, or planned before jobs with older claims are.
        Namespaces in which the operator may not list DLJobs do not count, if there are others.
        """
        await self._events.first_processed.wait()
        for reflector in self._reflectors:
            if reflector.namespace not in self._events.skipped:
                await reflector.synced.wait()

    def unsynced(self) -> str | None:
        """Return the kinds whose existing objects are not all in the cache yet; None if all are."""
        missing = (each for each in self._reflectors if each.namespace not in self._events.skipped)
        names = sorted(each.name for each in missing if not each.synced.is_set())
        names += [] if self._events.first_processed.is_set() else [DLJOB.plural]
        return ", ".join(names) or None

    def dead(self, others: Iterable[Reflector] = ()) -> str | None:
        """Return a message about the watch that has been silent the longest, if it counts as dead; else None.

        A watch counts as dead if it has been inactive for longer than ``DEAD_SILENCES`` times ``silence_s`` seconds.
        The liveness probe calls this to restart the operator. ``others``: further watches to check. Any thread may call
        this method.
        """
        now = monotonic()
        silent_s = {reflector.name: now - reflector.active_at for reflector in (*self._reflectors, *others)}
        silent_s |= self._activity.silent_s()
        name = max(silent_s, key=lambda each: silent_s[each])
        if silent_s[name] <= DEAD_SILENCES * self._silence_s:
            return None
        return f"the watch of {name} has been silent for {silent_s[name]:.0f} s"

    async def _check_jobs(self) -> None:
        """Check again and again that the watches of DLJobs work, so that ``dead`` reports those that do not.

        Run forever. Each round also reads the jobs whose events kopf has received and not processed
        (``_process_overdue``), and the objects for which the cache has room again.
        """
        while True:
            await asyncio.sleep(self._silence_s / 3)
            await self._process_overdue()
            await self._rereader.round()
            await self._activity.check(self._misses_jobs)

    async def _process_overdue(self) -> None:
        """Read the jobs again whose events kopf has received and not processed for ``silence_s`` seconds.

        One of kopf's tasks hangs or has lost the event. This concerns only the job, so the operator goes on: with the
        next event of the job, kopf may start another task.
        """
        for event in self._events.overdue(self._silence_s, monotonic(), MAX_OVERDUE):
            key = (event.namespace, event.name)
            log.error(
                "kopf has not processed an event of this job for %.0f s; the operator reads the job itself",
                monotonic() - event.since_s, extra=log_fields(key, self._cache.job(key)),
            )  # fmt: skip
            try:
                body = await self._api.get(DLJOB, *key)
            except ApiError as error:
                if not error.not_found:
                    log.warning("DLJob %s/%s could not be read (%s); its latest change is not handled yet", *key, error)
                elif self._cache.drop(DLJOB, *key, event.uid):
                    self._queue.add(key)
                continue
            try:
                await self._put(body)
            except Exception:
                log.exception("a job cannot be parsed and is ignored", extra=log_fields(key, self._cache.job(key)))

    async def _misses_jobs(self, namespace: str | None) -> bool:
        """Return True if a namespace (None: any) has a DLJob that the cache lacks, or a newer version than the cache.

        DLJobs that could not be put into the cache do not count. Raise ApiError if the API server does not answer.
        """
        for meta in (await self._api.metadata(DLJOB, namespace, ""))[0]:
            known = self._cache.found(DLJOB, meta["namespace"], meta["name"])
            if known is None or known.uid != meta["uid"]:
                if meta["uid"] not in self._unreadable:
                    return True
            elif older(known.version, version_number(meta["resourceVersion"])):
                return True
        return False

    async def run(self, identity: str, stop: asyncio.Event, end: Callable[[], Awaitable[None]]) -> None:
        """Watch until ``stop`` is set or a signal arrives. ``end`` stops the operator's own tasks.

        When kopf ends, it waits 5 s for all tasks that still run, and raises their errors. The operator's own tasks
        therefore end before kopf does.
        """

        async def cleanup(**_: Any) -> None:
            stop.set()  # kopf also waits for this event.
            await end()

        kopf.on.cleanup(id="end", registry=self.registry)(cleanup)
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=self.registry,
            settings=kopf_settings.settings(),
            # Without an identity, kopf looks up the name of its user, but an arbitrary user id has no name.
            identity=peering.Identity(identity),
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=stop,
            memories=kopf_settings.NoMemories(),
        )
        stop_on_signals(stop)  # A second signal made kopf's handlers fail.
        await kopf.run_tasks(tasks, ignored=others)

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        """Return the HTTP session for kopf's watches."""
        return kopf.AiohttpSession(server=self._api.server, aiohttp_session=self.session)

    def _jobs_refused(self, namespace: str | None) -> None:
        self._activity.active(namespace)  # The watch is silent for a known reason.
        self._events.refused(namespace)

    def _jobs_received(self, body: Mapping[str, Any]) -> None:
        self._events.received(body, monotonic())

    def _jobs_listed(self, namespace: str | None, uids: Iterable[str], version: int | None) -> None:
        """Remove from the cache, and queue, the jobs that are not in a complete list of DLJobs.

        They were deleted while no watch ran. ``namespace``: namespace of the list; None: all. ``uids``: uids of the
        listed jobs. ``version``: resourceVersion of the list. Cached jobs with a newer version stay; None: all stay.
        """
        self._events.listed(namespace, uids := set(uids))
        for key in self._cache.prune(DLJOB, uids, version, namespace):
            self._queue.add(key)

    async def _put(self, body: Mapping[str, Any]) -> None:
        """Put a DLJob into the cache, and queue it if it changed."""
        uid = body["metadata"]["uid"]
        try:
            changed = self._cache.put(DLJOB, body)
        except Exception:
            if len(self._unreadable) < MAX_UNREADABLE:
                self._unreadable.add(uid)
            raise
        self._unreadable.discard(uid)
        if changed:
            self._affected.changed(DLJOB, body)

    async def _event(self, type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002 - kopf's name
        self._events.processed(body, monotonic())
        meta = body["metadata"]
        if meta.get("namespace") in self._events.skipped:  # The start has not waited for its pods.
            await asyncio.gather(*(r.synced.wait() for r in self._reflectors if r.namespace == meta["namespace"]))
        if type != "DELETED":
            await self._put(body)
        elif self._cache.drop(DLJOB, meta.get("namespace") or "", meta["name"], meta["uid"]):
            self._affected.changed(DLJOB, body)
