"""Assign devices to all waiting and running jobs together (the chart value ``queue.assignment: Together``).

The rules are in ``dljob.scheduling.assignment``; this module feeds them. Each job gets a part: a device type and a
number of devices. The job is planned on that part of the cluster only. Running jobs move to their parts one at a time,
in the same way as jobs that grow (``planning.growing``).

Only jobs that use GPUs take part. Jobs in queues of Kueue, jobs with fixed groups, and running jobs that must not
restart do not.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from dljob.cluster import ClusterView
from dljob.controller.planning.amortized import Amortized
from dljob.controller.planning.joint.candidates import Candidates
from dljob.controller.planning.joint.forecasting import costs, held_by, moved, planned_devices
from dljob.controller.planning.joint.options import Known, KnownOptions, gpu_types, has_part, shape_of
from dljob.controller.planning.joint.recent_jobs import RecentJobs
from dljob.controller.planning.joint.shares import Order, Running, Share, ToPlan, left_by, shares
from dljob.controller.planning.joint.state import PlanningState
from dljob.controller.planning.queue.shadows import Ask
from dljob.job.log_fields import log_fields
from dljob.job.observed import Observed
from dljob.job.remaining import RESTART_S
from dljob.job.waiting import ended, stops
from dljob.kube import JobKey
from dljob.reconcile import ParsedJob
from dljob.reconcile.planning.make_plan import question as question_of
from dljob.reconcile.planning.resize import lets_move, may_move, rests_until
from dljob.scheduling.assignment import Candidate, Choices, Held, Resources, assign_all, idle_option
from dljob.scheduling.assignment.reasons import Resting, RoomFor
from dljob.scheduling.forecasting.joint_forecast import JointQueue
from dljob.scheduling.forecasting.joint_simulation import AGAIN_S, LOOK_S, Ending
from dljob.scheduling.gain import MIN_BETWEEN_S
from dljob.scheduling.parts import free_devices, left_for
from dljob.status import is_true, previous

MAX_JOBS = 64
"""Maximum number of waiting jobs, and of running jobs, to which devices are assigned. Others are planned alone."""
OBEY_S = 90.0
"""Seconds after which an order that a running job moves is dropped if the job's reconcile has not carried it out."""

log = logging.getLogger("dljob")


class Assigning:
    """Assigns the devices to the jobs. Use it in one event loop only."""

    def __init__(self, state: PlanningState, requeue: Callable[[JobKey], None], *, on: bool) -> None:
        """``requeue``: called for each job that moves. ``on``: False: no job does, because nothing is assigned."""
        self._cache, self._queue, self._plans, self._short = state.cache, state.queue, state.plans, state.short
        self._clock, self._now, self._requeue, self._on = state.clock, state.now, requeue, on
        self._running: dict[JobKey, Running] = {}
        self._options = KnownOptions(self._cache, self._clock)
        self._candidates = Candidates(state)
        self._whole = Amortized(lambda: self._view_without({job.key for job in self._cache.jobs()}), self._clock)
        """The cluster as if all jobs had ended."""
        self._known: dict[JobKey, Known] = {}
        """The options of the jobs in the last assignment."""
        self._recent = RecentJobs(state, self._candidates)
        self._shares: dict[JobKey, Share] = {}
        self._orders: dict[JobKey, Order] = {}
        self._resting: dict[JobKey, Resting] = {}
        """The jobs that rest while devices are free that they could use, by the last assignment."""
        self._gone = set[JobKey]()  # Jobs that no longer exist. Their pods may still run.
        self._beyond = set[JobKey]()  # Jobs that took no part in the last assignment because of MAX_JOBS.
        self._refused_s: dict[JobKey, float] = {}
        """For each job whose reconcile did not carry out an order, the time when the order was dropped."""
        self._looked_s, self._made_s, self._state = -inf, -inf, object()
        self._growth = -1
        """How often capacity had grown when devices were assigned last."""

    def note(self, key: JobKey, parsed: ParsedJob) -> None:
        """Note whether a running job takes part in the next assignment. One that may not move now loses its order."""
        if not self._on:
            return
        self._running.pop(key, None)
        rests = self._clock() - self._refused_s.get(key, -inf) < MIN_BETWEEN_S
        takes_part = has_part(parsed) and lets_move(parsed)
        movable = takes_part and not rests and may_move(parsed, self._now())
        if not movable:
            self._orders.pop(key, None)
        if takes_part and len(self._running) < MAX_JOBS:
            # The plan of a large job has thousands of ranks, and its options do not depend on it.
            question = replace(question_of(parsed), accepted=None, report=None)
            self._running[key] = Running(parsed.observed.job.uid, question, movable, rests_until(parsed, self._now()))

    def of(self, key: JobKey) -> Share | None:
        """Return the share of a job from the last assignment; None: it is planned by itself, on all free devices."""
        return self._shares.get(key)

    def moves(self, key: JobKey) -> bool:
        """Return True if a running job was ordered to move to the devices that an assignment gave it."""
        job = self._cache.job(key)
        return key in self._orders and job is not None and job.uid == self._orders[key].uid

    def gains(self, key: JobKey) -> bool:
        """Return True if a running job moves because it gains itself, and not because others need its devices."""
        return self.moves(key) and self._orders[key].room is None

    def added_to(self, observed: Observed) -> Observed:
        """Return the observed state of a job with the reasons of the last assignment why it moves or rests."""
        key = observed.job.key
        room, resting = self._orders[key].room if self.moves(key) else None, self._resting.get(key)
        return replace(observed, room_for=room, resting=resting)

    def forget(self, key: JobKey) -> None:
        if self._on:
            self._gone.add(key)
        for state in (self._running, self._shares, self._orders, self._refused_s, self._resting):
            state.pop(key, None)

    def forget_all(self) -> None:
        for state in (self._running, self._shares, self._orders, self._refused_s, self._resting):
            state.clear()
        self._whole.forget()
        for known in (self._known, self._recent, self._options, self._beyond):
            known.clear()
        self._looked_s, self._made_s, self._state = -inf, -inf, object()

    async def share(
        self,
        key: JobKey,
        question: ParsedJob,
        waiting: Callable[[], Mapping[JobKey, ParsedJob]],
        growth: int,
        ask: Ask,
    ) -> Share | None:
        """Return the share (assigned devices) of a job that is planned now; None: it is planned by itself.

        If the job has none, or if capacity has grown, first assign devices to all waiting jobs. ``waiting``: returns
        the other jobs without devices, as they are planned. ``growth``: how often capacity has grown. ``ask``: makes
        plans.
        """
        if not self._on or not has_part(question) or not gpu_types(question, self._cache.ledger.view()):
            return None
        if self._queue.holdings.holds_devices(key):
            return self._shares.get(key) if self.moves(key) or self._is_moving(key) else None
        if growth != self._growth or not (key in self._shares or key in self._beyond):
            self._growth = growth
            try:
                await self._assign({**waiting(), key: question}, ask, orders=False)
            except Exception:  # The job is planned by itself then.
                about = log_fields(key, self._cache.job(key))
                log.exception(
                    "assigning devices together with other jobs failed; the job is planned alone", extra=about
                )
        return self._shares.get(key)

    def rest(self, question: ParsedJob, view: ClusterView) -> ToPlan | None:
        """Return how to plan a waiting job that cannot run on its share: with its quotas, and nodes of ``view``.

        For a job with a part, this is what the parts of other waiting jobs leave. Parts of jobs of a lower priority
        count as free. A job without a part may also use what parts need that are not free yet as a whole. The rule of
        back-fill decides then whether it delays others. Return None while running jobs move to make room, because the
        job then waits for its part, and for a job that already holds devices.
        """
        key = question.observed.job.key
        share = self._shares.get(key)
        moving = any(order.room is not None or self._is_moving(other) for other, order in self._orders.items())
        if share is None or moving or self._queue.holdings.holds_devices(key):
            return None
        waits = [(other, its) for other, its in self._shares.items() if its.part and other not in self._running]
        if share.part is None:
            return left_by(question, view, waits, starting=True)
        own = self._recent.priority(key)
        first = [
            (other, its)
            for other, its in sorted(waits, key=lambda each: each[0])
            if other != key and (own is None or (priority := self._recent.priority(other)) is None or priority >= own)
        ]
        return left_by(question, view, first, starting=False)

    async def look(self, waiting: Mapping[JobKey, ParsedJob], ask: Ask, *, orders: bool = True) -> bool:
        """Assign all devices again if that is due, and order running jobs to move. An error is only logged.

        It is due after a change of jobs, nodes or pods, at most every ``LOOK_S`` and at least every ``AGAIN_S``
        seconds. Return True while a running job is to move because others need what it has. No job is then preempted.
        ``waiting``: the jobs that wait for devices, as planned. ``ask``: makes plans. ``orders``: False: none moves.
        """
        if not self._on:
            return False
        self._forget_gone()
        now_s = self._clock()
        if self._due_in_s(waiting) <= 0:
            state, self._looked_s = self._state_of(waiting), now_s
            try:
                await self._assign(waiting, ask, orders=orders)
                self._state, self._made_s = state, now_s
            except Exception:  # Jobs keep what they have, and the next look tries again.
                log.exception(
                    "devices could not be assigned to all jobs together (chart value queue.assignment: Together); jobs "
                    "keep what they have, and the next attempt follows within %d s",
                    AGAIN_S,
                )
        return any(order.room is not None for order in self._orders.values())

    def _due_in_s(self, waiting: Mapping[JobKey, ParsedJob]) -> float:
        """Return the seconds until devices are assigned again if nothing changes; 0 or less: now."""
        now_s, same = self._clock(), self._state_of(waiting) == self._state
        return max(self._looked_s + LOOK_S, self._made_s + AGAIN_S if same else -inf) - now_s

    def _state_of(self, waiting: Mapping[JobKey, ParsedJob]) -> object:
        """Return what an assignment depends on: jobs and nodes. ``waiting``: the jobs without devices."""
        movable = frozenset((key, each.movable) for key, each in self._running.items())
        return frozenset({*waiting, *self._short()}), movable, self._cache.ledger.version

    def _forget_gone(self) -> None:
        """Forget jobs that stop or are gone, and orders not carried out in ``OBEY_S`` (the new plan was no better)."""
        for key, order in list(self._orders.items()):
            if self._clock() - order.since_s >= OBEY_S and not self._is_moving(key):
                self._refused_s[key] = self._clock()
                del self._orders[key]
                self._running.pop(key, None)
                self._shares.pop(key, None)
        for key in {*self._running, *self._orders}:
            job, known = self._cache.job(key), self._running.get(key)
            if job is None or stops(job) or (known is not None and known.uid != job.uid):
                self.forget(key)

    def queue(
        self, waiting: Mapping[JobKey, ParsedJob], start_s: float, left_s: Mapping[JobKey, float]
    ) -> JointQueue | None:
        """Return the jobs that took part in the last assignment, as they are now, for a forecast of their starts.

        Return None if devices are not assigned together. ``waiting``: the jobs without devices, as they are planned.
        ``start_s``: seconds from the start of pods to the first step. ``left_s``: remaining seconds of each job that
        holds devices, which take too long to read from thousands of statuses at once.
        """
        if not self._on:
            return None
        running = {key: each.question for key, each in self._running.items()}
        everyone = {key: each for key, each in {**waiting, **running}.items() if key in self._known}
        line = sorted(everyone.items(), key=lambda item: self._queue.job(item[1]).place)
        jobs = []
        for key, question in sorted(line, key=lambda item: -self._candidates.priority(item[1])):
            known, share, seen = self._known[key], self._shares.get(key), self._cache.job(key)
            options = self._candidates.options(key, known, running=key in running)
            if seen is None or not options:
                continue
            job = self._recent.waiting(key, question, known, options)
            job = replace(job, due_s=self._candidates.due_s(key, question, known, running=key in running))
            if key in running and self._is_moving(key) and share is not None and share.part is not None:
                job = moved(job, share.part, start_s)
            elif key not in running:
                job = replace(job, waited_s=self._candidates.waited_s(seen))
            else:
                rest_s = MIN_BETWEEN_S - (self._clock() - self._refused_s.get(key, -inf))
                job = held_by(job, self._held(key), previous(seen), self._now(), start_s, rest_s)
            jobs.append(job)
        keys = {job.key for job in jobs}
        free = Counter(free_devices(self._view_without(keys)))
        for job in jobs:
            free.subtract(job.held.devices)
        endings, first_s = self._endings(left_s.keys() - keys, left_s), max(0.0, self._due_in_s(waiting))
        return JointQueue(jobs, free, costs(start_s), self._recent.expected(), endings, first_s)

    def _endings(self, others: set[JobKey], left_s: Mapping[JobKey, float]) -> list[Ending]:
        """Return when those of the jobs ``others`` that hold devices will give them up."""
        return [
            Ending(left_s[job.key], planned_devices(self._plans.known(job.key)))
            for job in self._cache.jobs()
            if job.key in others and self._queue.holdings.holds_devices(job.key) and not ended(job)
        ]

    async def _assign(self, waiting: Mapping[JobKey, ParsedJob], ask: Ask, *, orders: bool) -> None:
        """Assign devices to the waiting jobs and to the running jobs that take part, and store their shares.

        ``orders``: True: also order running jobs to move to their parts. False: only check the orders that are given:
        one that no longer repays is withdrawn. The part of a job that has decided to move stays until it has moved.
        """
        nodes, everyone = self._cache.ledger.view(), {**self._waiting_for_quota(), **waiting}
        mine = {key: each for key, each in everyone.items() if has_part(each) and gpu_types(each, nodes)}
        line = sorted(mine, key=lambda key: (key not in waiting, self._queue.job(mine[key]).place))
        questions = {key: mine[key] for key in line[:MAX_JOBS] if not self._queue.holdings.holds_devices(key)}
        self._beyond = set(line[MAX_JOBS:])
        staying = [
            key
            for key in self._running
            if self._queue.holdings.holds_devices(key)
            and not self._is_moving(key)
            and self._candidates.is_on_known_nodes(key)
        ]
        running = {key: self._running[key].question for key in staying}
        whole = self._whole.of(self._cache.ledger.version)
        asked, shape = {**questions, **running}, shape_of(whole)
        known = {key: await self._options.of(key, question, whole, shape, ask) for key, question in asked.items()}
        await self._candidates.quotas.look(asked, known, ask)
        questions = {key: each for key, each in questions.items() if not self._queue.holdings.holds_devices(key)}
        # Others ended or decided to move meanwhile.
        running = {key: each for key, each in running.items() if key in self._running and not self._is_moving(key)}
        movable = {key: self._running[key].movable for key in running if known[key].options}
        moving = {key: its.part for key, its in self._shares.items() if its.part and self._is_moving(key)}
        self._candidates.quotas.count(questions, movable, moving, self._stopped(), self._known)
        taking_part = sorted({**questions, **running}.items(), key=lambda item: self._queue.job(item[1]).place)
        keys, jobs, held = list[JobKey](), list[Candidate](), list[Held]()
        for key, question in sorted(taking_part, key=lambda item: -self._candidates.priority(item[1])):
            candidate = self._candidates.of(key, question, known[key], running=key in running)
            if candidate is not None:
                keys.append(key)
                jobs.append(candidate)
                held.append(self._held(key) if key in running else Held({}))
        self._candidates.forget_others(questions)
        # The devices of a job without options are not for others. Those that moving jobs release are.
        view = left_for(self._view_without({*keys, *moving}), list(moving.values()))
        self._queue.overdue = frozenset(key for key, job in zip(keys, jobs, strict=True) if job.overdue)
        self._known = {key: each for key, each in self._known.items() if self._is_moving(key)} | known
        self._recent.note(taking_part, known)
        self._shares = {key: share for key, share in self._shares.items() if self._is_moving(key)}
        before, self._orders = self._orders, {k: each for k, each in self._orders.items() if self._is_moving(k)}
        free = free_devices(view)
        if len(keys) >= 2:  # A job that is alone may use all devices, also of several types.
            found = assign_all(jobs, held, free, RESTART_S)
            parts = [(key, p and replace(p, seconds=0.0, needs=())) for key, p in zip(keys, found.parts, strict=True)]
            charges = {
                key: () if part is None else self._candidates.quotas.charges(key, known[key], part, running=False)
                for key, part in parts
                if key in questions
            }
            self._shares |= shares(parts, charges, [job.overdue for job in jobs])
            for i, key in enumerate(keys):
                if found.moves[i] and (orders or key in before):
                    self._order(key, [keys[j] for j in found.helped[i]], before.get(key))
        self._note_resting(keys, jobs, held, found.parts if len(keys) >= 2 else (None,) * len(keys), free)
        for key in before.keys() - self._orders.keys():
            log.info(
                "the job keeps its devices: its move no longer repays", extra=log_fields(key, self._cache.job(key))
            )

    def _waiting_for_quota(self) -> dict[JobKey, ParsedJob]:
        """Return the jobs that wait for quota, and for which running jobs could release some.

        Those with a share keep it. Without it, they would be planned again at once.
        """
        namespaces = {namespace for namespace, _ in self._running}
        return {key: each for key, each in self._short().items() if key in self._shares or key[0] in namespaces}

    def _note_resting(
        self,
        keys: Sequence[JobKey],
        jobs: Sequence[Candidate],
        held: Sequence[Held],
        parts: Choices,
        free: Mapping[str, int],
    ) -> None:
        """Note which of the jobs ``keys`` rest while devices stay free that they could use. Queue those that change.

        ``parts``: of these jobs. ``free``: number of devices by type. The other arguments are those of ``idle_option``.
        """
        before, self._resting = self._resting, {}
        resources = Resources.of(jobs, held, parts, free)
        for i, key in enumerate(keys):
            until = self._running[key].rests_until if held[i].devices else None
            if until is not None and (option := idle_option(i, jobs, held, resources, RESTART_S)) is not None:
                self._resting[key] = Resting(until, f"{option.devices} x {option.device}")
        for key in before.keys() | self._resting.keys():
            if before.get(key) != self._resting.get(key):
                self._requeue(key)

    def _order(self, key: JobKey, helped: list[JobKey], before: Order | None) -> None:
        """Order a running job to move to its part. ``helped``: the jobs that need the devices or quota it gives up.

        ``before``: its present order; None: it has none.
        """
        name = helped[0][1] if helped and helped[0][0] == key[0] else ""
        room = RoomFor(name, len(helped)) if helped else None
        since_s = before.since_s if before is not None else self._clock()
        self._orders[key] = Order(self._running[key].uid, room, since_s)
        if self._orders[key] != before:
            why = f"to release what {len(helped)} other jobs need" if helped else "to better devices"
            log.info("the job moves %s", why, extra=log_fields(key, self._cache.job(key)))
        self._requeue(key)

    def _is_moving(self, key: JobKey) -> bool:
        """Return True if a job has decided to move, and has no new plan yet. Its part must not change meanwhile."""
        job = self._cache.job(key)
        return job is not None and is_true(previous(job).conditions, "Resizing")

    def _view_without(self, keys: set[JobKey]) -> ClusterView:
        """Return what is free without the jobs ``keys`` and those that stop for good; no nodes if it is empty."""
        if not keys:
            return ClusterView(())
        return self._queue.holdings.view_without(min(keys), keys | self._stopped())

    def _stopped(self) -> set[JobKey]:
        """Return the jobs that stop for good, also those that no longer exist while their pods still run."""
        self._gone = {key for key in self._gone if self._cache.job(key) is None and self._cache.runs(key)}
        return self._gone | {job.key for job in self._cache.jobs() if ended(job)}

    def _held(self, key: JobKey) -> Held:
        return self._candidates.held(key, movable=self._running[key].movable)
