"""The order of the queue: which of the waiting jobs gets devices first.

Jobs of a higher priority come first. Among jobs of equal priority, jobs with a deadline come first, in the order of
their slack (the time until they must start to meet the deadline). The next criterion is the dominant share of the
cluster that the job's namespace holds (the largest of its fractions of devices, CPU and memory), divided by the weight
of the namespace: the smaller share comes first. The last criterion is age: older jobs come first. (Dominant share:
Ghodsi et al., "Dominant Resource Fairness", NSDI 2011.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from dljob.scheduling.requests import Requests

Place = tuple[int, bool, float, float, datetime, str]
"""See ``QueuedJob.place``."""


@dataclass(frozen=True)
class QueuePolicy:
    """The administrator's settings for the order of the queue, and for preemption."""

    deadlines: bool = True
    """False: deadlines do not change the order."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each namespace by its name, greater than 0; 1 for a namespace that is not listed.

    With weight 2, a namespace may hold twice the share of the cluster before its jobs come after those of others.
    """
    preempts: bool = False
    """True: a waiting job may preempt running jobs of a lower priority, if its PriorityClass allows that."""

    def weighted(self, namespace: str, share: float) -> float:
        """Return the dominant share of a namespace, divided by its weight."""
        return share / self.weight(namespace)

    def weight(self, namespace: str) -> float:
        return self.weights.get(namespace, 1.0)


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """The properties of a waiting job that determine its place in the queue.

    ``key``: namespace and name. ``priority``: value of its PriorityClass. ``share``: dominant share of its namespace
    (the fraction of the cluster that it holds), divided by the weight. ``latest_start``: the moment by which the job
    must start to meet its deadline; None: the job has no deadline, or can no longer meet it.
    """

    key: tuple[str, str]
    uid: str
    priority: int
    share: float
    created: datetime
    latest_start: datetime | None = None

    @property
    def urgency(self) -> tuple[int, bool, float, float]:
        """Return the part of the sort key ``place`` that does not depend on age. The smallest value comes first.

        It is (negative priority, True without a deadline, latest start in Unix seconds, share). The latest start stands
        for the slack, which is the time until then: both give the same order, but slack changes all the time.
        """
        due_s = 0.0 if self.latest_start is None else self.latest_start.timestamp()
        return -self.priority, self.latest_start is None, due_s, self.share

    @property
    def place(self) -> Place:
        """Return the sort key of the queue, (``urgency``, creation time, uid); the smallest comes first."""
        return *self.urgency, self.created, self.uid


def latest_start(finish_by: datetime | None, run_p90_s: float | None, now: datetime) -> datetime | None:
    """Return when a job must start to meet its deadline: the deadline less the predicted remaining run time.

    ``finish_by``: the deadline; None: the job has none. ``run_p90_s``: 90th percentile of the run time in seconds;
    None: unknown, and 0 is assumed. Return None without a deadline. Also return None if the latest start has passed, so
    that no job gets devices first for a deadline that it misses anyway.
    """
    if finish_by is None:
        return None
    run_s = run_p90_s or 0.0
    return finish_by - timedelta(seconds=run_s) if run_s <= (finish_by - now).total_seconds() else None


def dominant_share(held: Requests, total: Requests) -> float:
    """Return the largest of the fractions ``held`` / ``total`` over devices, CPU and memory.

    ``held``: what the jobs of a namespace hold. ``total``: what all nodes have. Resources that no node has do not
    count.
    """
    pairs = ((held.devices, total.devices), (held.cpu_m, total.cpu_m), (held.memory_nbytes, total.memory_nbytes))
    return max((mine / whole for mine, whole in pairs if whole > 0), default=0.0)
