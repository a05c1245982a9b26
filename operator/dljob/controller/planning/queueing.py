"""The queue of waiting jobs: their order, and the shadow reservation of the first in line.

A shadow reservation is the time at which the first in line is predicted to start, and what it needs then. Order and
shadow are derived from watched objects and from reservations, so that the next leader derives the same ones. The rules
are in ``dljob.scheduling``; this module feeds them.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from heapq import merge
from itertools import takewhile
from math import inf

from dljob.cluster import ClusterView
from dljob.controller.planning.amortized import Amortized
from dljob.controller.planning.answers import (
    First,
    Lines,
    UsableDevices,
    WaitingLine,
    beside_quota,
    queued,
    wants_others,
    with_limits,
)
from dljob.controller.planning.queue.holdings import Holdings
from dljob.controller.planning.queue.shadows import Ask, Shadows
from dljob.job.observed import JobSeen
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import run_p90_s, run_time, slowdown
from dljob.job.waiting import often_timed_out
from dljob.kube import Cache, JobKey
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.reconcile.planning.limits import quota_needs
from dljob.scheduling import QueuedJob, QueuePolicy, ReservationBook, Shares, latest_start
from dljob.scheduling.limits.quotas import shortages
from dljob.status import previous

PLACES_S = 5.0
"""Seconds after which the places of all jobs are found again. That takes milliseconds for 1,000 jobs."""
Waiting = Iterable[tuple[QueuedJob, ParsedJob]]
"""Waiting jobs as they are planned, in the order of the queue."""


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
        self._cache, self._clock, self._now, self._policy = cache, clock, now, policy
        self.run_p90_s: dict[JobKey, float] = {}
        """90th percentile of the predicted run time in seconds of each waiting job for which it is known."""
        self.holdings = Holdings(cache, book)
        self._shadows = Shadows(cache, self.holdings, clock)
        self._shares = Amortized(self.holdings.dominant_shares, clock)
        self._places: tuple[float, dict[JobKey, int]] = (-inf, {})
        """When the queue was sorted, and the place of each of its jobs, from 1."""
        self.overdue: frozenset[JobKey] = frozenset()
        """The waiting jobs that are overdue (``scheduling.assignment.patience``), by the last assignment."""
        self._lines = list[WaitingLine]()

    def line(self) -> WaitingLine:
        """Return a new, empty line of jobs, in the order of this queue."""
        found = WaitingLine(self.job, self.share, self._now, self._cache.priority_classes.values)
        self._lines.append(found)
        return found

    def in_order(self, jobs: Iterable[ParsedJob]) -> Waiting:
        """Return the jobs in the order in which they must not be delayed."""
        return sorted(((self.job(each), each) for each in jobs), key=self._order_of)

    def _waiting(self, line: WaitingLine, namespace: str | None = None) -> Waiting:
        """Return the jobs of a line as ``in_order`` does. ``namespace``: only those of one namespace."""
        overdue = [line[key] for key in self.overdue if key in line and namespace in (None, key[0])]
        others = (each for each in line.in_order(namespace) if each[0].key not in self.overdue)
        return merge(self.in_order(overdue), others, key=self._order_of)

    def note_run_s(self, key: JobKey, run_p90_s: float | None) -> None:
        """Store the predicted run time of a waiting job, on which its place depends if it has a deadline."""
        if run_p90_s is None:
            self.run_p90_s.pop(key, None)
        else:
            self.run_p90_s[key] = run_p90_s
        for line in self._lines:
            line.look_again(key)

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
        return self._policy.weighted(namespace, self._shares.of(self.holdings.versions()).get(namespace, 0.0))

    def preempts(self, question: ParsedJob) -> bool:
        """Return True if running jobs of a lower priority may stop for a job, because it will probably run then."""
        named = question.spec.scheduling.priority_class_name if question.spec is not None else None
        starts = self.starts(question.observed.job.key)
        return self._policy.preempts and starts and self._cache.priority_classes.preempts(named)

    def starts(self, key: JobKey) -> bool:
        """Return False for a job whose starts failed so often that no job stops for it. The next one counts as first.

        It gets devices before that one nevertheless, but releases them after its start time-out.
        """
        job = self._cache.job(key)
        return job is None or not often_timed_out(job)

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

    async def without_delay(
        self,
        key: JobKey,
        question: ParsedJob,
        plan: StoredPlan,
        lines: Lines,
        view: ClusterView,
        free: ClusterView,
        ask: Ask,
        *,
        gains: bool = False,
        grows: bool = False,
    ) -> tuple[StoredPlan | Infeasible, JobKey | None]:
        """Return a plan of a job that does not delay the first in line, and None; or why it waits, and for which job.

        ``plan``: its plan on ``view``, the nodes with all that it may use. ``lines``: the waiting jobs. ``free``: the
        nodes with what is free for every job. ``gains``: True if it moves only because it gains by that. ``grows``:
        True if it has the turn to do so, when no other job waits for its devices.

        A job that holds devices keeps these, but takes no others from the first in line because its spec has changed
        (for example by ``kubectl scale``), because it is slower than predicted, or for its own gain.
        """
        if not (lines.devices or lines.quota):
            return plan, None
        holds = self.holdings.holds_devices(key)
        moves = not holds or gains or wants_others(question)
        self._shadows.forget_others(lambda each: each in lines.devices or each in lines.quota)
        if moves:
            first = await self._first_before(question, self._rivals(question, lines), lines, ask, holds=holds)
            if first is not None and not first.shadow.after(self._clock(), self._run_s(question, plan)):
                view = first.shadow.beside(free, view) if holds else first.shadow.beside(view)
                beside = await ask(question, view)
                if isinstance(beside, Infeasible):
                    return queued(first, self._clock()), first.key
                plan = beside
        if not (moves or grows):
            return plan, None
        return await self._within_quotas(key, question, plan, lines, view, ask, holds=holds)

    def _rivals(self, question: ParsedJob, lines: Lines) -> Waiting:
        """Return the jobs that wait for a device type that ``question`` may use. It delays no others."""
        usable = UsableDevices(self._cache.ledger.view())
        mine = usable.of(question)
        return (
            each
            for each in self._waiting(lines.devices)
            if lines.counts(each[0].key) and not mine.isdisjoint(usable.of(each[1]))
        )

    async def _within_quotas(
        self,
        key: JobKey,
        question: ParsedJob,
        plan: StoredPlan,
        lines: Lines,
        view: ClusterView,
        ask: Ask,
        *,
        holds: bool,
    ) -> tuple[StoredPlan | Infeasible, JobKey | None]:
        """Return a plan that takes no quota from the first in line of the waiting jobs of the job's namespace.

        The rules, ``lines``, ``view`` and the result are those of ``without_delay``.
        """
        needs, limits = quota_needs(plan), question.observed.limits
        if not needs:
            return plan, None
        devices = (each for each in self._waiting(lines.devices, key[0]) if lines.counts(each[0].key))
        line = merge(devices, self._waiting(lines.quota, key[0]), key=self._order_of)
        first = await self._first_before(question, line, lines, ask, holds=holds)
        if first is None or first.shadow.after(self._clock(), self._run_s(question, plan)):
            return plan, None
        limits = self.holdings.limits_beside(key, limits, first)
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
        line: Waiting,
        lines: Lines,
        ask: Ask,
        *,
        holds: bool,
    ) -> First | None:
        """Return the first job in ``line`` if it is before the job ``question``, with its shadow reservation; or None.

        The latter must not delay this first job. A job that could not run on the whole cluster waits for something
        else, and is never first. ``lines``: as of ``without_delay``. ``holds``: True if the job ``question`` holds
        devices. It does not wait, so that only its priority puts it before others.
        """
        mine = self.job(question)
        before = takewhile(lambda each: self.is_before(each[0], mine, holds=holds) or each[0].key == mine.key, line)
        return await self.first((each for each in before if each[0].key != mine.key), ask, lines.passed_over)

    def is_before(self, its: QueuedJob, mine: QueuedJob, *, holds: bool) -> bool:
        """Return True if the job ``mine`` must not delay the other one. ``holds``: as of ``_first_before``."""
        first = its.priority >= mine.priority if holds else self._order(its) <= self._order(mine)
        return first and its.key != mine.key

    async def first(
        self,
        line: Waiting,
        ask: Ask,
        passed_over: Callable[[JobKey], bool] = lambda key: False,
    ) -> First | None:
        """Return the first job of a ``line`` (see ``in_order``), with its shadow reservation; None if there is none.

        Jobs that hold devices, and jobs that could not run on the whole cluster, are never first. Of the jobs for which
        ``passed_over`` returns True, neither are those that could start now.
        """
        for other, each in line:
            found = None if self.holdings.holds_devices(other.key) else await self._shadows.of(other.key, each, ask)
            if found is not None and not (found.start_s <= self._clock() and passed_over(other.key)):
                return First(other.key, found)
        return None

    def _order(self, job: QueuedJob) -> tuple[object, ...]:
        """Return the sort key of a job that must not be delayed: an overdue one comes before others of its priority."""
        return -job.priority, job.key not in self.overdue, job.place

    def _order_of(self, job: tuple[QueuedJob, ParsedJob]) -> tuple[object, ...]:
        return self._order(job[0])

    def place(self, key: JobKey, waiting: WaitingLine) -> tuple[int, int] | None:
        """Return (place of a job in the queue, from 1; number of jobs in it); None if the job is not in the queue.

        ``waiting``: the jobs in the queue. The places are found again after ``PLACES_S``, so that they may be out of
        date for some seconds, except that of a new job.
        """
        if self._clock() - self._places[0] >= PLACES_S:
            self.sorted_as([job.key for job, _ in waiting.in_order()])
        place = self._places[1].get(key)
        if place is None:
            return (waiting.place_of(key), len(waiting)) if key in waiting else None
        return place, len(self._places[1])

    def sorted_as(self, line: Sequence[JobKey]) -> None:
        """Note the order of the queue. ``line``: all its jobs, the first one first."""
        self._places = (self._clock(), {key: place for place, key in enumerate(line, 1)})

    def forget_all(self) -> None:
        self._shadows.forget_all()
        self.overdue, self._places = frozenset(), (-inf, {})
        for key in list(self.run_p90_s):
            self.note_run_s(key, None)
        self._shares.forget()
