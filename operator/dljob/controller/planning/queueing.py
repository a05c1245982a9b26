"""The queue of waiting jobs: their order, and the shadow reservation of the first in line.

A shadow reservation is the time at which the first in line is predicted to start, and what it needs then. Order and
shadow are derived from watched objects and from reservations, so that the next leader derives the same ones. The rules
are in ``dljob.scheduling``; this module feeds them.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from heapq import heapify, heappop
from math import inf

from dljob.cluster import ClusterView
from dljob.controller.planning.amortized import Amortized, OfEachJob
from dljob.controller.planning.answers import First, UsableDevices, beside_quota, queued, wants_others, with_limits
from dljob.controller.planning.reserving import charges_of, limits_for
from dljob.job.observed import JobSeen
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import remaining_p90_s, run_p90_s, run_time, slowdown
from dljob.job.reservation import PlannedPods, plan_reservation
from dljob.job.waiting import often_timed_out, stops
from dljob.kube import Cache, JobKey
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.reconcile.planning.limits import quota_needs
from dljob.scheduling import (
    NOTHING,
    Charge,
    NamespaceLimits,
    QueuedJob,
    QueuePolicy,
    Requests,
    ReservationBook,
    RunningJob,
    Shadow,
    Shares,
    StartSearch,
    dominant_share,
    in_order_of_ends,
    latest_start,
    shadow,
    start_in_s,
    without_reserved,
)
from dljob.scheduling.limits.quotas import shortages
from dljob.status import previous

SHADOW_S = 10.0
"""Seconds after which a shadow reservation is made again although no capacity changed: running jobs progress."""
PLACES_S = 5.0
"""Seconds after which the queue is sorted again to find its jobs' places. Sorting 1,000 jobs takes milliseconds."""
Ask = Callable[[ParsedJob, ClusterView], Awaitable[StoredPlan | Infeasible]]
"""Function that plans a job on a view of the cluster (the nodes with what is free). It returns the plan, or why none is
possible."""

log = logging.getLogger("dljob")


@dataclass(frozen=True)
class _Known:
    """The shadow reservation of one job, and the state of the cluster for which it was computed.

    ``question``: the job, as it was planned. ``versions``: of the ledger, of the reservations, and of the quotas.
    ``at_s``: time of the computation. ``found``: None if no plan of the job is possible even when all jobs have ended.
    """

    question: ParsedJob
    versions: tuple[int, int, int]
    at_s: float
    whole: ClusterView
    """The nodes with the resources that are free when all jobs have ended."""
    limits: NamespaceLimits
    """What the quotas and limit ranges of the job's namespace leave then."""
    found: Shadow | None


class Queue:
    """The queue of waiting jobs: their order, and the shadow reservation of the first in line.

    Use it in one event loop only.
    """

    def __init__(
        self,
        cache: Cache,
        book: ReservationBook,
        clock: Callable[[], float],
        now: Callable[[], datetime],
        policy: QueuePolicy,
    ) -> None:
        self._cache, self._book, self._clock, self._now, self._policy = cache, book, clock, now, policy
        self.run_p90_s: dict[JobKey, float] = {}
        """90th percentile of the predicted run time in seconds of each waiting job for which it is known."""
        self._known: dict[JobKey, _Known] = {}
        self._shares = Amortized(self._dominant_shares, clock)
        self._left_p90_s = OfEachJob(lambda job: remaining_p90_s(previous(job)))
        self._places: tuple[float, dict[JobKey, int]] = (-inf, {})
        """When the queue was sorted, and the place of each of its jobs, from 1."""
        self.overdue: frozenset[JobKey] = frozenset()
        """The waiting jobs that are overdue (``scheduling.assignment.patience``), by the last assignment."""

    def job(self, question: ParsedJob) -> QueuedJob:
        """Return the properties of a job that determine its place in the queue."""
        job, scheduling = question.observed.job, question.spec.scheduling if question.spec is not None else None
        priority = self._cache.priority_classes.value(
            scheduling.priority_class_name if scheduling is not None else None
        )
        finish_by = scheduling.finish_by if scheduling is not None and self._policy.deadlines else None
        latest = latest_start(finish_by, self.run_p90_s.get(job.key), self._now())
        return QueuedJob(job.key, job.uid, priority, self.share(job.namespace), job.created, latest)

    def share(self, namespace: str) -> float:
        """Return the dominant share of a namespace, divided by its weight."""
        return self._policy.weighted(namespace, self._shares.of(self._versions()).get(namespace, 0.0))

    def preempts(self, question: ParsedJob) -> bool:
        """Return True if running jobs of a lower priority may stop for a job, because it will probably run then."""
        named = question.spec.scheduling.priority_class_name if question.spec is not None else None
        job = self._cache.job(question.observed.job.key)
        starts = job is None or not often_timed_out(job)
        return self._policy.preempts and starts and self._cache.priority_classes.preempts(named)

    def recent(self, job: JobSeen) -> QueuedJob:
        """Return what the place of a job in the queue depended on when it was created, for forecasts.

        The deadline of the job and the share of its namespace at that time are not known, and are left out.
        """
        named = (job.spec.get("scheduling") or {}).get("priorityClassName")
        return QueuedJob(job.key, job.uid, self._cache.priority_classes.value(named), 0.0, job.created)

    @property
    def policy(self) -> QueuePolicy:
        return self._policy

    @property
    def shares(self) -> Shares:
        """Return the cluster's resources and the weights of namespaces, for the dominant shares in forecasts."""
        return Shares(self._cache.ledger.total(), self._policy)

    def holds_devices(self, key: JobKey) -> bool:
        """Return True if pods of the job are bound to nodes, or if a plan of it reserves resources."""
        return self._book.holds(key) or any(self._cache.ledger.holds(pod.uid) for pod in self._cache.pods_of(key))

    async def without_delay(
        self,
        key: JobKey,
        question: ParsedJob,
        plan: StoredPlan,
        waiting: Mapping[JobKey, ParsedJob],
        short: Mapping[JobKey, ParsedJob],
        view: ClusterView,
        free: ClusterView,
        ask: Ask,
        *,
        gains: bool = False,
        grows: bool = False,
        passed_over: Collection[JobKey] = (),
    ) -> tuple[StoredPlan | Infeasible, JobKey | None]:
        """Return a plan of a job that does not delay the first in line, and None; or why it waits, and for which job.

        ``plan``: its plan on ``view``, the nodes with all that it may use. ``waiting``, ``short``: the jobs for which
        no plan was possible because of devices and of quotas, as they are planned. ``free``: the nodes with what is
        free for every job. ``gains``: True if it moves only because it gains by that. ``grows``: True if it has the
        turn to do so, when no other job waits for its devices. ``passed_over``: jobs that are delayed only if they
        cannot start now anyway, because an assignment has given devices that they could use to others.

        A job that holds devices keeps these, but takes no others from the first in line because its spec has changed
        (for example by ``kubectl scale``), because it is slower than predicted, or for its own gain.
        """
        if not (waiting or short):
            return plan, None
        holds = self.holds_devices(key)
        moves = not holds or gains or wants_others(question)
        for gone in self._known.keys() - waiting.keys() - short.keys():
            del self._known[gone]
        if moves and waiting:
            rivals = self._with_devices_of(question, waiting)
            first = await self._first_before(question, rivals, ask, passed_over, holds=holds)
            if first is not None and not first.shadow.after(self._clock(), self._run_s(question, plan)):
                view = first.shadow.beside(free, view) if holds else first.shadow.beside(view)
                beside = await ask(question, view)
                if isinstance(beside, Infeasible):
                    return queued(first, self._clock()), first.key
                plan = beside
        line = {other: each for other, each in {**waiting, **short}.items() if other[0] == key[0]}
        if not line or not (moves or grows):
            return plan, None
        return await self._within_quotas(key, question, plan, line, view, ask, passed_over, holds=holds)

    def _with_devices_of(self, question: ParsedJob, waiting: Mapping[JobKey, ParsedJob]) -> dict[JobKey, ParsedJob]:
        """Return the waiting jobs that may use a device type that ``question`` may use. It delays no others."""
        usable = UsableDevices(self._cache.ledger.view())
        mine = usable.of(question)
        return {other: each for other, each in waiting.items() if not mine.isdisjoint(usable.of(each))}

    async def _within_quotas(
        self,
        key: JobKey,
        question: ParsedJob,
        plan: StoredPlan,
        line: Mapping[JobKey, ParsedJob],
        view: ClusterView,
        ask: Ask,
        passed_over: Collection[JobKey],
        *,
        holds: bool,
    ) -> tuple[StoredPlan | Infeasible, JobKey | None]:
        """Return a plan that takes no quota from the first of the ``line``, the waiting jobs of the job's namespace.

        The rules, ``view``, ``passed_over`` and the result are those of ``without_delay``.
        """
        needs, limits = quota_needs(plan), question.observed.limits
        if not needs:
            return plan, None
        first = await self._first_before(question, line, ask, passed_over, holds=holds)
        if first is None or first.shadow.after(self._clock(), self._run_s(question, plan)):
            return plan, None
        limits = self.limits_beside(key, limits, first)
        if not (short := shortages(limits.quotas, needs)):
            return plan, None
        beside = await ask(with_limits(question, limits), view)
        if isinstance(beside, Infeasible):
            return beside_quota(first, short[0], self._clock()), first.key
        return beside, None

    def _run_s(self, question: ParsedJob, plan: StoredPlan) -> float | None:
        """Return the 90th percentile of the seconds for which a job runs with a plan; None: unknown.

        A job that continues its training needs the time for the rest, unless its spec has changed.
        """
        job, before = self._cache.job(question.observed.job.key), question.accepted
        continues = before is not None and before.spec_digest == question.digest and plan.plan.checkpoint.enabled
        whole_s = run_p90_s(plan.status.predicted)
        if job is None or whole_s is None or not continues:
            return whole_s
        status = previous(job)
        return run_time(plan.status.predicted, status).p90 * slowdown(status)

    async def _first_before(
        self,
        question: ParsedJob,
        waiting: Mapping[JobKey, ParsedJob],
        ask: Ask,
        passed_over: Collection[JobKey],
        *,
        holds: bool,
    ) -> First | None:
        """Return the first job in line if it is before the job ``question``, with its shadow reservation; or None.

        The latter must not delay this first job. ``waiting``: the jobs for which no plan was possible, as they are
        planned. A job that could not run on the whole cluster waits for something else, and is never first. ``holds``:
        True if the job ``question`` holds devices. It does not wait, so that only its priority puts it before others.
        """
        mine = self.job(question)
        return await self.first(waiting, ask, passed_over, lambda its: self.is_before(its, mine, holds=holds))

    def is_before(self, its: QueuedJob, mine: QueuedJob, *, holds: bool) -> bool:
        """Return True if the job ``mine`` must not delay the other one. ``holds``: as of ``_first_before``."""
        first = its.priority >= mine.priority if holds else self._order(its) <= self._order(mine)
        return first and its.key != mine.key

    async def first(
        self,
        waiting: Mapping[JobKey, ParsedJob],
        ask: Ask,
        passed_over: Collection[JobKey] = (),
        before: Callable[[QueuedJob], bool] = lambda job: True,
    ) -> First | None:
        """Return the first in line of the jobs ``waiting``, with its shadow reservation; None if there is none.

        Jobs that hold devices, and jobs that could not run on the whole cluster, are never first. Of the jobs
        ``passed_over``, neither are those that could start now. ``before``: returns False for jobs to ignore.
        """
        line = [(self._order(its), other) for other, each in waiting.items() if before(its := self.job(each))]
        heapify(line)  # Usually, the first one is found at once: to sort thousands for each planned job takes longer.
        while line:
            _, other = heappop(line)
            found = None if self.holds_devices(other) else await self._shadow(other, waiting[other], ask)
            if found is not None and not (other in passed_over and found.start_s <= self._clock()):
                return First(other, found)
        return None

    def _order(self, job: QueuedJob) -> tuple[object, ...]:
        """Return the sort key of a job that must not be delayed: an overdue one comes before others of its priority."""
        return -job.priority, job.key not in self.overdue, job.place

    def place(self, key: JobKey, waiting: Mapping[JobKey, ParsedJob]) -> tuple[int, int] | None:
        """Return (place of a job in the queue, from 1; number of jobs in it); None if the job is not in the queue.

        ``waiting``: the jobs in the queue, as they are planned. They are sorted again after ``PLACES_S``, or for a new
        job, so that a place may be out of date for some seconds.
        """
        if self._clock() - self._places[0] >= PLACES_S or (key in waiting and key not in self._places[1]):
            self.sorted_as(sorted(waiting, key=lambda each: self.job(waiting[each]).place))
        place = self._places[1].get(key)
        return None if place is None else (place, len(self._places[1]))

    def sorted_as(self, line: Sequence[JobKey]) -> None:
        """Note the order of the queue. ``line``: all its jobs, the first one first."""
        self._places = (self._clock(), {key: place for place, key in enumerate(line, 1)})

    def forget_all(self) -> None:
        self._known.clear()
        self.overdue, self._places = frozenset(), (-inf, {})
        self.run_p90_s.clear()
        self._shares.forget()

    async def _shadow(self, key: JobKey, question: ParsedJob, ask: Ask) -> Shadow | None:
        """Return the shadow reservation of a job; None if no plan is possible even when all jobs have ended.

        To find the start, search for the smallest n for which a plan is possible after n running jobs have ended, in
        the order of their predicted ends. The quotas of its namespace must admit the plan then, too. The result is used
        again for ``SHADOW_S`` if nothing in the cluster changes.
        """
        known, now_s = self._known.get(key), self._clock()
        versions = (*self._versions(), self._cache.limits_version)
        if known is not None and known.question != question:
            known = None
        if known is not None and known.versions == versions and now_s - known.at_s < SHADOW_S:
            return known.found
        ends = in_order_of_ends(self._running(key))
        whole, limits = self._view_after(key, ends), self._limits_after(key, ends)
        if known is not None and known.found is None and (known.whole, known.limits) == (whole, limits):
            return None
        plan, view = await ask(with_limits(question, limits), whole), whole
        found = None
        if isinstance(plan, StoredPlan):
            search = StartSearch(0, len(ends))
            while not search.done:
                ended = ends[: search.probe]
                earlier = self._view_after(key, ended)
                answer = await ask(with_limits(question, self._limits_after(key, ended)), earlier)
                if isinstance(answer, StoredPlan):
                    plan, view = answer, earlier
                search = search.after(feasible=isinstance(answer, StoredPlan))
            job = self._cache.job(key)
            needs = plan_reservation(PlannedPods.of(plan), job.spec if job is not None else {}, {})
            found = shadow(now_s + start_in_s(ends, search.possible), view, needs, self._view_after(key, ()))
        self._known[key] = _Known(question, versions, now_s, whole, limits, found)
        return found

    def _running(self, without: JobKey) -> list[RunningJob]:
        found = [
            RunningJob(job.key, 0.0 if stops(job) else self._left_p90_s.of(job))
            for job in self._cache.jobs()
            if job.key != without and self.holds_devices(job.key)
        ]
        self._left_p90_s.forget_others(each.key for each in found)
        return found

    def _view_after(self, key: JobKey, ended: Collection[RunningJob]) -> ClusterView:
        return self.view_without(key, {each.key for each in ended})

    def _limits_after(self, key: JobKey, ended: Collection[RunningJob]) -> NamespaceLimits:
        return self.limits_without(key, {each.key for each in ended})

    def view_without(self, key: JobKey, ended: Collection[JobKey]) -> ClusterView:
        """Return the nodes with what is free for the job ``key`` after the jobs ``ended`` have ended.

        The job's own pods and reservations count as free. Pods that belong to no job stay.
        """
        uids = [pod.uid for each in sorted({key, *ended}) for pod in self._cache.pods_of(each)]
        return without_reserved(self._cache.ledger.view(uids), self._book.current(without=key, ended=ended))

    def limits_without(self, key: JobKey, ended: Collection[JobKey] = ()) -> NamespaceLimits:
        """Return what quotas and limit ranges leave for the job ``key`` after the jobs ``ended`` have ended."""
        return limits_for(key, self._cache, self._book, ended)

    def charges_of(self, key: JobKey) -> list[tuple[Charge, int]]:
        """Return what a job charges to quotas by its pods and by what it reserves."""
        return charges_of(key, self._cache, self._book)

    def limits_beside(self, key: JobKey, limits: NamespaceLimits, first: First) -> NamespaceLimits:
        """Return what ``limits`` leave for the job ``key`` beside what the ``first`` in line of its namespace needs."""
        own = [(pod.charge, 1) for pod in self._cache.pods_of(key) if pod.charge is not None]
        return limits.kept_for(first.shadow.charges, own)

    def limits_of(self, question: ParsedJob) -> NamespaceLimits:
        """Return what bounds the next plan of a job. For a job in a queue of Kueue, that is limit ranges alone."""
        found = self.limits_without(question.observed.job.key)
        return replace(found, quotas=()) if question.queued else found

    def _dominant_shares(self) -> dict[str, float]:
        """Return the dominant share of each namespace: the largest fraction that its jobs hold of one resource.

        Resources are devices, CPU and memory of all nodes. Bound pods and reservations count.
        """
        held: dict[str, Requests] = {}
        for job in self._cache.jobs():
            mine = held.get(job.namespace, NOTHING)
            for pod in self._cache.pods_of(job.key):
                mine += self._cache.ledger.requests(pod.uid)
            for each in self._book.reserved(job.key):
                cpu_m = round(each.nodes * each.cpu * 1000)
                mine += Requests(cpu_m, each.nodes * each.memory_nbytes, each.nodes * each.devices)
            held[job.namespace] = mine
        total = self._cache.ledger.total()
        return {name: dominant_share(mine, total) for name, mine in held.items()}

    def _versions(self) -> tuple[int, int]:
        return self._cache.ledger.version, self._book.version
