"""Jobs whose PriorityClass does not exist, for example because somebody has deleted it.

The API server rejects new pods that name such a class. A job without pods therefore waits until the class exists. Pods
that run already keep their priority, and so does their job. They run on with their plan, because the pods of another
plan could not start.
"""

from collections.abc import Iterator

from dljob.api import PlanningMode
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile import gang
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning.make_plan import planned
from dljob.reconcile.rollout import in_force, quiet
from dljob.status import FALSE, TRUE, Verdict, find

CONDITION = "PriorityClassFound"
RECHECK_S = 15.0
"""Seconds after which a job that waits for its PriorityClass is reconciled again."""


def missing(parsed: ParsedJob) -> bool:
    """Return True if the job must wait without pods, because its PriorityClass does not exist."""
    spec = parsed.asked
    if not parsed.observed.lacks_priority_class or spec is None or spec.suspend or parsed.finished or parsed.queued:
        return False
    return spec.planning.mode is not PlanningMode.PLAN_ONLY and quiet(parsed.observed)


def keeps_plan(parsed: ParsedJob) -> bool:
    """Return True if the job must go on with its present plan, because its PriorityClass does not exist."""
    spec, accepted = parsed.spec, parsed.accepted
    if not parsed.observed.lacks_priority_class or spec is None or accepted is None or parsed.queued or parsed.finished:
        return False
    if spec.suspend or spec.planning.mode is PlanningMode.PLAN_ONLY:
        return False
    return any(item.replicas for item in parsed.observed.sets) and in_force(parsed.observed, accepted)


def kept(parsed: ParsedJob, draft: Draft) -> StoredPlan | None:
    """Return the present plan of the job, and add the condition Planned, which says so if the spec has changed."""
    accepted = parsed.accepted
    if accepted is not None and accepted.spec_digest != parsed.digest:
        text = (
            f"the job continues with plan {accepted.plan.number}, and is planned for its changed spec when its "
            "PriorityClass exists; see the condition PriorityClassFound"
        )
        draft.verdicts.append(Verdict("Planned", FALSE, "PriorityClassNotFound", text))
    elif accepted is not None:
        draft.verdicts.append(planned(accepted))
    return accepted


def verdicts(parsed: ParsedJob) -> Iterator[Verdict]:
    """Yield the condition PriorityClassFound. A job gets it when its PriorityClass is missing for the first time."""
    if name := parsed.observed.lacks_priority_class:
        what = "The job waits until then" if quiet(parsed.observed) else "Its pods run on, but none can be replaced"
        text = (
            f"spec.scheduling.priorityClassName: found {name!r}, which does not exist; expected a PriorityClass of the "
            f"cluster. Ask the administrator to create it, or name another one. {what}"
        )
        yield Verdict(CONDITION, FALSE, "PriorityClassNotFound", text)
    elif find(parsed.before.conditions, CONDITION) is not None:
        yield Verdict(CONDITION, TRUE, "PriorityClassFound", "the PriorityClass of the job exists")


def wait(parsed: ParsedJob, draft: Draft) -> None:
    """Add to the draft that the job waits for its PriorityClass."""
    draft.requeue_in(RECHECK_S)
    text = "the PriorityClass of the job does not exist; see the condition PriorityClassFound"
    draft.verdicts.append(Verdict(gang.CONDITION, FALSE, "NoPlan", text))
    if parsed.accepted is not None:
        draft.verdicts.append(Verdict("Running", FALSE, "NotStarted", "the job waits; see the condition Admitted"))
