"""What jobs hold of nodes and quotas, and what is free after some of them have ended."""

from collections.abc import Collection
from dataclasses import replace

from dljob.cluster import ClusterView
from dljob.controller.planning.answers import First
from dljob.controller.planning.reserving import charges_of, limits_for
from dljob.kube import Cache, JobKey
from dljob.reconcile import ParsedJob
from dljob.reconcile.planning.resize import CONDITION as RESIZING
from dljob.scheduling import (
    NOTHING,
    Charge,
    NamespaceLimits,
    Requests,
    ReservationBook,
    dominant_share,
    without_reserved,
)
from dljob.status import is_true, previous


class Holdings:
    """What jobs hold by their pods, and by the reservations of their plans. Use it in one event loop only."""

    def __init__(self, cache: Cache, book: ReservationBook) -> None:
        self._cache, self._book = cache, book

    def holds_devices(self, key: JobKey) -> bool:
        """Return True if pods of the job are bound to nodes, or if a plan of it reserves resources."""
        return self._book.holds(key) or any(self._cache.ledger.holds(pod.uid) for pod in self._cache.pods_of(key))

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
        """Return what bounds the next plan of a job. For a job in a queue of Kueue, that is limit ranges alone.

        A job that moves has at least the quota that is reserved for its new plan. Quotas show some time after the pods
        of its old plan are gone that they have more left. Without this rule, it would go back to its old plan then.
        """
        key = question.observed.job.key
        found, job = self.limits_without(key), self._cache.job(key)
        if question.queued:
            return replace(found, quotas=())
        moves = job is not None and is_true(previous(job).conditions, RESIZING)
        return found.with_room_for(self.charges_of(key)) if moves else found

    def dominant_shares(self) -> dict[str, float]:
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

    def versions(self) -> tuple[int, int]:
        """Return numbers that change with each change of the nodes, their pods and the reservations."""
        return self._cache.ledger.version, self._book.version
