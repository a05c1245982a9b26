"""Shadow reservations: when a waiting job is predicted to start, and what it needs then."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from dljob.cluster import ClusterView
from dljob.controller.planning.amortized import OfEachJob
from dljob.controller.planning.answers import with_limits
from dljob.controller.planning.queue.holdings import Holdings
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import remaining_p90_s
from dljob.job.reservation import PlannedPods, plan_reservation
from dljob.job.waiting import stops
from dljob.kube import Cache, JobKey
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.scheduling import (
    NamespaceLimits,
    RunningJob,
    Shadow,
    StartSearch,
    in_order_of_ends,
    shadow,
    start_in_s,
)
from dljob.status import previous

SHADOW_S = 10.0
"""Seconds after which a shadow reservation is made again although no capacity changed: running jobs progress."""
Ask = Callable[[ParsedJob, ClusterView], Awaitable[StoredPlan | Infeasible]]
"""Function that plans a job on a view of the cluster (the nodes with what is free). It returns the plan, or why none is
possible."""


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


class Shadows:
    """Finds and stores shadow reservations. Use it in one event loop only."""

    def __init__(self, cache: Cache, holdings: Holdings, clock: Callable[[], float]) -> None:
        self._cache, self._holdings, self._clock = cache, holdings, clock
        self._known: dict[JobKey, _Known] = {}
        self._left_p90_s = OfEachJob(lambda job: remaining_p90_s(previous(job)))

    def forget_others(self, waits: Callable[[JobKey], bool]) -> None:
        """Forget the jobs for which ``waits`` returns False."""
        self._known = {key: known for key, known in self._known.items() if waits(key)}

    def forget_all(self) -> None:
        self._known.clear()

    async def of(self, key: JobKey, question: ParsedJob, ask: Ask) -> Shadow | None:
        """Return the shadow reservation of a job; None if no plan is possible even when all jobs have ended.

        To find the start, search for the smallest n for which a plan is possible after n running jobs have ended, in
        the order of their predicted ends. The quotas of its namespace must admit the plan then, too. The result is used
        again for ``SHADOW_S`` if nothing in the cluster changes.
        """
        known, now_s = self._known.get(key), self._clock()
        versions = (*self._holdings.versions(), self._cache.limits_version)
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
            if job.key != without and self._holdings.holds_devices(job.key)
        ]
        self._left_p90_s.forget_others(each.key for each in found)
        return found

    def _view_after(self, key: JobKey, ended: Collection[RunningJob]) -> ClusterView:
        return self._holdings.view_without(key, {each.key for each in ended})

    def _limits_after(self, key: JobKey, ended: Collection[RunningJob]) -> NamespaceLimits:
        return self._holdings.limits_without(key, {each.key for each in ended})
