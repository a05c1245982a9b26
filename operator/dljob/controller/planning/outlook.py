"""Forecasts for the waiting jobs: when they start, and when they end.

The run time of a waiting job and the needs of its pods come from a plan that is made as if all jobs had ended.
The rules of the forecast are in ``dljob.scheduling.forecast``; this module feeds them.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf, isfinite

from dljob.cluster import ClusterView
from dljob.controller.metrics import Metrics
from dljob.controller.planning.answers import Decision
from dljob.controller.planning.queueing import Ask, Queue
from dljob.job.observed import NO_OUTLOOK, Outlook
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import OVER, remaining, run_time
from dljob.job.reservation import PlannedPods, plan_reservation
from dljob.job.waiting import stops
from dljob.kube import Cache, JobKey
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.scheduling import (
    Forecast,
    Holder,
    Interval,
    ReservationBook,
    Use,
    Waiter,
    forecast,
    without_reserved,
)
from dljob.status import previous

log = logging.getLogger("dljob")

MIN_S = 1.0
"""Minimum number of seconds between two forecasts."""
REPEAT_S = 60.0
"""Seconds after which the queue is simulated again although nothing in the cluster changed: running jobs progress."""
IDLE_FACTOR = 20.0
"""Minimum time from one forecast to the next, as a multiple of the first one's duration without planning."""
MAX_ASKED = 5
"""Maximum number of jobs that are planned for one forecast, because jobs that could start wait meanwhile."""
MAX_LEFT = timedelta(days=3650)
"""Forecasts of times further away are shown as unknown."""


@dataclass(frozen=True)
class _Alone:
    """The result of planning a job on the cluster without other jobs.

    ``waiter``: the job's run time and needs according to this plan; None if no plan is possible.
    """

    question: ParsedJob
    versions: tuple[int, int]
    """Versions of the profiles and of the cluster without jobs for which the plan was made.

    After a change of a version, the plan is used until the job is planned again.
    """
    waiter: Waiter | None


class Outlooks:
    """Forecasts of all waiting jobs. Use it in one event loop only."""

    def __init__(
        self,
        cache: Cache,
        book: ReservationBook,
        queue: Queue,
        metrics: Metrics,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._cache, self._book, self._queue, self._metrics = cache, book, queue, metrics
        self._clock, self._now = clock, now
        self._alone: dict[JobKey, _Alone] = {}
        self._whole: ClusterView | None = None
        """The cluster as if all jobs had ended. ``_changes``: how often this view has changed."""
        self._changes = 0
        self._looked_at: tuple[int, int] | None = None
        self._found: dict[JobKey, Outlook] = {}
        self._news: set[JobKey] = set()
        """Jobs whose status does not show yet that they have a forecast, or that they now meet or miss a deadline."""
        self._next_s, self._state = -inf, object()
        self._made_s = -inf

    def of(self, key: JobKey) -> Outlook | None:
        """Return the forecast for the status of a waiting job; None if there is none. Reset ``is_news``."""
        self._news.discard(key)
        return self._found.get(key)

    def is_news(self, key: JobKey) -> bool:
        """Return True if the status of a waiting job must be written now to show news of the job's forecast."""
        return key in self._news

    async def note(self, key: JobKey, question: ParsedJob, decision: Decision, ask: Ask) -> None:
        """Note the predicted run time of a job with a deadline, because the job's place in the queue depends on it."""
        if question.spec is None or question.spec.scheduling.finish_by is None or question.queued:
            return
        if isinstance(decision, Infeasible):
            await self.learn(key, question, ask)
        elif (job := self._cache.job(key)) is not None:
            self._queue.run_p90_s[key] = run_time(decision.status.predicted, previous(job)).p90

    async def learn(self, key: JobKey, question: ParsedJob, ask: Ask) -> None:
        """Plan a waiting job as if all jobs had ended, to learn its run time and needs, unless such a plan is known."""
        self._look()
        if self._knows(key, question):
            return
        assert self._whole is not None
        versions = self._versions()
        plan, job, waiter = await ask(question, self._whole), self._cache.job(key), None
        if isinstance(plan, StoredPlan) and job is not None:
            run = run_time(plan.status.predicted, previous(job))
            waiter = Waiter(key, run, plan_reservation(PlannedPods.of(plan), job.spec, {}))
            self._queue.run_p90_s[key] = run.p90
        self._alone[key] = _Alone(question, versions, waiter)

    def _knows(self, key: JobKey, question: ParsedJob) -> bool:
        known = self._alone.get(key)
        return known is not None and known.question == question and known.versions == self._versions()

    def _versions(self) -> tuple[int, int]:
        return self._cache.profiles_version, self._changes

    async def refresh(
        self, waiting: Mapping[JobKey, ParsedJob], ask: Ask, busy: Callable[[], bool]
    ) -> tuple[JobKey, ...]:
        """Update the forecasts if they are due. Return the jobs whose status must be written now to show news.

        ``waiting``: questions of the jobs in the queue. ``busy``: returns True while a job waits for its plan. An error
        is logged, because planning must go on.
        """
        try:
            return await self._refresh(waiting, ask, busy)
        except Exception:
            log.exception("the forecast of the queue failed")
            return ()

    async def _refresh(
        self, waiting: Mapping[JobKey, ParsedJob], ask: Ask, busy: Callable[[], bool]
    ) -> tuple[JobKey, ...]:
        self.forget_others(waiting)
        if not waiting:
            self._metrics.forecast((), 0)
            return ()
        state = self._cache.ledger.version, self._book.version, self._cache.profiles_version, frozenset(waiting)
        now_s = self._clock()
        if now_s < self._next_s or (state == self._state and now_s - self._made_s < REPEAT_S):
            return ()
        line = sorted(waiting, key=lambda key: self._queue.job(waiting[key]).place)
        self._look()
        asked, complete, asking_s = 0, True, 0.0
        for key in line:
            if self._knows(key, waiting[key]):
                continue
            if asked == MAX_ASKED or busy():
                complete = False
                break
            asked_s = self._clock()
            await self.learn(key, waiting[key], ask)
            asking_s += self._clock() - asked_s
            asked += 1
        news = self._simulate(line, waiting)
        self._made_s = self._clock()
        self._next_s = self._made_s + max(MIN_S, IDLE_FACTOR * (self._made_s - now_s - asking_s))
        self._state = state if complete else object()
        return news

    def forget_others(self, waiting: Mapping[JobKey, ParsedJob]) -> None:
        """Forget all jobs that are not in ``waiting``."""
        for state in (self._alone, self._found, self._queue.run_p90_s):
            for gone in state.keys() - waiting.keys():
                del state[gone]
        self._news &= waiting.keys()

    def forget_all(self) -> None:
        self.forget_others({})
        self._whole, self._looked_at, self._next_s, self._state = None, None, -inf, object()

    def _look(self) -> None:
        """Update ``_whole`` (the cluster as if all jobs had ended) if nodes, pods or reservations have changed."""
        state = self._cache.ledger.version, self._book.version
        if state == self._looked_at:
            return
        self._looked_at = state
        keys = {job.key for job in self._cache.jobs()}
        uids = [pod.uid for key in sorted(keys) for pod in self._cache.pods_of(key)]
        whole = without_reserved(self._cache.ledger.view(uids), self._book.current(ended=keys))
        if whole != self._whole:
            self._whole = whole
            self._changes += 1

    def _simulate(self, line: list[JobKey], waiting: Mapping[JobKey, ParsedJob]) -> tuple[JobKey, ...]:
        known = [each.waiter for key in line if (each := self._alone.get(key)) is not None and each.waiter is not None]
        found = forecast(self._cache.ledger.view(), self._holders(), known)
        news, now = [], self._now()
        for key in line:
            if key not in self._alone:
                continue  # It has not been planned yet. The status shows the forecast of the operator before.
            outlook = _outlook(found[key], now) if key in found else NO_OUTLOOK
            spec, before = waiting[key].spec, self._found.get(key)
            due = spec.scheduling.finish_by if spec is not None else None
            if before is None or before.meets(due) != outlook.meets(due):
                news.append(key)
            self._found[key] = outlook
        self._news.update(news)
        starts = [found[key].start for key in line if key in found and isfinite(found[key].start.p90)]
        self._metrics.forecast(starts, len(line) - len(starts))
        return tuple(news)

    def _holders(self) -> list[Holder]:
        ledger, holders = self._cache.ledger, []
        for job in self._cache.jobs():
            if not self._queue.holds_devices(job.key):
                continue
            bound = [pod for each in self._cache.pods_of(job.key) if (pod := ledger.bound(each.uid)) is not None]
            uses = tuple(
                Use(pod.node, pod.requests.devices, pod.requests.cpu_m / 1000, pod.requests.memory_nbytes)
                for pod in bound
            )
            left = OVER if stops(job) else remaining(previous(job))
            holders.append(Holder(job.key, left, uses, self._book.reserved(job.key)))
        return holders


def _outlook(found: Forecast, now: datetime) -> Outlook:
    def moments(of: Interval) -> tuple[datetime | None, ...]:
        return tuple(
            now + timedelta(seconds=s) if s < MAX_LEFT.total_seconds() else None for s in (of.p10, of.p50, of.p90)
        )

    earliest, start, latest = moments(found.start)
    return Outlook(earliest, start, latest, moments(found.end)[2])
