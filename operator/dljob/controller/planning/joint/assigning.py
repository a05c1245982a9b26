"""Assign devices to all waiting and running jobs together (the chart value ``queue.assignment: Together``).

The rules are in ``dljob.scheduling.assignment``; this module feeds them. Each job gets a part: a device type and a
number of devices. The job is planned on that part of the cluster only. Running jobs move to their parts one at a time,
in the same way as jobs that grow (``planning.growing``).

Only jobs that use GPUs take part. Jobs in queues of Kueue, jobs with fixed groups, and running jobs that have a
deadline or must not restart do not.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf

from dljob.cluster import ClusterView
from dljob.controller.planning.answers import plan_only
from dljob.controller.planning.growing import usable_nodes
from dljob.controller.planning.parsed_objects import PlansByJob
from dljob.controller.planning.queueing import Ask, Queue
from dljob.job.log_fields import log_fields
from dljob.job.observed import RoomFor
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import RESTART_S, left_part, remaining, slowdown
from dljob.job.waiting import stops
from dljob.kube import Cache, JobKey
from dljob.reconcile import ParsedJob
from dljob.reconcile.planning.make_plan import question as question_of
from dljob.reconcile.planning.resize import MIN_BETWEEN_S, lets_move, may_move
from dljob.scheduling.assignment import Candidate, Held, Option, assign_all
from dljob.scheduling.parts import device_parts, free_devices, left_for, part_of
from dljob.status import is_true, previous

MAX_JOBS = 64
"""Maximum number of waiting jobs, and of running jobs, to which devices are assigned. Others are planned alone."""
MAX_DEVICE_TYPES = 4
MAX_KNOWN = 512
"""Maximum number of requests (jobs with equal specs, on an equal cluster) whose options are stored."""
OPTIONS_S = 600.0
"""Seconds after which a job's options (plans on devices of one type) are made again: labels of nodes may change."""
LOOK_S = 10.0
"""Seconds between two assignments of running jobs."""
OBEY_S = 90.0
"""Seconds after which an order that a running job moves is dropped if the job's reconcile has not carried it out."""
AGAIN_S = 60.0
"""Seconds after which an assignment is repeated although the same jobs run and wait: running jobs progress."""
MAX_OF_LEAST = 1.1
"""Largest energy (or cost) of an option relative to the job's best option, if the job minimizes energy (or cost)."""

log = logging.getLogger("dljob")


@dataclass(frozen=True)
class Share:
    """The devices on which a job is planned, as a result of an assignment.

    ``part``: the devices that are assigned to the job. None: the job may use what the parts of ``others`` leave.
    """

    part: Option | None
    others: tuple[Option, ...] = ()

    def of(self, view: ClusterView, question: ParsedJob) -> ClusterView:
        """Return ``view`` with only the nodes and free devices that the job may use."""
        if self.part is None:
            return left_for(view, self.others)
        return part_of(usable_nodes(question, view), self.part)


@dataclass(frozen=True)
class _Running:
    """A running job that takes part in assignments.

    ``question``: the job, reduced to what its plan depends on. ``movable``: False while it rests, such as after a move.
    The other jobs then get parts beside the one that it will have, and not what it leaves today.
    """

    uid: str
    question: ParsedJob
    movable: bool


@dataclass(frozen=True)
class _Order:
    """An order that a running job moves to its part (the devices assigned to it).

    ``room``: the jobs that need the devices that it gives up; None: no job does, so it moves only if it gains itself.
    ``since_s``: time of the order.
    """

    uid: str
    room: RoomFor | None
    since_s: float


class Assigning:
    """Assigns the devices to the jobs. Use it in one event loop only."""

    def __init__(
        self,
        cache: Cache,
        queue: Queue,
        plans: PlansByJob,
        requeue: Callable[[JobKey], None],
        clock: Callable[[], float],
        now: Callable[[], datetime],
        *,
        on: bool,
    ) -> None:
        """``requeue``: called with the key of a job that is to move. ``on``: False: each job is planned by itself."""
        self._cache, self._queue, self._plans, self._requeue = cache, queue, plans, requeue
        self._clock, self._now, self._on = clock, now, on
        self._running: dict[JobKey, _Running] = {}
        self._options: OrderedDict[Hashable, tuple[float, tuple[Option, ...]]] = OrderedDict()
        """For each request, the time when its options were made, and the options for the whole training."""
        self._shares: dict[JobKey, Share] = {}
        self._orders: dict[JobKey, _Order] = {}
        self._refused_s: dict[JobKey, float] = {}
        """For each job whose reconcile did not carry out an order, the time when the order was dropped."""
        self._looked_s, self._state = -inf, object()
        self._made_s = -inf
        self._growth = -1
        """How often capacity had grown when devices were assigned last."""

    def note(self, key: JobKey, parsed: ParsedJob) -> None:
        """Note whether a running job takes part in the next assignment. One that may not move now loses its order."""
        if not self._on:
            return
        self._running.pop(key, None)
        rests = self._clock() - self._refused_s.get(key, -inf) < MIN_BETWEEN_S
        # A job with a deadline is planned for it. It does not move for the sake of others.
        takes_part = _takes_part(parsed) and not _has_deadline(parsed) and lets_move(parsed)
        movable = takes_part and not rests and may_move(parsed, self._now())
        if not movable:
            self._orders.pop(key, None)
        if takes_part and len(self._running) < MAX_JOBS:
            # The plan of a large job has thousands of ranks, and its options do not depend on it.
            question = replace(question_of(parsed), accepted=None, report=None)
            self._running[key] = _Running(parsed.observed.job.uid, question, movable)

    def of(self, key: JobKey) -> Share | None:
        """Return the share of a job from the last assignment; None: it is planned by itself, on all free devices."""
        return self._shares.get(key)

    def moves(self, key: JobKey) -> bool:
        """Return True if a running job was ordered to move to the devices that an assignment gave it."""
        job = self._cache.job(key)
        return key in self._orders and job is not None and job.uid == self._orders[key].uid

    def room_for(self, key: JobKey) -> RoomFor | None:
        """Return the jobs that need the devices of a running job that is to move.

        Return None if it moves only for its own gain, and if it is not to move.
        """
        return self._orders[key].room if self.moves(key) else None

    def forget(self, key: JobKey) -> None:
        for state in (self._running, self._shares, self._orders, self._refused_s):
            state.pop(key, None)

    def forget_all(self) -> None:
        for state in (self._running, self._shares, self._orders, self._refused_s, self._options):
            state.clear()
        self._looked_s, self._made_s, self._state = -inf, -inf, object()

    async def share(
        self, key: JobKey, question: ParsedJob, waiting: Mapping[JobKey, ParsedJob], growth: int, ask: Ask
    ) -> Share | None:
        """Return the share (assigned devices) of a job that is planned now; None: it is planned by itself.

        If the job has none, or if capacity has grown, first assign devices to all waiting jobs. ``waiting``: the other
        jobs without devices, as they are planned. ``growth``: how often capacity has grown. ``ask``: makes plans.
        """
        if not self._on or not _takes_part(question):
            return None
        if self._queue.holds_devices(key):
            return self._shares.get(key) if self.moves(key) or self._is_moving(key) else None
        if key not in self._shares or growth != self._growth:
            self._growth = growth
            try:
                await self._assign({**waiting, key: question}, ask, orders=False)
            except Exception:  # The job is planned by itself then.
                about = log_fields(key, self._cache.job(key))
                log.exception(
                    "assigning devices together with other jobs failed; the job is planned alone", extra=about
                )
        return self._shares.get(key)

    def rest(self, key: JobKey, view: ClusterView) -> ClusterView | None:
        """Return what the parts of other waiting jobs leave in ``view``, for a waiting job that cannot run on its part.

        Return None while running jobs move to make room, because the job then waits for its part. Also return None for
        a job without a part, and for one that already holds devices.
        """
        share = self._shares.get(key)
        moving = any(order.room is not None or self._is_moving(other) for other, order in self._orders.items())
        if share is None or share.part is None or moving or self._queue.holds_devices(key):
            return None
        others = (each.part for other, each in self._shares.items() if other != key and other not in self._running)
        return left_for(view, tuple(part for part in others if part is not None))

    async def look(self, waiting: Mapping[JobKey, ParsedJob], ask: Ask) -> bool:
        """Assign all devices again if that is due, and order running jobs to move. An error is only logged.

        It is due after a change of jobs, nodes or pods, at most every ``LOOK_S`` and at least every ``AGAIN_S``
        seconds. Return True while a running job is to move because others need its devices. No job is then preempted.
        ``waiting``: the jobs without devices, as they are planned. ``ask``: makes plans.
        """
        if not self._on:
            return False
        self._forget_gone()
        now_s = self._clock()
        movable = frozenset((key, each.movable) for key, each in self._running.items())
        state = frozenset(waiting), movable, self._cache.ledger.version
        if now_s - self._looked_s >= LOOK_S and (state != self._state or now_s - self._made_s >= AGAIN_S):
            self._looked_s = now_s
            try:
                await self._assign(waiting, ask, orders=True)
                self._state, self._made_s = state, now_s
            except Exception:  # Jobs keep what they have, and the next look tries again.
                log.exception(
                    "devices could not be assigned to all jobs together (chart value queue.assignment: Together); jobs "
                    "keep what they have, and the next attempt follows within %d s",
                    AGAIN_S,
                )
        return any(order.room is not None for order in self._orders.values())

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

    async def _assign(self, waiting: Mapping[JobKey, ParsedJob], ask: Ask, *, orders: bool) -> None:
        """Assign devices to the waiting jobs and to the running jobs that take part, and store their shares.

        ``orders``: True: also order the running jobs to move to their parts.
        """
        line = sorted(
            (key for key in waiting if _takes_part(waiting[key])), key=lambda k: self._queue.job(waiting[k]).place
        )
        questions = {key: waiting[key] for key in line[:MAX_JOBS] if not self._queue.holds_devices(key)}
        staying = [key for key in self._running if self._queue.holds_devices(key) and not self._is_moving(key)]
        running = {key: self._running[key].question for key in staying}
        everyone = sorted({**questions, **running}.items(), key=lambda item: self._queue.job(item[1]).place)
        view = self._view_without({key for key, _ in everyone})
        shape = _shape(self._view_without({job.key for job in self._cache.jobs()}))
        keys, jobs, held = list[JobKey](), list[Candidate](), list[Held]()
        for key, question in sorted(everyone, key=lambda item: -self._priority(item[1])):
            options = self._left(key, await self._options_of(key, question, shape, ask), running=key in running)
            if options:
                keys.append(key)
                jobs.append(Candidate(self._priority(question), options))
                held.append(self._held(key) if key in running else Held({}))
        self._shares = {key: share for key, share in self._shares.items() if self._is_moving(key)}
        if orders:
            before, self._orders = self._orders, {k: each for k, each in self._orders.items() if self._is_moving(k)}
        if len(keys) < 2:
            return  # A job that is alone may use all devices, also of several types.
        found = assign_all(jobs, held, free_devices(view), RESTART_S)
        parts = [part and replace(part, seconds=0.0) for part in found.parts]
        left = tuple(part for key, part in zip(keys, parts, strict=True) if part is not None and key in questions)
        for i, (key, part) in enumerate(zip(keys, parts, strict=True)):
            if part is not None or key in questions:
                self._shares[key] = Share(part, () if part is not None else left)
            if orders and found.moves[i]:
                since_s = before[key].since_s if key in before else self._clock()
                self._order(key, [keys[j] for j in found.helped[i]], since_s)

    def _order(self, key: JobKey, helped: list[JobKey], since_s: float) -> None:
        """Order a running job to move to its part. ``helped``: the jobs that need the devices that it gives up.

        ``since_s``: time of the order.
        """
        name = helped[0][1] if helped and helped[0][0] == key[0] else ""
        room = RoomFor(name, len(helped)) if helped else None
        self._orders[key] = _Order(self._running[key].uid, room, since_s)
        why = f"to release devices for {len(helped)} other jobs" if helped else "to better devices"
        log.info("the job moves %s", why, extra=log_fields(key, self._cache.job(key)))
        self._requeue(key)

    def _is_moving(self, key: JobKey) -> bool:
        """Return True if a job has decided to move, and has no new plan yet. Its part must not change meanwhile."""
        job = self._cache.job(key)
        return job is not None and is_true(previous(job).conditions, "Resizing")

    def _view_without(self, ended: set[JobKey]) -> ClusterView:
        """Return the nodes with what is free after the jobs ``ended`` have ended. Pods that belong to no job stay.

        Return a view without nodes if ``ended`` is empty.
        """
        if not ended:
            return ClusterView(())
        return self._queue.view_without(min(ended), ended - {min(ended)})

    def _priority(self, question: ParsedJob) -> int:
        """Return a job's priority in the assignment: twice its PriorityClass, plus 1 if it can meet its deadline."""
        job = self._queue.job(question)
        return 2 * job.priority + (job.latest_start is not None)

    def _held(self, key: JobKey) -> Held:
        pods, job = self._plans.known(key), self._cache.job(key)
        if pods is None or job is None:
            return Held({})
        devices = Counter[str]()
        for group in pods.groups:
            devices[group.device] += group.nodes * group.ranks_per_node
        return Held(dict(devices), remaining(previous(job)).p50, self._running[key].movable)

    def _left(self, key: JobKey, options: tuple[Option, ...], *, running: bool) -> tuple[Option, ...]:
        """Return the options of a job with the seconds of its remaining training instead of the whole training.

        A job slower than predicted is assumed to be as slow with each option. Return an empty tuple if the job is gone.
        ``running``: True: count from the current step; False: from the last checkpoint.
        """
        job = self._cache.job(key)
        if job is None:
            return ()
        status = previous(job)
        factor = left_part(status, running=running) * slowdown(status)
        return tuple(replace(each, seconds=max(1e-3, each.seconds * factor)) for each in options)

    async def _options_of(self, key: JobKey, question: ParsedJob, shape: Hashable, ask: Ask) -> tuple[Option, ...]:
        """Return the job's options (plans on different device types and numbers of devices) as if no other job ran.

        ``Option.seconds`` covers the whole training, not only the rest. ``shape``: key for the shape of the cluster,
        with which options are stored.
        """
        request = (
            key[0], question.digest, tuple(sorted(question.observed.left_out)), self._cache.profiles_version, shape,
        )  # fmt: skip
        known = self._options.get(request)
        if known is not None and self._clock() - known[0] < OPTIONS_S:
            self._options.move_to_end(request)
            return known[1]
        found = await self._found(
            question, usable_nodes(question, self._view_without({job.key for job in self._cache.jobs()})), ask
        )
        self._options[request] = (self._clock(), found)
        self._options.move_to_end(request)
        while len(self._options) > MAX_KNOWN:
            self._options.popitem(last=False)
        return found

    async def _found(self, question: ParsedJob, whole: ClusterView, ask: Ask) -> tuple[Option, ...]:
        """Ask the planner for plans on 1, 2, 4, … devices of each GPU type, and return them as options.

        Leave out an option that is not faster than a smaller one, or that takes more than ``MAX_OF_LEAST`` times the
        least energy (or cost), if the job minimizes it.
        """
        asked = replace(question, accepted=None, report=None)
        found: list[tuple[Option, float]] = []
        types = [name for name in whole.device_types if any(n.is_gpu for n in whole.nodes if n.device == name)]
        for device in types[:MAX_DEVICE_TYPES]:
            best_s = inf
            for count, per_node, view in device_parts([node for node in whole.nodes if node.device == device]):
                plan = await ask(asked, view)
                if not isinstance(plan, StoredPlan) or plan.new_nodes:
                    continue
                used = sum(group.nodes * group.ranks_per_node for group in plan.groups)
                predicted = plan.status.predicted
                # A plan that uses less than is free is that of a smaller size.
                if used == count * per_node and 0 < predicted.total_seconds < best_s:
                    best_s = predicted.total_seconds
                    found.append((Option(device, count, per_node, best_s), _expense(question, plan)))
        least = min((expense for _, expense in found), default=0.0)
        return tuple(option for option, expense in found if expense <= MAX_OF_LEAST * least)


def _takes_part(question: ParsedJob) -> bool:
    """Return True if the job's plan will run, and the operator (not the user or Kueue) chooses its devices."""
    spec = question.spec
    return spec is not None and not question.queued and not plan_only(question) and not spec.planning.groups


def _has_deadline(question: ParsedJob) -> bool:
    return question.spec is not None and question.spec.scheduling.finish_by is not None


def _expense(question: ParsedJob, plan: StoredPlan) -> float:
    """Return the predicted energy (J), cost or carbon (g) of a plan, if the job minimizes it; otherwise 0."""
    assert question.spec is not None
    return plan.status.predicted.expense(question.spec.objective.minimize) or 0.0


def _shape(view: ClusterView) -> Hashable:
    """Return a key for the shape of the cluster: how many nodes have which device type and number of free devices.

    Options are the same on clusters of the same shape."""
    return frozenset(Counter((node.device, node.free_devices, node.left_out is None) for node in view.nodes).items())
