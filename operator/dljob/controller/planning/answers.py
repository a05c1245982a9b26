"""What planning has found out about a job, and for which state of the cluster it holds."""

from dataclasses import dataclass

from dljob.api import PlanningMode
from dljob.job.plan.stored import StoredPlan
from dljob.kube import JobKey
from dljob.planner import Infeasible
from dljob.reconcile import ParsedJob
from dljob.scheduling import NamespaceLimits

Decision = StoredPlan | Infeasible


@dataclass(frozen=True)
class Answer:
    """``decision``: None if planning failed with ``error``."""

    question: ParsedJob
    decision: Decision | None
    error: str
    reserved: bool
    at_s: float
    versions: tuple[int, int]
    """Versions of the ledger and of the reservations with which the plan is certainly still right."""
    profiles_version: int
    growth: int
    limits_version: int
    limits: NamespaceLimits
    behind: JobKey | None = None
    """The first job in line, if the job waits only so that it does not delay that one."""

    @property
    def waits_for_devices(self) -> bool:
        """Return True if the job has no plan because others use devices that it could use.

        A job whose quota is used up waits for jobs of its own namespace, and one in a queue of Kueue waits for Kueue.
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
