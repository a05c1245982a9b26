"""When a running job may move to another plan, and whether the operator must look for one now."""

from datetime import datetime, timedelta

from dlcontract import RunPhase
from dljob.api import Disruption, Minimize, Resize
from dljob.api.spec.spec import DLJobSpec
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile import gang
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning import rest
from dljob.scheduling import MIN_LEFT_S
from dljob.scheduling.gain import MIN_BETWEEN_S
from dljob.status import FALSE, TRUE, changed_at, find, is_true

CONDITION = "Resizing"
MIN_STEPS = 20
"""Number of steps of a job before it can grow. The first ones are slow, and the gain depends on measured steps."""
MIN_RESTARTS_BETWEEN = 10
"""Minimum time between two moves of a job that is late for its deadline, in durations of its restart."""


def undecided(parsed: ParsedJob, now: datetime | None = None) -> bool:
    """Return True if the operator must look for another plan, because the nodes that the job can use have changed.

    That is so if a move has begun, if pods find no node, or if a job that trains may move and a better plan may be
    possible. The module ``controller.planning`` limits how often the last case happens (``Observed.capacity_grew``).
    ``now``: present time; None: assume that all waiting times are over.
    """
    if not _may(parsed):
        return False
    return (
        has_decided_to_move(parsed)
        or stranded(parsed, now)
        or (parsed.observed.capacity_grew and may_restart(parsed, now))
    )


def may_grow(parsed: ParsedJob, now: datetime) -> bool:
    """Return True if a job that trains may restart on more or other devices now, if that is better for itself."""
    return not parsed.queued and _may(parsed) and may_restart(parsed, now)


def may_move(parsed: ParsedJob, now: datetime) -> bool:
    """Return True if a job that trains may restart on other devices now, to finish sooner or to help other jobs."""
    return lets_move(parsed) and may_restart(parsed, now)


def lets_move(parsed: ParsedJob) -> bool:
    """Return True if a job may restart on other devices at some time, even if it has just started or moved.

    Jobs that minimize energy or cost may not, because an assignment of devices compares times.
    """
    spec, accepted = parsed.spec, parsed.accepted
    for_time = spec is not None and spec.objective.minimize is Minimize.TIME
    if not for_time or not _may(parsed) or parsed.queued:
        return False
    assert spec is not None and accepted is not None, "checked by _may"
    return _lets_grow(spec, accepted) and accepted.plan.model.resumes


def rests_until(parsed: ParsedJob, now: datetime) -> datetime | None:
    """Return the time until which a job must not move only because it has moved shortly before; None: it may move.

    Return None also if it must not move for another reason.
    """
    if not lets_move(parsed) or not may_restart(parsed, now, moving=True):
        return None
    until = _rested_at(parsed, now, is_late=False)
    return until if until is not None and now < until else None


def is_moving(parsed: ParsedJob) -> bool:
    return is_true(parsed.before.conditions, CONDITION)


def has_decided_to_move(parsed: ParsedJob) -> bool:
    """Return True if the operator has decided to move the job (Resizing is True), and the job is admitted.

    A job that is not admitted has no pods, and is planned again before it starts anyhow.
    """
    return is_moving(parsed) and is_true(parsed.before.conditions, gang.CONDITION)


def _may(parsed: ParsedJob) -> bool:
    """Return True if the spec lets the operator replace the plan, and the plan was made for this spec."""
    if parsed.spec is None or parsed.finished:
        return False
    return parsed.spec.planning.resize is not Resize.NEVER and parsed.plan_may_change


def stranded(parsed: ParsedJob, now: datetime | None) -> bool:
    """Return True if pods of a job that ran before find no node, and the other pods do not train without these."""
    conditions = parsed.before.conditions
    if any(pod.node in parsed.observed.lost_nodes for pod in parsed.observed.pods):
        return False  # The module ``fence`` removes these pods first.
    admitted = find(conditions, gang.CONDITION)
    if admitted is None or (admitted.status, admitted.reason) != (TRUE, "Started") or is_true(conditions, "Running"):
        return False
    if parsed.spec is None or without_node(parsed) is None or not _missing_for(parsed, now):
        return False
    # Ranks that restart may go on without these pods, as before.
    limit_s = gang.start_timeout_s(parsed.spec, parsed.accepted)
    return now is None or (now - gang.stopped_training(parsed, now)).total_seconds() >= limit_s


def _missing_for(parsed: ParsedJob, now: datetime | None) -> bool:
    """Return True if at least one pod has been missing or not ready for ``spec.scheduling.startTimeout`` or longer.

    ``now``: present time; None: assume that this time is over.
    """
    ready = find(parsed.before.conditions, "PodsReady")
    if ready is None or ready.status is not FALSE or parsed.spec is None:
        return False
    limit_s = gang.start_timeout_s(parsed.spec, parsed.accepted)
    return now is None or (now - ready.last_transition_time).total_seconds() >= limit_s


def without_node(parsed: ParsedJob) -> str | None:
    """Return a text about the pods that find no node, for a message; None if there is no such pod."""
    pods = [pod for pod in parsed.observed.pods if pod.unschedulable and not pod.deleting]
    if not pods or parsed.spec is None:
        return None
    more = f" (and {len(pods) - 1} more)" if len(pods) > 1 else ""
    limit_s = gang.start_timeout_s(parsed.spec, parsed.accepted)
    return (
        f"pod {pods[0].name}{more} found no node within the start time-out of {limit_s:g} s "
        "(spec.scheduling.startTimeout)"
    )


def may_restart(parsed: ParsedJob, now: datetime | None, *, moving: bool = False) -> bool:
    """Return True if a job that trains may restart now with a better plan, to use more or other devices.

    It may not if the spec forbids it, if it has made too few steps or is about to end, if a fault or another reason for
    a new plan is handled, or if its last move was less than ``MIN_BETWEEN_S`` seconds ago. ``moving``: True if the
    move has been decided already; then the time since the last move does not matter. ``now``: present time; None:
    assume that all waiting times are over.
    """
    spec, accepted, report = parsed.spec, parsed.accepted, parsed.report
    if spec is None or accepted is None or report is None or not _lets_grow(spec, accepted):
        return False
    conditions = parsed.before.conditions
    is_late = spec.objective.minimize is not Minimize.TIME and (now is None or rest.late(parsed, now))
    if (
        report.phase is not RunPhase.RUNNING
        or report.plan_number != accepted.plan.number
        or report.mismatches
        or not accepted.plan.model.resumes
        or report.step < MIN_STEPS
        or report.step_s is None
        or ((report.steps - report.step) * report.step_s < MIN_LEFT_S and not is_late)
        or not is_true(conditions, "Running")
    ):
        return False
    contradicted, faulty = find(conditions, "PlanContradicted"), find(conditions, "NodeFaulty")
    if contradicted is not None and contradicted.status is TRUE and contradicted.reason != "NoBetterPlan":
        return False
    if faulty is not None and faulty.status is TRUE and faulty.reason == "Replanning":
        return False
    if parsed.observed.lost_nodes:
        return False
    if len(parsed.observed.ready_pods) < accepted.nodes and not _missing_for(parsed, now):
        return False  # Lost pods are being replaced.
    rested_at = None if moving or now is None else _rested_at(parsed, now, is_late=is_late)
    return now is None or rested_at is None or now >= rested_at


def _rested_at(parsed: ParsedJob, now: datetime, *, is_late: bool) -> datetime | None:
    """Return the time from which a job may move again after its last move; None if it has not moved yet."""
    last = find(parsed.before.conditions, CONDITION)
    if parsed.accepted is None or not parsed.accepted.resizes or last is None:
        return None
    between_s = min(MIN_BETWEEN_S, MIN_RESTARTS_BETWEEN * rest.restart_s(parsed)) if is_late else MIN_BETWEEN_S
    return changed_at(last, now) + timedelta(seconds=between_s)


def _lets_grow(spec: DLJobSpec, accepted: StoredPlan) -> bool:
    """Return True if restarts for a better plan are allowed, and the job then continues from a checkpoint.

    A job with a plan of an earlier release grows only with ``planning.resize: Auto``, because an upgrade of the
    operator must not restart other jobs.
    """
    return (
        (accepted.resizes is not None or spec.planning.resize is Resize.AUTO)
        and spec.scheduling.disruption is not Disruption.AVOID
        and accepted.plan.checkpoint.enabled
    )
