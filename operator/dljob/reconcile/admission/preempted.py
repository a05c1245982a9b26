"""Jobs that release their devices for a job of a higher priority, and continue later from their checkpoint.

The condition Preempted stores the state. True: the pods write a checkpoint and stop, and then the job waits in the
queue like any other. False: the pods start again. While pods stop, the condition Admitted is False with the reason
Preempting. A preemption is not a failure, and the time until the job continues is not active time.
"""

from datetime import datetime

from dljob.api import PlanningMode
from dljob.job.observed import Preemption
from dljob.reconcile import gang
from dljob.reconcile.desired import Draft
from dljob.reconcile.failures.fence import stop
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.rollout import quiet
from dljob.status import FALSE, TRUE, Verdict, find, is_true

CONDITION = "Preempted"


def stops(parsed: ParsedJob) -> bool:
    """Return True if the pods of a job must stop, or are stopping, for a job of a higher priority."""
    spec = parsed.spec
    if spec is None or spec.suspend or parsed.finished or parsed.queued or quiet(parsed.observed):
        return False
    if parsed.accepted is None or spec.planning.mode is PlanningMode.PLAN_ONLY:
        return False
    return _begun(parsed) or parsed.observed.preemption is not None


def _begun(parsed: ParsedJob) -> bool:
    found = find(parsed.before.conditions, gang.CONDITION)
    return found is not None and found.status is FALSE and found.reason == "Preempting"


def stop_pods(parsed: ParsedJob, draft: Draft, now: datetime) -> None:
    """Add to the draft that all pods stop for a job of a higher priority, and the conditions that say so.

    When the stop begins, also count the preemption.
    """
    stop(parsed, draft, now)
    if not _begun(parsed):
        assert parsed.observed.preemption is not None
        draft.verdicts.append(Verdict(CONDITION, TRUE, "Preempted", _why(parsed.observed.preemption)))
        draft.preemptions = (parsed.before.preemptions or 0) + 1
    text = f"{len(parsed.observed.pods)} pods write a checkpoint and stop; see the condition Preempted"
    draft.verdicts.append(Verdict(gang.CONDITION, FALSE, "Preempting", text))
    draft.verdicts.append(Verdict("Running", FALSE, "NotStarted", "the job waits; see the condition Admitted"))


def _why(found: Preemption) -> str:
    other = f"job {found.by}" if found.by else "a job of another namespace"
    return (
        f"{other} with priority {found.priority} needs the devices of this job, which has priority {found.own}. This "
        "job writes a checkpoint and waits in the queue until it can continue. To prevent that, use a higher priority "
        "class, or set spec.scheduling.disruption: Avoid"
    )


def resumed(parsed: ParsedJob, draft: Draft) -> None:
    """If the job was preempted, add to the draft the condition that says that the job starts again."""
    if is_true(parsed.before.conditions, CONDITION) and draft.plan is not None:
        text = f"plan {draft.plan.plan.number} starts and continues from the last checkpoint"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "Resumed", text))
