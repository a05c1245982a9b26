"""Admissions by Kueue with which no plan is possible: for how long a job keeps their quota, and what follows.

Kueue knows quota, not nodes. It may admit fewer pods than the plan has at a time when the nodes for them are cordoned
or lost. If another state of the cluster could make a plan possible, the job keeps the quota for its start time-out and
is planned again meanwhile. Then the operator deletes the Workload, so that others can use the quota. After a back-off,
the job is planned for the nodes of that time and asks for quota again. If no state of the cluster could make a plan
possible, the operator deactivates the Workload, because Kueue would admit the same number of pods again.

The condition Admitted stores which of these steps the job has reached. All times count from the transition of the
condition Planned to False, because Admitted is False from the creation of the job on.
"""

from datetime import datetime

from dljob.kueue import Stage, Turn
from dljob.planner import Infeasible
from dljob.reconcile import gang
from dljob.reconcile.desired import Draft, WorkloadChange
from dljob.reconcile.parsed import ParsedJob
from dljob.status import FALSE, Verdict, find

_RETURNED, _NOT_USABLE, _NO_PLAN = "AdmissionTimedOut", "AdmissionNotUsable", "NoPlan"
"""Reasons of the condition Admitted=False."""


def respond(parsed: ParsedJob, draft: Draft, found: Infeasible, now: datetime) -> None:
    """Add to the draft what becomes of an admission of fewer pods than planned, with which no plan is possible.

    Add the condition Admitted, and a change of the Workload if the quota must become free. ``found``: reason why no
    plan is possible.
    """
    workload, within, spec = parsed.observed.queue.workload, parsed.within, parsed.spec
    assert workload is not None and within is not None and spec is not None
    nodes = sum(count for _, count, _ in within.groups)
    if not found.transient:
        text = (
            f"Kueue admitted {nodes} pods, with which no plan is possible ({found.field}: {found.message}); Workload "
            f"{workload.name} is deactivated. Set spec.nodes.min to more than {nodes}, or ask the administrator for "
            "more quota"
        )
        draft.verdicts.append(Verdict(gang.CONDITION, FALSE, "AdmissionNotUsable", text))
        draft.workload = WorkloadChange(workload.name, workload.uid, workload.version, spec={"active": False})
        return
    timeout_s = gang.start_timeout_s(spec, parsed.accepted)
    admission = f"Workload {workload.name}: found an admission of {nodes} pods, with which no plan"
    left_s = timeout_s - _waited_s(parsed, now)
    if left_s > 0:
        text = (
            f"{admission} is possible now; expected nodes for these pods, see the condition Planned. The job is "
            f"planned again when the cluster changes. If no plan is possible for {timeout_s:g} s "
            "(spec.scheduling.startTimeout), the operator gives the quota back, and the job asks for quota again later"
        )
        draft.verdicts.append(Verdict(gang.CONDITION, FALSE, "AwaitingUsableNodes", text))
        draft.requeue_in(left_s)
        return
    again = _reason(parsed) == _RETURNED  # The Workload was not deleted, because it has changed meanwhile.
    draft.start_timeouts = parsed.before.start_timeouts + (0 if again else 1)
    again_s = gang.back_off_s(draft.start_timeouts, timeout_s, parsed.observed.job.uid)
    text = (
        f"{admission} was possible for {timeout_s:g} s (spec.scheduling.startTimeout): {found.field}: {found.message}. "
        f"The operator gives the quota back, so that other jobs can use it. In {again_s:.0f} s, the job is planned for "
        "the nodes that are there then, and asks for quota again"
    )
    draft.verdicts.append(Verdict(gang.CONDITION, FALSE, "AdmissionTimedOut", text))
    draft.requeue_in(again_s)
    draft.workload = WorkloadChange(workload.name, workload.uid, delete=True)


def plans_anew(parsed: ParsedJob) -> bool:
    """Return True if a job without a Workload must be planned before it asks for quota, although it has a plan.

    Its quota was given back because of the nodes, or no plan was possible. The nodes may be others now.
    """
    return parsed.observed.queue.workload is None and _reason(parsed) in (_RETURNED, _NO_PLAN)


def backs_off(parsed: ParsedJob, now: datetime) -> bool:
    """Return True if the job must not ask for quota yet, because the operator gave its last quota back."""
    workload, accepted = parsed.observed.queue.workload, parsed.accepted
    if _reason(parsed) != _RETURNED or accepted is None or accepted.spec_digest != parsed.digest:
        return False
    return workload.deleting if workload is not None else back_off_left_s(parsed, now) > 0


def back_off_left_s(parsed: ParsedJob, now: datetime) -> float:
    """Return the seconds until a job whose quota was given back asks for quota again; 0 or less: now."""
    if parsed.spec is None:
        return 0.0
    timeout_s = gang.start_timeout_s(parsed.spec, parsed.accepted)
    pause_s = gang.back_off_s(parsed.before.start_timeouts, timeout_s, parsed.observed.job.uid)
    planned = find(parsed.before.conditions, "Planned")
    return timeout_s + pause_s - _waited_s(parsed, now) if planned is not None and planned.status is FALSE else 0.0


def deactivated(parsed: ParsedJob, turn: Turn) -> Verdict | None:
    """Return the condition Admitted of a job whose Workload the operator has deactivated; None for any other job.

    It still says why, and what to do: to activate the Workload would lead to the same admission. ``turn``: state of the
    job in Kueue.
    """
    workload = parsed.observed.queue.workload
    if workload is None or workload.active or turn.stage not in (Stage.EVICTED, Stage.INACTIVE):
        return None
    return before(parsed) if _reason(parsed) == _NOT_USABLE else None


def before(parsed: ParsedJob) -> Verdict | None:
    """Return the condition Admitted that the job had before this reconcile; None if it had none."""
    found = find(parsed.before.conditions, gang.CONDITION)
    return None if found is None else Verdict(gang.CONDITION, found.status, found.reason, found.message)


def _reason(parsed: ParsedJob) -> str:
    """Return the reason of the condition Admitted=False before this reconcile; empty if it was not False."""
    found = find(parsed.before.conditions, gang.CONDITION)
    return found.reason if found is not None and found.status is FALSE else ""


def _waited_s(parsed: ParsedJob, now: datetime) -> float:
    """Return the seconds for which no plan has been possible; 0 if that begins now."""
    planned = find(parsed.before.conditions, "Planned")
    if planned is None or planned.status is not FALSE:
        return 0.0
    return (now - planned.last_transition_time).total_seconds()
