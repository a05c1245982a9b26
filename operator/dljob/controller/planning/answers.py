"""The result of planning a job, and the state of the cluster for which the result is valid."""

from collections.abc import Hashable
from dataclasses import dataclass

from dljob.api import PlanningMode
from dljob.job.plan.stored import StoredPlan
from dljob.kube import JobKey
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.scheduling import NamespaceLimits, QueuePolicy

Decision = StoredPlan | Infeasible
FRESH_S = 10.0
"""Seconds for which a plan may still be used after something else in the cluster has changed."""
REFRESH_S = 1800.0
"""Seconds after which a waiting job is planned again although no capacity grew, so that its message is up to date."""
QUEUED_S = 300.0
"""Seconds after which a job that waits behind the first in line is planned again: the forecasts change slowly."""
RECONCILE_S = 60.0
"""Seconds after which a waiting job is reconciled again. It is not planned again unless its question has changed."""
DEFAULT_POLICY = QueuePolicy()


class PlanningError(Exception):
    """Planning a job failed, for a reason that lies in the operator."""


@dataclass(frozen=True)
class Answer:
    """The result of planning a job. ``decision`` is None if planning failed; then ``error`` says why."""

    question: ParsedJob
    decision: Decision | None
    error: str
    reserved: bool
    at_s: float
    versions: tuple[int, int]
    """Versions of the ledger and of the reservations. While they are unchanged, the plan is certainly still valid."""
    profiles_version: int
    growth: int
    limits_version: int
    limits: NamespaceLimits
    behind: JobKey | None = None
    """The first job in line, if this job waits only because it would delay that job; otherwise None."""
    share: Hashable = None
    """The job's ``Share`` if devices were assigned to all jobs together; None: the job was planned by itself."""

    @property
    def waits_for_devices(self) -> bool:
        """Return True if the job has no plan because others use devices that it could use.

        Return False for a job whose quota is used up, which waits for jobs of its own namespace, and for a job in a
        queue of Kueue, which waits for Kueue.
        """
        found = self.decision
        return (
            isinstance(found, Infeasible)
            and found.transient
            and found.reason != "QuotaExceeded"
            and not self.question.queued
        )


def plan_only(question: ParsedJob) -> bool:
    """Return True if the plan of the job is shown and never runs."""
    return question.spec is not None and question.spec.planning.mode is PlanningMode.PLAN_ONLY
