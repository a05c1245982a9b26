"""Forecasts for the waiting jobs: when they start, and when they end.

The run time of a waiting job and the needs of its pods come from plans that are made as if all jobs had ended.
The rules of the forecast are in ``dljob.scheduling.forecasting``; this module feeds them.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf, isfinite

from dljob.api import DLJobStatus
from dljob.cluster import ClusterView
from dljob.controller.metrics import Metrics
from dljob.controller.planning.amortized import OfEachJob, in_turns
from dljob.controller.planning.answers import Decision
from dljob.controller.planning.parsed_objects import PlansByJob
from dljob.controller.planning.possible_plans import KnownPlan, PossiblePlans
from dljob.controller.planning.queue.shadows import Ask
from dljob.controller.planning.queueing import Queue
from dljob.job.observed import NO_OUTLOOK, JobSeen, Outlook, queued_elsewhere
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import OVER, remaining, run_time, start_without_data_s
from dljob.job.reservation import plan_reservation
from dljob.job.waiting import stops
from dljob.kube import Cache, JobKey
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.scheduling import (
    Forecast,
    Holder,
    Interval,
    PossiblePlan,
    Recent,
    ReservationBook,
    Use,
    Waiter,
    forecast,
    start_up,
    without_reserved,
)
from dljob.scheduling.forecasting.calibration import Calibration
from dljob.scheduling.forecasting.forecast import MAX_FORECAST, WINDOW_S
from dljob.scheduling.forecasting.joint_forecast import JointQueue, forecast_jointly
from dljob.status import previous
from dljob.status.pace import PROMPT_PLACES

log = logging.getLogger("dljob")

MIN_S = 1.0
"""Minimum number of seconds between two forecasts."""
REPEAT_S = 60.0
"""Seconds after which the queue is simulated again although nothing in the cluster changed: running jobs progress."""
IDLE_FACTOR = 20.0
"""Minimum time from one forecast to the next, as a multiple of the seconds that the first one computed.

The time in which it waited for plans does not count."""
MAX_ASKED = 20
"""Maximum number of plans that are made for one forecast. While they are made, jobs that could start must wait."""
MAX_LEFT = timedelta(days=3650)
"""Forecasts of times further away are shown as unknown."""
Joint = Callable[[Mapping[JobKey, ParsedJob], float, Mapping[JobKey, float]], JointQueue | None]
"""See ``Assigning.queue``."""


@dataclass(frozen=True)
class _Alone:
    """The plans of a waiting job on the cluster as if all jobs had ended.

    ``question``: the job, as it was planned. ``versions``: versions of the profiles and of this cluster for which the
    plans were made. After these have changed, the old plans are used until the job is planned again. ``plans``: the
    best one first; empty if no plan is possible. ``complete``: False if plans on some parts of the cluster have not
    been made yet.
    """

    question: ParsedJob
    versions: tuple[int, int]
    plans: tuple[KnownPlan, ...]
    complete: bool


class Outlooks:
    """The outlooks (forecasts of start and end) of all waiting jobs. Use it in one event loop only."""

    def __init__(
        self,
        cache: Cache,
        book: ReservationBook,
        queue: Queue,
        pods: PlansByJob,
        metrics: Metrics,
        clock: Callable[[], float],
        now: Callable[[], datetime],
        joint: Joint = lambda waiting, start_s, left_s: None,
    ) -> None:
        """``joint``: returns the jobs to which devices are assigned together, of those that wait and those that run.

        None: jobs are planned one after another.
        """
        self._cache, self._book, self._queue, self._pods, self._metrics = cache, book, queue, pods, metrics
        self._clock, self._now, self._joint = clock, now, joint
        self._calibration = Calibration()
        """Of the forecasts of waiting jobs in a joint assignment."""
        self._alone: dict[JobKey, _Alone] = {}
        self._plans, self._times = PossiblePlans(clock), OfEachJob(_Times.of)
        self._whole: ClusterView | None = None
        """The cluster as if all jobs had ended; None: not computed yet. ``_changes``: how often it has changed."""
        self._changes = 0
        self._looked_at: tuple[int, int] | None = None
        self._found: dict[JobKey, Outlook] = {}
        self._news: set[JobKey] = set()
        """Jobs whose status does not show yet that they have a forecast, that they now meet or miss a deadline, or that
        their place at the head of the queue has changed."""
        self._next_s, self._state = -inf, object()
        self._made_s = -inf

    def of(self, key: JobKey) -> Outlook | None:
        """Return the forecast of a waiting job, for its status; None if there is none yet.

        The caller writes it to the status, so ``is_news`` returns False from now on.
        """
        self._news.discard(key)
        return self._found.get(key)

    def is_news(self, key: JobKey) -> bool:
        """Return True if the status of a waiting job must be written soon because of its forecast.

        This is the case if the status does not show yet that the job has a forecast, that the job is now predicted to
        meet (or miss) its deadline and was not before, or its place among the first ``PROMPT_PLACES``.
        """
        return key in self._news

    async def note(self, key: JobKey, question: ParsedJob, decision: Decision, ask: Ask) -> None:
        """Note the predicted run time of a job with a deadline, because the job's place in the queue depends on it.

        ``decision``: result of planning the job. If it is no plan, the run time is learned from plans on the cluster as
        if all jobs had ended. Do nothing for a job without a deadline, and for one in a queue of Kueue.
        """
        if question.spec is None or question.spec.scheduling.finish_by is None or question.queued:
            return
        if isinstance(decision, Infeasible):
            await self.learn(key, question, ask)
        elif (job := self._cache.job(key)) is not None:
            self._queue.note_run_s(key, run_time(decision.status.predicted, previous(job)).p90)

    async def learn(self, key: JobKey, question: ParsedJob, ask: Ask, stop: Callable[[], bool] = lambda: True) -> None:
        """Plan a waiting job as if all jobs had ended, to learn its run time and the needs of its pods.

        First ask for its plan on the whole cluster. Then ask for plans on parts of the cluster until ``stop`` returns
        True. With the default ``stop``, ask for none on parts. Plans that are known already are not made again.
        """
        await self._look()
        if self._knows(key, question, complete=True):
            return
        assert self._whole is not None
        versions = self._versions()
        complete = await self._plans.learn(question, self._whole, versions, ask, stop=stop)
        plans, job = self._plans.get(question), self._cache.job(key)
        if plans and job is not None:
            self._queue.note_run_s(key, run_time(plans[0].predicted, previous(job)).p90)
        self._alone[key] = _Alone(question, versions, plans, complete)

    def _knows(self, key: JobKey, question: ParsedJob, *, complete: bool = False) -> bool:
        """Return True if the plans of a job were made for its current question, profiles and cluster.

        ``complete``: True: all of them must be known. False: the one on the whole cluster is enough.
        """
        known = self._alone.get(key)
        if known is None or known.question != question or known.versions != self._versions():
            return False
        return known.complete or not complete

    def _versions(self) -> tuple[int, int]:
        return self._cache.profiles_version, self._changes

    async def refresh(
        self, waiting: Mapping[JobKey, ParsedJob], ask: Ask, busy: Callable[[], bool]
    ) -> tuple[JobKey, ...]:
        """Update the forecasts if they are due. Return the jobs whose status must be written soon (see ``is_news``).

        ``waiting``: the jobs in the queue, as they are planned. ``ask``: makes plans. ``busy``: returns True while a
        job waits for its plan; no more plans are then made for forecasts. An error is only logged.
        """
        try:
            return await self._refresh(waiting, ask, busy)
        except Exception:
            log.exception("the forecast of the queue failed; jobs keep their earlier forecasts")
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
        await self._look()
        asked = 0
        asking_s = 0.0

        async def counted(question: ParsedJob, view: ClusterView) -> StoredPlan | Infeasible:
            nonlocal asked, asking_s
            asked, asked_s = asked + 1, self._clock()
            answer = await ask(question, view)
            asking_s += self._clock() - asked_s
            return answer

        def enough() -> bool:
            return asked >= MAX_ASKED or busy()

        for key in line:  # First one plan of each job, so that each has a forecast soon.
            if not enough() and not self._knows(key, waiting[key]):
                await self.learn(key, waiting[key], counted)
        for key in line[:MAX_FORECAST]:
            if not enough() and not self._knows(key, waiting[key], complete=True):
                await self.learn(key, waiting[key], counted, enough)
        complete = all(self._knows(key, waiting[key], complete=i < MAX_FORECAST) for i, key in enumerate(line))
        news = await self._simulate(line, waiting)
        self._made_s = self._clock()
        self._next_s = self._made_s + max(MIN_S, IDLE_FACTOR * (self._made_s - now_s - asking_s))
        self._state = state if complete else object()
        return news

    def forget_others(self, waiting: Mapping[JobKey, ParsedJob]) -> None:
        """Forget all jobs that are not in ``waiting``. Learn from the waits of those that have devices now."""
        self._calibration.learn(waiting.keys(), self._clock(), self._queue.holdings.holds_devices)
        for state in (self._alone, self._found):
            for gone in state.keys() - waiting.keys():
                del state[gone]
        for gone in self._queue.run_p90_s.keys() - waiting.keys():
            self._queue.note_run_s(gone, None)
        self._news &= waiting.keys()

    def forget_all(self) -> None:
        self._calibration.forget_waits()
        self.forget_others({})
        self._plans.clear()
        self._whole, self._looked_at, self._next_s, self._state = None, None, -inf, object()

    async def _look(self) -> None:
        """Update ``_whole`` (the cluster as if all jobs had ended) if nodes, pods or reservations have changed."""
        state = self._cache.ledger.version, self._book.version
        if state == self._looked_at:
            return
        keys = {job.key for job in self._cache.jobs()}
        uids = [pod.uid async for key in in_turns(sorted(keys)) for pod in self._cache.pods_of(key)]
        whole = without_reserved(self._cache.ledger.view(uids), self._book.current(ended=keys))
        self._looked_at = state
        if whole != self._whole:
            self._whole = whole
            self._changes += 1

    async def _simulate(self, line: list[JobKey], waiting: Mapping[JobKey, ParsedJob]) -> tuple[JobKey, ...]:
        waiters = {key: waiter for key in line if (waiter := self._waiter(key, waiting[key])) is not None}
        holders, starts_up = await self._holders()
        queue = self._joint(waiting, starts_up.p50, {each.key: each.left.p50 for each in holders})
        together = {job.key for job in queue.jobs} if queue is not None else set()
        # The thread reads only immutable values. Health checks and completion do not wait for it.
        found: dict[JobKey, Forecast] = {}
        if waiters.keys() - together:
            found = await asyncio.to_thread(
                forecast, self._cache.ledger.view(), holders, list(waiters.values()), self._queue.shares,
                await self._recent(waiters), starts_up,
            )  # fmt: skip
        if queue is not None:
            jointly, now_s = await asyncio.to_thread(forecast_jointly, queue), self._clock()
            found |= {key: self._calibration.forecast_of(key, now_s, each) for key, each in jointly.items()}
        news, now = [], self._now()
        self._queue.sorted_as(line)
        for place, key in enumerate(line, 1):
            if key not in self._alone:
                continue  # It has not been planned yet. The status shows the forecast of the operator before.
            outlook = _outlook(found[key], now) if key in found else NO_OUTLOOK
            spec, before = waiting[key].spec, self._found.get(key)
            due = spec.scheduling.finish_by if spec is not None else None
            overtaken = place <= PROMPT_PLACES and self._shown_place(key) not in (None, place)
            if before is None or before.meets(due) != outlook.meets(due) or overtaken:
                news.append(key)
            self._found[key] = outlook
        self._news.update(news)
        starts = [found[key].start for key in line if key in found and isfinite(found[key].start.p90)]
        self._metrics.forecast(starts, len(line) - len(starts))
        return tuple(news)

    def _shown_place(self, key: JobKey) -> int | None:
        """Return the place in the queue that the job's status shows; None if it shows none."""
        job = self._cache.job(key)
        shown = previous(job).queue if job is not None else None
        return None if shown is None else shown.position

    def _waiter(self, key: JobKey, question: ParsedJob) -> Waiter | None:
        """Return a waiting job for the simulation; None if its plans are not known yet, or if no plan is possible."""
        known, job = self._alone.get(key), self._cache.job(key)
        if known is None or not known.plans or job is None:
            return None
        status = previous(job)
        return Waiter(key, tuple(plan.of(job.spec, status) for plan in known.plans), self._queue.job(question))

    async def _recent(self, waiters: Mapping[JobKey, Waiter]) -> list[Recent]:
        """Return the jobs created within the last ``WINDOW_S``, which are expected to come again.

        ``waiters``: the waiting jobs of the simulation, with all their plans. Any other job is returned with only its
        stored plan, and is left out if it has none. Jobs in queues of Kueue are left out, too.
        """
        now, recent = self._now(), []
        async for job in in_turns(self._cache.jobs()):
            age_s = (now - job.created).total_seconds()
            if not 0 <= age_s < WINDOW_S or queued_elsewhere(job):
                continue
            if job.key in waiters:
                recent.append(Recent(age_s, waiters[job.key]))
            elif (pods := self._pods.known(job.key)) is not None and (whole := self._times.of(job).whole) is not None:
                begun = PossiblePlan(whole, plan_reservation(pods, job.spec, {}))
                recent.append(Recent(age_s, Waiter(job.key, (begun,), self._queue.recent(job))))
        return recent

    async def _holders(self) -> tuple[list[Holder], Interval]:
        """Return the jobs that hold devices, and the time from new pods to the first step as measured in these jobs."""
        ledger, holding = (
            self._cache.ledger,
            [job for job in self._cache.jobs() if self._queue.holdings.holds_devices(job.key)],
        )
        times = [self._times.of(job) async for job in in_turns(holding)]
        self._times.forget_others([job.key for job in self._cache.jobs()])
        starts_up = start_up(each.start_s for each in times if each.start_s is not None)
        holders = []
        async for job, found in in_turns(zip(holding, times, strict=True)):
            bound = [pod for each in self._cache.pods_of(job.key) if (pod := ledger.bound(each.uid)) is not None]
            uses = tuple(
                Use(pod.node, pod.requests.devices, pod.requests.cpu_m / 1000, pod.requests.memory_nbytes)
                for pod in bound
            )
            left = OVER if (now := self._cache.job(job.key)) is None or stops(now) else found.left(starts_up)
            holders.append(Holder(job.key, left, uses, self._book.reserved(job.key)))
        return holders, starts_up


@dataclass(frozen=True)
class _Times:
    """What forecasts need of a job's status. ``start_s``: measured seconds from new pods to the first step, without the
    time to fetch data, which is a part of ``whole``.

    ``remaining``: seconds of training that are left. ``begun``: False if it has trained no step. ``whole``: predicted
    seconds of its whole training. ``start_s`` and ``whole`` are None without a measurement or plan.
    """

    remaining: Interval
    begun: bool
    start_s: float | None
    whole: Interval | None

    @staticmethod
    def of(job: JobSeen) -> "_Times":
        status = previous(job)
        done, plan = status.progress, status.plan
        begun = done is not None and done.step != 0
        whole = run_time(plan.predicted, DLJobStatus()) if plan is not None else None
        return _Times(remaining(status), begun, start_without_data_s(status), whole)

    def left(self, starts_up: Interval) -> Interval:
        """Return percentiles of the seconds until the job ends and its devices become free.

        ``starts_up``: time from new pods to the first step, which a job that has trained no step still needs.
        """
        return self.remaining if self.remaining is OVER or self.begun else self.remaining.plus(starts_up)


def _outlook(found: Forecast, now: datetime) -> Outlook:
    def moments(of: Interval) -> tuple[datetime | None, ...]:
        return tuple(
            now + timedelta(seconds=s) if s < MAX_LEFT.total_seconds() else None for s in (of.p10, of.p50, of.p90)
        )

    earliest, start, latest = moments(found.start)
    return Outlook(earliest, start, latest, moments(found.end)[2])
