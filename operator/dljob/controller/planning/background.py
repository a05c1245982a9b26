"""Plan jobs one after another in the background, and reserve what their plans need.

A reconcile asks for the plan of its job and does not wait for it: the job's key is queued again when the answer is
there. Running jobs are therefore never delayed by planning. Because only one job is planned at a time, and its plan
counts at once, two plans never use the same devices.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from math import inf
from time import monotonic

from dljob.cluster import ClusterView
from dljob.controller.metrics import Metrics
from dljob.controller.planning import answers
from dljob.controller.planning.amortized import FACTOR
from dljob.controller.planning.answers import Answer, Decision, KnownWaiting, PlanningError, matters_to, plan_only
from dljob.controller.planning.growing import Turns
from dljob.controller.planning.joint import Assigning, PlanningState, Share, may_not_delay
from dljob.controller.planning.outlook import Outlooks
from dljob.controller.planning.parsed_objects import Profiles, ProfilesByNamespace
from dljob.controller.planning.preempting import Preempting
from dljob.controller.planning.queueing import Queue
from dljob.controller.planning.reserving import FreeResources, Reserving
from dljob.job.log_fields import log_fields
from dljob.job.observed import Observed, Outlook, Preemption
from dljob.job.plan.first_plans import AwaitsMeasurement, FirstMeasurements
from dljob.kube import Cache, JobKey
from dljob.kube.objects.cache import utc_now
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.reconcile.planning.make_plan import question as question_of
from dljob.scheduling import QueuePolicy, ReservationBook

Planner = Callable[[ParsedJob, ClusterView, Profiles], Awaitable[Decision]]
"""Function that plans a job on a view of the cluster, with the measured profiles. Raises PlanningError if it fails."""

TICK_S = 5.0
"""Maximum seconds between two rounds of ``Planning.run``, for example to notice that reservations have expired."""
log = logging.getLogger("dljob")


class Planning:
    """Answers questions (jobs to plan) with plans, and reserves what they need. Use it in one event loop only."""

    def __init__(
        self,
        cache: Cache,
        planner: Planner,
        requeue: Callable[[JobKey], None],
        metrics: Metrics,
        clock: Callable[[], float] = monotonic,
        now: Callable[[], datetime] = utc_now,
        *,
        together: bool = False,
        policy: QueuePolicy = answers.DEFAULT_POLICY,
        measurements: FirstMeasurements | None = None,
    ) -> None:
        """``planner``: makes one plan. ``requeue``: called with a job's key when it must be reconciled.

        ``together``: True: devices are assigned to all jobs together; False: to one after another. ``measurements``:
        those that first plans await.
        """
        self._beat_s: float | None = None
        """Time when ``run`` began its last round, or got its last answer of the planner; None while it does not run."""

        async def planned(question: ParsedJob, view: ClusterView, profiles: Profiles) -> Decision:
            try:
                return await planner(question, view, profiles)
            finally:
                self._beat_s = self._clock()

        self._cache, self._planner, self._requeue, self._metrics, self._clock = cache, planned, requeue, metrics, clock
        self._asked: dict[JobKey, ParsedJob] = {}
        self._line, self._sort_again_s, self._wakeup = list[JobKey](), -inf, asyncio.Event()
        self._current: tuple[JobKey, ParsedJob] | None = None
        """The question that is being answered, with the key of its job; None: no question is."""
        self._waiting: dict[JobKey, tuple[Observed, float, Decision | None]] = {}
        """For each job whose status says why it has no plan: state, time and decision when the status was written."""
        self._book = ReservationBook()
        self._queue = Queue(cache, self._book, clock, now, policy)
        self._answers = answers.Answers(self._queue.line(), self._queue.line(), clock)
        self._reserving = Reserving(cache, self._book, clock)
        plans, short = self._reserving.plans, self._answers.for_quota
        self._preempting = Preempting(cache, self._queue, plans, requeue, clock, now)
        self._assigning = Assigning(PlanningState(cache, self._queue, plans, short, clock, now), requeue, on=together)
        self._outlooks = Outlooks(cache, self._book, self._queue, plans, metrics, clock, now, self._assigning.queue)
        self._free = FreeResources(cache, self._book, self._reserving, metrics, clock)
        self._turns = Turns(cache.jobs, self._queue, self._free, requeue, clock, now)
        self._profiles, self._namespaces = ProfilesByNamespace(cache), answers.NamespaceTurns()
        self._measurements, self._known_waiting = measurements or FirstMeasurements(clock), KnownWaiting(cache, clock)

    def decision(self, key: JobKey, parsed: ParsedJob) -> Decision | None:
        """Return the plan of a job, or why none is possible; None until planning ends, which calls ``requeue``.

        Raise PlanningError if planning failed. The next call then asks for the plan again.
        """
        self._known_waiting.heard(key)
        question, answer = question_of(parsed), self._answers.get(key)
        if answer is not None and answer.question == question and self._stands(key, answer):
            self._turns.end(key)
            if answer.decision is None or self._turns.awaits_nodes(key):
                self._answers.remove(key)
            if answer.decision is None:
                raise PlanningError(answer.error)
            return answer.decision
        if self._current != (key, question):
            self._asked[key] = question
            self._wakeup.set()
        return None

    def capacity_grew(self, key: JobKey, parsed: ParsedJob | None) -> bool:
        """Return True if a running job must be planned again now, because a better plan for it may be possible.

        Return True also for a job that waits for nodes of an autoscaler and may be able to start without them. A
        running job then has the turn (``Turns``), which one job has at a time. It gets none while another job waits
        for devices that it could use, unless an assignment moves it. ``parsed``: None if the job is planned for another
        reason. Its turn then ends, so that its new plan reserves resources.
        """
        self._turns.note(key, parsed if self._assigning.of(key) is None else None)
        self._turns.note_awaiting(key, parsed)
        if parsed is None:
            self._turns.end(key)
            return False
        self._assigning.note(key, parsed)
        if self._turns.awaits_nodes(key):
            return self._answers.starts(key) or self._turns.is_invited(key)
        if self._turns.current is not None or self._free.view is None or parsed.accepted is None or parsed.finished:
            return self._turns.current == key
        now_s, matters = self._clock(), matters_to(parsed)
        if not self._turns.rested(key, now_s):
            return False
        if self._turns.list_waiting(now_s):
            self._free.look()
        missing = len(parsed.observed.ready_pods) < parsed.accepted.nodes
        if self._assigning.moves(key):
            self._turns.current = key
            return True
        if self._assigning.of(key) is not None and not missing:
            return False  # It grows only as part of an assignment.
        due = self._turns.due(key, self._free.growth.count(matters), now_s, missing=missing, pace_s=parsed.pace_s)
        if not due or self._asked or self._current is not None:
            return False
        if self._others_wait(key, matters) or self._turns.yields(parsed):
            return False
        self._turns.current = key
        return True

    def _others_wait(self, key: JobKey, matters: Callable[[str], bool]) -> bool:
        """Return True if another job waits for devices for which ``matters`` is True, or will soon be planned again."""
        assert self._free.view is not None
        types = filter(matters, self._free.view.device_types)
        return self._turns.others_wait_for(types) or any(
            other != key and not self._stands(other, answer) for other, answer in self._answers.infeasible().items()
        )

    def wait(self, key: JobKey, observed: Observed | None) -> None:
        """Remember the state of a waiting job for ``still_waits``. Do nothing if it has a plan or pods, or is gone."""
        if observed is not None and observed.plan is None and not observed.sets and not observed.pods:
            answer = self._answers.get(key)
            self._waiting[key] = (observed, self._clock(), answer.decision if answer is not None else None)

    def still_waits(self, key: JobKey, observed: Observed) -> bool:
        """Return True if nothing has changed for a waiting job, so that it need not be reconciled.

        It is nevertheless reconciled every ``RECONCILE_S``, because a plan may depend on more than the job's objects.
        """
        waiting = self._waiting.get(key)
        if waiting is None or self._clock() - waiting[1] >= answers.RECONCILE_S or waiting[0] != observed:
            return False
        answer = self._answers.get(key)
        if self._outlooks.is_news(key):
            return False
        if answer is None or not isinstance(answer.decision, Infeasible) or answer.decision.reason == "NodesLeftOut":
            return False  # Only a reconcile reads which nodes are left out.
        if answer.decision != waiting[2]:
            return False  # The status shows another reason.
        return self._stands(key, answer)

    def place(self, key: JobKey) -> tuple[int, int] | None:
        """Return (place of a job in the queue, from 1; number of waiting jobs); None if the job does not wait."""
        return self._queue.place(key, self._answers.lines().devices)

    def outlook(self, key: JobKey) -> Outlook | None:
        """Return the forecast of start and end of a job that waits for devices; None if there is none, or not yet."""
        return self._outlooks.of(key)

    def refused(self, key: JobKey) -> None:
        """End the reservation of a plan that the API server did not store."""
        self._reserving.refused(key)

    def settle(self, key: JobKey) -> None:
        """Forget the question and answer of a job that needs no plan now, and what its unstored plan reserves."""
        self._known_waiting.heard(key)
        self._asked.pop(key, None)
        self._answers.remove(key)
        self._waiting.pop(key, None)
        self._turns.end(key)
        self.refused(key)

    def forget(self, key: JobKey) -> None:
        """Forget a job that no longer exists."""
        self.settle(key)
        self._reserving.forget(key)
        self._turns.forget(key)
        self._assigning.forget(key)

    def capacity_changed(self) -> None:
        """Let ``run`` check soon if waiting jobs can be planned. Call this when nodes, pods or quotas have changed."""
        self._wakeup.set()

    async def run(self) -> None:
        """Plan jobs until the task is cancelled. Then forget all plans, because another replica may plan then."""
        try:
            self._beat_s = self._clock()
            await self._reserving.derive_all()
            self._free.look()
            await self._known_waiting.all_heard()
            while True:
                self._beat_s = self._clock()
                self._wakeup.clear()
                self._free.look(fresh=True)
                self._queue_waiting()
                while self._asked:
                    key = self._next()
                    await self._answer(key, self._asked.pop(key))
                self._namespaces.begin()
                waiting = self._answers.for_devices()
                for key in await self._outlooks.refresh(waiting, self._ask, lambda: bool(self._asked)):
                    self._requeue(key)
                if not await self._assigning.look(waiting, self._ask, orders=not self._preempting.makes_room()):
                    await self._make_room()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(TICK_S, self._measurements.left_s() or TICK_S)):
                        await self._wakeup.wait()
        finally:
            self._current = self._beat_s = None
            self._free.forget()
            self._namespaces = answers.NamespaceTurns()
            for state in (self._asked, self._answers, self._waiting):
                state.clear()
            parts = (self._reserving, self._outlooks, self._queue, self._preempting, self._assigning)
            for part in (*parts, self._known_waiting):
                part.forget_all()
            self._turns.clear()

    def stuck(self, limit_s: float) -> str | None:
        """Return a message if ``run`` made no progress for ``limit_s`` seconds; else None. Any thread may call this."""
        beat_s = self._beat_s
        silent_s = 0.0 if beat_s is None else self._clock() - beat_s
        return f"planning has made no progress for {silent_s:.0f} s" if silent_s > limit_s else None

    def _next(self) -> JobKey:
        """Return the job whose question is answered next.

        The order of the questions may be some milliseconds old, so that sorting hundreds takes little of the time.
        """
        began_s, line = self._clock(), [key for key in self._line if key in self._asked]
        if not line or began_s >= self._sort_again_s:
            line = sorted(self._asked, key=self._turn)
            self._sort_again_s = began_s + (1 + FACTOR) * (self._clock() - began_s)
        key, *self._line = line
        return key

    def _turn(self, key: JobKey) -> tuple[object, ...]:
        """Return the sort key of a job that was asked about; the question with the smallest key is answered first.

        The order is that of the queue, but namespaces take turns: with equal shares, after each job; with equal
        priority, after ``TURN_ANSWERS`` jobs. So many jobs of one namespace do not delay those of others.
        """
        job, (turn, last) = self._queue.job(self._asked[key]), self._namespaces.of(key[0])
        return job.urgency[0], turn, *job.urgency, last, *job.place

    async def _answer(self, key: JobKey, question: ParsedJob) -> None:
        self._namespaces.answered(key[0])
        if self._cache.job(key) is None:
            return
        self._current = (key, question)
        everything, lines = self._free.growth.count(lambda _: True), self._answers.lines()
        share = await self._assigning.share(
            key, question, lambda: {**lines.devices, **self._asked}, everything, self._ask
        )
        self._free.look(fresh=True)
        # A job in a queue of Kueue asks for quota, not for nodes that are free now.
        view = self._cache.ledger.empty_view() if question.queued else self._free.view_for(key)
        profiles, profiles_version = self._profiles.of(key[0]), self._cache.profiles_version
        growth, began = self._free.growth.count(matters_to(question)), self._clock()
        limits, limits_version = self._queue.holdings.limits_of(question), self._cache.limits_version
        asked = replace(question, observed=replace(question.observed, limits=limits))
        decision, behind, error = None, None, ""
        try:
            decision, behind = await self._decide(key, asked, view, profiles, share)
            decision = self._measurements.postponed(decision, first=question.accepted is None)
        except PlanningError as failure:
            error = str(failure)
        except Exception as failure:  # An error in one job must not stop the others.
            log.exception("planning failed", extra=log_fields(key, self._cache.job(key)))
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self._current = None
        self._metrics.planned(self._clock() - began, None if decision is None else not isinstance(decision, Infeasible))
        self._turns.planned(key, growth, self._clock(), question.pace_s)
        if self._turns.awaits_nodes(key) and not answers.starts(decision, error):
            self._answers.remove(key)
            return  # It waits on for the nodes of its plan.
        # A job that could grow reserves nothing before it has decided to move.
        reserved = self._turns.current != key and self._reserving.reserve(key, question, decision)
        self._free.look()
        answer = Answer(
            question, decision, error, reserved, self._clock(), self._free.versions(), profiles_version, growth,
            limits_version, limits, behind, self._assigning.of(key),
        )  # fmt: skip
        self._answers.put(key, answer)
        self._requeue(key)

    async def _decide(
        self, key: JobKey, question: ParsedJob, whole: ClusterView, profiles: Profiles, share: Share | None
    ) -> tuple[Decision, JobKey | None]:
        """Return (the plan of a job, or why it must wait; the first job in line, if the job waits behind it, or None).

        ``whole``: nodes with all that is free for the job. ``share``: devices assigned to it; None: all of ``whole``.
        """
        asked, view = share.of(whole, question) if share is not None else (question, whole)
        decision = await self._planner(asked, view, profiles)
        if isinstance(decision, Infeasible) and (rest := self._assigning.rest(question, whole)) is not None:
            other = await self._planner(*rest, profiles)
            if not answers.exceeds_quota(other) or answers.exceeds_quota(decision):  # Its part becomes free.
                share, (asked, view), decision = None, rest, other
        await self._outlooks.note(key, question, decision, self._ask)
        if isinstance(decision, Infeasible):
            return self._preempting.explained(key, decision), None
        if plan_only(question) or question.queued:
            return decision, None
        gains = self._assigning.gains(key)  # It must not delay those that got no part either.
        lines = replace(
            self._answers.lines(),
            counts=lambda each: gains or may_not_delay(share, self._assigning.of(each)),
            passed_over=lambda each: (its := self._assigning.of(each)) is not None and its.part is None,
        )
        free = view if self._free.view is None else self._free.view
        grows = self._turns.current == key
        return await self._queue.without_delay(
            key, asked, decision, lines, view, free, self._ask, gains=gains, grows=grows
        )

    async def _ask(self, about: ParsedJob, free: ClusterView) -> Decision:
        return await self._planner(about, free, self._profiles.of(about.observed.job.namespace))

    def preemption(self, key: JobKey) -> Preemption | None:
        """Return why a running job must stop now for a waiting job of a higher priority; None if it need not."""
        return self._preempting.order(key)

    def added_to(self, observed: Observed) -> Observed:
        """Return the observed state of a job with the reasons why an assignment moves it or lets it rest."""
        return self._assigning.added_to(observed)

    async def _make_room(self) -> None:
        """Order running jobs to stop for the first job in line, if the chart value ``preemption`` allows it."""
        key = await self._preempting.make_room(self._answers.for_devices(), self._answers.for_quota(), self._ask)
        if key is not None and self._answers.explain(key, self._preempting.explained):
            self._requeue(key)

    def _stands(self, key: JobKey, answer: Answer) -> bool:
        """Return True if the answer for a job may still be used; False if the job must be planned again.

        An answer expires after some time, or if profiles, quotas or free resources change in a way that may change it.
        """
        age_s = self._clock() - answer.at_s
        if answer.decision is None:
            return True
        if answer.profiles_version != self._cache.profiles_version:
            return False
        self._free.look()
        if isinstance(answer.decision, AwaitsMeasurement):
            return bool(self._measurements.awaited(answer.decision.devices))
        if isinstance(answer.decision, Infeasible):
            if answer.share != self._assigning.of(answer.question.observed.job.key):
                return False
            if not answer.limits.empty and self._queue.holdings.limits_without(key).grown(answer.limits):
                return False
            limit_s = answers.REFRESH_S if answer.behind is None else answers.QUEUED_S
            if age_s >= limit_s or not self._answers.has_no_plan(answer.behind):
                return False
            return answer.growth == self._free.growth.count(matters_to(answer.question))
        same_limits = answer.limits_version == self._cache.limits_version
        held = not answer.reserved or self._book.accepted(key)
        return (held and age_s < answers.FRESH_S) or (same_limits and answer.versions == self._free.versions())

    def _queue_waiting(self) -> None:
        """Queue the jobs for which a plan may be possible now. Count all jobs without a plan in the metrics."""
        waiting = self._answers.infeasible()
        self._metrics.waiting_jobs.labels("queued").set(sum(each.behind is not None for each in waiting.values()))
        self._metrics.waiting_jobs.labels("no_plan").set(sum(each.behind is None for each in waiting.values()))
        due = [key for key, answer in waiting.items() if not self._stands(key, answer)]
        for key in (*due, *self._turns.invite()):
            self._requeue(key)
