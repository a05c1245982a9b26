"""Make room for the first job in line: choose the running jobs that stop for it, and queue them.

The rules are in ``dljob.scheduling.preemption``. The status of a stopping job says that it stops, and the freed devices
belong to the shadow reservation of the first in line. The next leader can therefore continue from there.
"""

import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf

from dljob.api import Disruption
from dljob.cluster import ClusterView
from dljob.controller.planning.answers import UsableDevices, matters_to, with_limits
from dljob.controller.planning.growing import usable_nodes
from dljob.controller.planning.parsed_objects import PlansByJob
from dljob.controller.planning.queue.shadows import Ask
from dljob.controller.planning.queueing import Queue
from dljob.job.log_fields import log_fields
from dljob.job.observed import JobSeen, Preemption
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import lost_s, remaining_p90_s, restart_s
from dljob.job.reservation import PlannedPods, plan_reservation
from dljob.job.waiting import stops
from dljob.kube import Cache, JobKey
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.reconcile.planning.limits import quota_needs
from dljob.scheduling import (
    NOTHING,
    PROTECTED_S,
    Preemptible,
    QueuedJob,
    Requests,
    beside_running,
    victims,
)
from dljob.scheduling.limits.quotas import shortages
from dljob.scheduling.preemption import Admits
from dljob.status import FALSE, TRUE, find, previous

LOOK_S = 10.0
"""Seconds between two searches for jobs to preempt. Each asks the planner a few times."""
SOON_S = 60.0
"""If the first in line is predicted to start within these seconds anyway, no job is preempted for it.

To stop a job takes about as long."""
AGAIN_S = 60.0
"""Seconds after which a search is repeated that found nothing, if the same jobs run and wait."""
OBEY_S = 60.0
"""Seconds after which the order to stop a job is dropped if the job's reconcile has not carried it out."""
REST_S = 900.0
"""Seconds for which no other order is given to such a job: what kept it from stopping may last, and others may stop."""
MAX_DEVICE_TYPES = 4
"""Maximum number of device types on each of which, alone, the first in line is planned to find room for it."""
_BY_DLJOB = ((TRUE, "Starting"), (TRUE, "Started"))
"""Status and reason of the condition Admitted of a running job that Kueue did not admit."""

log = logging.getLogger("dljob")


@dataclass(frozen=True)
class _Order:
    """The order that a running job stops for the waiting job ``by``.

    ``uid``: of the running job. ``at_s``: time of the order. ``begun``: True as soon as the status of the running job
    says that it stops.
    """

    uid: str
    by: JobKey
    preemption: Preemption
    at_s: float
    begun: bool = False


class Preempting:
    """Decides which running jobs stop for which waiting job. Use it in one event loop only."""

    def __init__(
        self,
        cache: Cache,
        queue: Queue,
        plans: PlansByJob,
        requeue: Callable[[JobKey], None],
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        """``requeue``: called with the key of a job that must stop."""
        self._cache, self._queue, self._plans, self._requeue = cache, queue, plans, requeue
        self._clock, self._now = clock, now
        self._orders: dict[JobKey, _Order] = {}
        self._refused_s: dict[JobKey, float] = {}
        """For each job that did not carry out an order, the time when the order was dropped."""
        self._looked_s = -inf
        self._made: tuple[Collection[JobKey], float] = ((), -inf)
        """The jobs for which jobs were ordered to stop last, and when one of these still held devices."""
        self._in_vain: tuple[Hashable, float] = (None, -inf)
        """The waiting and running jobs of the last search, if it found nothing, and the time of this search."""

    def order(self, key: JobKey) -> Preemption | None:
        """Return why a running job must stop now; None if it need not, or if its status says already that it stops.

        The job's reconcile asks for this, and then carries the order out.
        """
        order, job = self._orders.get(key), self._cache.job(key)
        if order is None or order.begun or job is None or job.uid != order.uid:
            return None
        if stops(job):
            self._orders[key] = replace(order, begun=True)
            return None
        return order.preemption

    def explained(self, key: JobKey, found: Infeasible) -> Infeasible:
        """Return why a job waits: the planner's reason ``found``, or MakingRoom if running jobs stop for this job."""
        stopping = [each for each, order in self._orders.items() if order.by == key and self._counts(each, order)]
        if not stopping:
            return found
        text = (
            f"found too few free devices or too little quota yet, because {len(stopping)} jobs of a lower priority are "
            "still writing a checkpoint to make room for this job; expected enough of both. Wait: this job starts when "
            "the pods of these jobs are gone"
        )
        return Infeasible("MakingRoom", "spec.scheduling", text, transient=True)

    def makes_room(self) -> bool:
        """Return True while jobs stop for one that waits, and until this job had the time to start on what they had.

        Call this at least every ``LOOK_S`` seconds.
        """
        if stopping := {order.by for key, order in self._orders.items() if self._counts(key, order)}:
            self._made = stopping, self._clock()
        made, held_s = self._made
        waits = any(self._cache.job(key) is not None and not self._queue.holdings.holds_devices(key) for key in made)
        return waits and self._clock() - held_s < LOOK_S

    async def make_room(
        self, waiting: Mapping[JobKey, ParsedJob], short: Mapping[JobKey, ParsedJob], ask: Ask
    ) -> JobKey | None:
        """Order running jobs to stop if the first job in line can then start.

        There is one line of the jobs that wait for devices (``waiting``, as they are planned) for each group of jobs
        that may use the same device types (``_pools``). If no job stops for the first in these lines, also try the
        lines of those that wait for the quotas of their namespaces (``short``).

        Do this at most every ``LOOK_S`` seconds, and not before all jobs with earlier orders have begun to stop. Return
        the key of the first in line. Return None if no job was ordered to stop. An error is only logged. ``ask``: makes
        plans.
        """
        try:
            return await self._look(waiting, short, ask) if self._queue.policy.preempts else None
        except Exception:  # The jobs go on as before, and the next look tries again.
            log.exception("choosing jobs that make room for the first job in the queue failed; no job stops now")
            return None

    async def _look(
        self, waiting: Mapping[JobKey, ParsedJob], short: Mapping[JobKey, ParsedJob], ask: Ask
    ) -> JobKey | None:
        now_s, everyone = self._clock(), {**waiting, **short}
        refused = [key for key, order in self._orders.items() if not order.begun and now_s - order.at_s >= OBEY_S]
        self._refused_s = {key: at_s for key, at_s in self._refused_s.items() if now_s - at_s < REST_S}
        self._refused_s |= dict.fromkeys(refused, now_s)
        self._orders = {key: order for key, order in self._orders.items() if self._counts(key, order)}
        if not everyone or now_s - self._looked_s < LOOK_S or any(not order.begun for order in self._orders.values()):
            return None
        self._looked_s = now_s
        running = self._running(max(self._queue.job(each).priority for each in everyone.values()))
        jobs = frozenset((key, each.digest) for key, each in everyone.items()), frozenset(running)
        if not running or (self._in_vain[0] == jobs and now_s - self._in_vain[1] < AGAIN_S):
            return None
        self._in_vain = jobs, now_s
        for line in (*self._pools(waiting), *self._lines(short, running)):
            in_order = self._queue.in_order(line.values())
            first = await self._queue.first((each for each in in_order if self._queue.starts(each[0].key)), ask)
            if first is None:
                continue
            if first.shadow.start_s - now_s <= SOON_S:
                self._in_vain = None, now_s
                continue
            if chosen := await self._chosen(first.key, line[first.key], running, ask):
                self._in_vain = None, now_s
                for victim in chosen:
                    self._order(victim, self._queue.job(line[first.key]))
                return first.key
        return None

    def _pools(self, waiting: Mapping[JobKey, ParsedJob]) -> list[dict[JobKey, ParsedJob]]:
        """Return the waiting jobs in groups, the group of the first in line first.

        Jobs that may use the same device types are in one group. With a single group, a job for which no other can make
        room would keep all jobs after it from getting devices that it cannot use itself.
        """
        usable = UsableDevices(self._cache.ledger.view())
        types_of = {key: usable.of(each) for key, each in waiting.items()}
        groups: list[frozenset[str]] = []
        for types in {*types_of.values()} - {frozenset()}:
            joined = [each for each in groups if not each.isdisjoint(types)]
            groups = [*(each for each in groups if each.isdisjoint(types)), types.union(*joined)]
        pools = [{key: waiting[key] for key, types in types_of.items() if types and types <= each} for each in groups]
        return sorted(pools, key=lambda pool: min(self._queue.job(each).place for each in pool.values()))

    def _lines(
        self, short: Mapping[JobKey, ParsedJob], running: Mapping[JobKey, Preemptible]
    ) -> list[dict[JobKey, ParsedJob]]:
        """Return the jobs that wait for quotas, by namespace. Leave out those for which no job there could stop."""
        lines: dict[str, dict[JobKey, ParsedJob]] = {}
        for key, each in short.items():
            priority = self._queue.job(each).priority
            if any(other[0] == key[0] and its.priority < priority for other, its in running.items()):
                lines.setdefault(key[0], {})[key] = each
        return list(lines.values())

    def forget_all(self) -> None:
        self._orders.clear()
        self._refused_s.clear()
        self._looked_s, self._made, self._in_vain = -inf, ((), -inf), (None, -inf)

    async def _chosen(
        self, key: JobKey, question: ParsedJob, running: Mapping[JobKey, Preemptible], ask: Ask
    ) -> tuple[Preemptible, ...]:
        """Choose those of the ``running`` jobs that stop for the first in line, so that they lose least.

        ``key``, ``question``: of the first in line. Return an empty tuple if it must not preempt, if no set of jobs
        makes room for it, or if its quota would not allow a plan even then.
        """
        own = self._queue.job(question).priority
        running = {other: each for other, each in running.items() if each.priority < own and not each.ends_soon}
        if not running or question.spec is None or not self._queue.preempts(question):
            return ()
        ending, found = self._stopping(), list[tuple[Preemptible, ...]]()
        whole = usable_nodes(question, self._queue.holdings.view_without(key, ending | running.keys()))
        names = {node.name for node in whole.nodes}
        free = ClusterView(tuple(n for n in self._queue.holdings.view_without(key, ending).nodes if n.name in names))
        free = beside_running(free, whole, running.values())
        limited = with_limits(question, self._queue.holdings.limits_without(key, ending | running.keys()))
        sharing = [other for other in running if other[0] == key[0]]
        for view in _views(question, whole):
            if (plan := await self._small_plan(limited, view, ask)) is None:
                continue
            job = self._cache.job(key)
            needs = plan_reservation(PlannedPods.of(plan), job.spec if job is not None else {}, {})
            if chosen := victims(own, needs, free, running.values(), self._admits(key, plan, ending), sharing):
                found.append(chosen)
        if not found:
            return ()
        best = min(found, key=lambda each: sum(victim.cost for victim in each))
        gone = ending | {victim.key for victim in best}
        limited = with_limits(question, self._queue.holdings.limits_without(key, gone))
        answer = await ask(limited, self._queue.holdings.view_without(key, gone))
        return best if isinstance(answer, StoredPlan) else ()

    def _admits(self, key: JobKey, plan: StoredPlan, ending: Collection[JobKey]) -> Admits:
        """Return the function that says if quotas admit the ``plan`` of the job ``key`` after others have stopped.

        ``ending``: jobs that stop anyway.
        """
        needs, known = quota_needs(plan), dict[frozenset[JobKey], bool]()

        def admits(stopped: Collection[JobKey]) -> bool:
            own = frozenset(each for each in stopped if each[0] == key[0])  # Others use other quotas.
            if own not in known:
                limits = self._queue.holdings.limits_without(key, {*ending, *own})
                known[own] = not shortages(limits.quotas, needs)
            return known[own]

        return admits if needs else lambda stopped: True

    async def _small_plan(self, question: ParsedJob, view: ClusterView, ask: Ask) -> StoredPlan | None:
        """Return a small plan of the job on ``view``; None if no plan is possible.

        A small plan is enough to start the job, and fewer jobs must stop for it. The planner is asked for a plan with
        at most ``nodes.min`` nodes, then twice as many, and so on, until a plan is possible.
        """
        spec = question.spec
        assert spec is not None
        count, most = spec.nodes.min, min(spec.nodes.max, max(1, len(view.nodes)))
        while True:
            nodes = spec.nodes.model_copy(update={"max": min(count, spec.nodes.max)})
            smaller = replace(question, spec=spec.model_copy(update={"nodes": nodes}))
            answer = await ask(smaller if not spec.planning.groups else question, view)
            if isinstance(answer, StoredPlan):
                return answer
            if count >= most or spec.planning.groups:
                return None
            count = min(2 * count, most)

    def _running(self, below: int) -> dict[JobKey, Preemptible]:
        """Return the running jobs that may be preempted and whose priority is lower than ``below``."""
        mine = (job for job in self._cache.jobs() if not stops(job) and job.key not in self._refused_s)
        found = (self._preemptible(job, below) for job in mine)
        return {each.key: each for each in found if each is not None}

    def _preemptible(self, job: JobSeen, below: int) -> Preemptible | None:
        pods = self._plans.known(job.key)
        if pods is None or not pods.checkpoints:
            return None
        defaults = pods.defaults.scheduling if pods.defaults is not None else None
        own = job.spec.get("scheduling") or {}
        disruption = own.get("disruption") or (defaults.disruption if defaults is not None else None)
        named = own.get("priorityClassName") or (defaults.priority_class_name if defaults is not None else None)
        priority = self._cache.priority_classes.value(named)
        # A job whose class does not exist could not start again.
        if priority >= below or disruption == Disruption.AVOID or self._cache.priority_classes.lacks(named):
            return None
        holds = self._held(job.key)
        status = previous(job)
        admitted, accepted, last = (find(status.conditions, kind) for kind in ("Admitted", "Accepted", "Preempted"))
        if not holds or admitted is None or (admitted.status, admitted.reason) not in _BY_DLJOB:
            return None
        if accepted is not None and accepted.status is FALSE:
            return None  # Its pods run on with the plan of an earlier spec, and could not start again.
        since_s = (self._now() - last.last_transition_time).total_seconds() if last is not None else inf
        if since_s < PROTECTED_S:
            return None
        return Preemptible(
            job.key, priority, holds, lost_s(status, self._now()), restart_s(status), remaining_p90_s(status)
        )

    def _counts(self, key: JobKey, order: _Order) -> bool:
        """Return True if the order that the running job ``key`` stops is still in force.

        The order ends when the running or the waiting job is gone, or when the running job holds no devices any more.
        It also ends if the status of the running job does not say within ``OBEY_S`` seconds that it stops, or later no
        longer says so.
        """
        job = self._cache.job(key)
        if job is None or self._cache.job(order.by) is None or not self._queue.holdings.holds_devices(key):
            return False
        return stops(job) if order.begun else self._clock() - order.at_s < OBEY_S

    def _held(self, key: JobKey) -> dict[str, Requests]:
        """Return what the pods of a job take from each node, by the node's name; empty if no pod has a node."""
        holds: dict[str, Requests] = {}
        for pod in self._cache.pods_of(key):
            if pod.node is not None and self._cache.ledger.holds(pod.uid):
                holds[pod.node] = holds.get(pod.node, NOTHING) + self._cache.ledger.requests(pod.uid)
        return holds

    def _stopping(self) -> set[JobKey]:
        return {job.key for job in self._cache.jobs() if stops(job)}

    def _order(self, victim: Preemptible, by: QueuedJob) -> None:
        job = self._cache.job(victim.key)
        if job is None:
            return
        name = by.key[1] if by.key[0] == victim.key[0] else ""
        self._orders[victim.key] = _Order(
            job.uid, by.key, Preemption(name, by.priority, victim.priority), self._clock()
        )
        log.info(
            "the job (priority %d) stops for job %s/%s (priority %d); the stop costs %.0f device-seconds",
            victim.priority, *by.key, by.priority, victim.cost, extra=log_fields(victim.key, job),
        )  # fmt: skip
        self._requeue(victim.key)


def _views(question: ParsedJob, whole: ClusterView) -> list[ClusterView]:
    """Return the parts of the cluster ``whole`` on which the first in line is planned to find the cheapest room for it.

    These are the nodes of each device type that the job may use, alone (at most ``MAX_DEVICE_TYPES``), and the whole
    cluster. For a job with one such type or with fixed groups, it is only the whole cluster.
    """
    useful = [device for device in whole.device_types if matters_to(question)(device)]
    if len(useful) < 2 or (question.spec is not None and question.spec.planning.groups):
        return [whole]
    alone = [ClusterView(tuple(node for node in whole.nodes if node.device == each)) for each in useful]
    return [*alone[:MAX_DEVICE_TYPES], whole]
