"""Keep the book of reservations (what accepted plans need, and what stored objects reserve), and what is free."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import inf

from dljob.cluster import ClusterView
from dljob.controller.metrics import Metrics
from dljob.controller.planning.amortized import FACTOR, in_turns
from dljob.controller.planning.answers import Decision, plan_only
from dljob.controller.planning.parsed_objects import PlansByJob
from dljob.job.log_fields import log_fields
from dljob.job.observed import Observed
from dljob.job.plan.stored import StoredPlan
from dljob.job.reservation import PlannedPods, created_by_group, placed_by_group, plan_reservation, stored_reservation
from dljob.kube import Cache, JobKey
from dljob.reconcile import ParsedJob
from dljob.scheduling import Charge, Growth, NamespaceLimits, Reservation, ReservationBook, without_reserved

STOP_MARGIN_S = 60.0
"""Seconds beyond their grace period that pods may take to stop, until their job's next plan reserves nothing more.

The StatefulSet controller first deletes the pods, and kubelets report their end.
"""
log = logging.getLogger("dljob")


@dataclass(frozen=True, slots=True)
class _Unstored:
    """An accepted plan that is not stored yet. ``data``: that of its ConfigMap. ``since_s``: time of the first one.

    If a job is planned again before its plan is stored, the time of its first plan counts.
    """

    data: Mapping[str, str]
    pods: PlannedPods
    since_s: float


class Reserving:
    """Keeps the reservations of all jobs in the book up to date. Use it in one event loop only."""

    def __init__(self, cache: Cache, book: ReservationBook, clock: Callable[[], float]) -> None:
        self._cache, self._book, self._clock, self.plans = cache, book, clock, PlansByJob()
        self._unstored: dict[JobKey, _Unstored] = {}
        """Accepted plans that are not stored yet."""

    def reserve(self, key: JobKey, question: ParsedJob, decision: Decision | None) -> bool:
        """Reserve what a new plan needs beyond what the job's pods have. Return True if something is reserved for it.

        Nothing is reserved if ``decision`` is no plan, if the plan is only shown, if the job is in a queue of Kueue, or
        if the job's pods have all that the plan needs.
        """
        observed = self._cache.observe(key)
        if not isinstance(decision, StoredPlan) or plan_only(question) or question.queued or observed is None:
            self.refused(key)
            return False
        pods = PlannedPods.of(decision)
        now_s, before = self._clock(), self._unstored.get(key)
        self._book.accept(key, self._missing(observed, pods), now_s)
        self._unstored[key] = _Unstored(decision.data(), pods, now_s if before is None else before.since_s)
        return self._book.accepted(key)

    def refused(self, key: JobKey) -> None:
        """End the reservation of a job's plan that is not stored, because the API server refused it or it was dropped.

        What the job's stored objects reserve remains.
        """
        self._unstored.pop(key, None)
        self._book.release(key)

    def forget(self, key: JobKey) -> None:
        """Forget a job that no longer exists."""
        self._unstored.pop(key, None)
        self.plans.forget(key)
        self._book.drop(key)

    def forget_all(self) -> None:
        self._cache.touched.end()
        self._unstored.clear()
        self._book.clear()
        self.plans.clear()

    async def derive_all(self) -> None:
        """Derive the reservations of all jobs from stored objects, after this operator has become the leader."""
        self._cache.touched.begin()
        async for job in in_turns(self._cache.jobs()):
            self.derive(job.key)

    def derive(self, key: JobKey) -> None:
        """Update what a job reserves, from its stored objects. If that fails, log it; the job then reserves nothing."""
        try:
            self._derive_from(self._cache.observe(key), key)
        except Exception:
            log.exception(
                "deriving the reservations failed; the job reserves nothing",
                extra=log_fields(key, self._cache.job(key)),
            )
            self._book.drop(key)

    def _derive_from(self, observed: Observed | None, key: JobKey) -> None:
        if observed is None:
            self.plans.forget(key)
            self._book.drop(key)
            return
        found = stored_reservation(observed, self.plans.of(key, observed.plan), self._cache.ledger.holds)
        self._book.derive(key, found.state, found.reservations, self._clock())
        if key not in self._unstored:
            return
        unstored = self._unstored[key]
        # A job may be planned again with the plan that it has already. The sets of this plan then have no replicas yet.
        revived = all(item.replicas for item in observed.sets if item.spec_digest == unstored.pods.revision)
        if observed.plan == unstored.data and revived:
            self.refused(key)
        else:  # The pods of the plan before stop, and the new ones need their places.
            self._book.adjust(key, self._missing(observed, unstored.pods), self._clock())

    def expire(self) -> None:
        """End the reservations that have reached their time limit, except those of jobs whose pods still stop.

        Pods that write a checkpoint may need their whole grace period, and the new plan is stored only when they are
        gone. Pods that exist for longer, such as those on a lost node, no longer count.
        """
        now_s = self._clock()
        for key in self._book.ageing(now_s):
            if (unstored := self._unstored.get(key)) is not None and self._cache.pods_of(key):
                stopping = self.plans.known(key) or unstored.pods
                if now_s - unstored.since_s < stopping.grace_s + STOP_MARGIN_S:
                    self._book.renew(key, now_s)
        self._book.expire(now_s)

    def _missing(self, observed: Observed, pods: PlannedPods) -> tuple[Reservation, ...]:
        """Return what the pods of a plan need beyond what the job's pods have already; empty if they have all."""
        placed, created = placed_by_group(observed, self._cache.ledger.holds), created_by_group(observed)
        return plan_reservation(pods, observed.job.spec, placed, created=created)


def limits_for(key: JobKey, cache: Cache, book: ReservationBook, ended: Collection[JobKey] = ()) -> NamespaceLimits:
    """Return the quotas and limit ranges of a job's namespace, with the usage that a new plan of the job finds.

    The job's own pods do not count as usage, because they leave with its old plan. Objects that the plans of other jobs
    have not created yet count. ``book``: what the other jobs of the namespace reserve. ``ended``: jobs whose pods and
    reservations do not count.

    Changes of quotas and of pods arrive through separate watches. For a moment, a new pod may therefore count neither
    in the quota's usage nor as a reservation. If a plan uses that pod's quota in this moment, the API server rejects a
    pod, and the job is planned again after ``scheduling.startTimeout``.
    """
    found = cache.limits(key[0])
    if not found.quotas:
        return found
    gone = {key, *(each for each in ended if each[0] == key[0])}
    usage = [(pod.charge, -1) for each in gone for pod in cache.pods_of(each) if pod.charge is not None]
    reserved = book.current(without=key, namespace=key[0], ended=ended)
    usage += [(item.charge, item.uncreated) for item in reserved if item.charge is not None]
    return replace(found, quotas=tuple(quota.with_usage(usage) for quota in found.quotas))


def charges_of(key: JobKey, cache: Cache, book: ReservationBook) -> list[tuple[Charge, int]]:
    """Return what a job charges to quotas by its pods, and will charge by the objects that it reserves.

    These are pairs of the charge of an object and the number of such objects.
    """
    found = [(pod.charge, 1) for pod in cache.pods_of(key) if pod.charge is not None]
    return found + [(item.charge, item.uncreated) for item in book.reserved(key) if item.charge is not None]


class FreeResources:
    """What is free for new pods on all nodes: neither taken by pods nor reserved. Use it in one event loop only."""

    def __init__(
        self, cache: Cache, book: ReservationBook, reserving: Reserving, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._cache, self._book, self._reserving = cache, book, reserving
        self._metrics, self._clock = metrics, clock
        self.growth = Growth()
        """How often capacity has grown."""
        self._known: tuple[tuple[int, int], ClusterView] | None = None
        self._again_s = -inf

    @property
    def view(self) -> ClusterView | None:
        """Return the nodes with what was free at the last look; None before the first one."""
        return None if self._known is None else self._known[1]

    def versions(self) -> tuple[int, int]:
        """Return numbers that change with each change of the nodes, their pods and the reservations."""
        return self._cache.ledger.version, self._book.version

    def look(self, *, fresh: bool = False) -> None:
        """Update reservations and ``view``, and count how often capacity has grown.

        ``fresh``: False: the view may be some milliseconds old, so that it takes little of the time even if hundreds of
        plans and pods change it each second.
        """
        for key in self._cache.touched.take():
            self._reserving.derive(key)
        began_s = self._clock()
        self._reserving.expire()
        if self._known is not None and (self._known[0] == self.versions() or (began_s < self._again_s and not fresh)):
            return
        reserved = self._book.current()
        view = without_reserved(self._cache.ledger.view(), reserved)
        self._known = self.versions(), view
        self.growth.look(view)
        self._metrics.reserved_pods.set(sum(reservation.nodes for reservation in reserved))
        self._again_s = began_s + (1 + FACTOR) * (self._clock() - began_s)

    def view_for(self, key: JobKey) -> ClusterView:
        """Return the nodes with what is free for a job. What its own pods and reservations take counts as free."""
        assert self._known is not None, "look first"
        mine = [pod.uid for pod in self._cache.pods_of(key) if self._cache.ledger.holds(pod.uid)]
        if not mine and not self._book.holds(key):
            return self._known[1]
        return without_reserved(self._cache.ledger.view(mine), self._book.current(without=key))

    def forget(self) -> None:
        self._known, self._again_s = None, -inf
