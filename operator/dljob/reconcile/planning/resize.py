"""Plan a running job again when the cluster has changed: it grows onto free nodes, or shrinks to those that are left.

The condition Resizing stores the state of a move. True:

- BetterPlan: another plan ends the training sooner, the restart included; or with less energy or cost, if the job
  minimizes that. Nodes have become free, or the time to the deadline has changed against the remaining steps.
- DeadlineAtRisk: the job minimizes energy or cost, its plan misses the deadline, and another plan meets it.
- DevicesReassigned: all jobs together gain if this one continues on other or fewer devices (the chart value
  ``queue.assignment: Together``).
- NodesGone: pods find no node for ``spec.scheduling.startTimeout``, and without them the job does not train.

The pods of the old plan write a checkpoint and stop. False:

- Resized: the new plan has replaced the old one.
- NotWorthwhile: the operator found no better plan when it looked last; the message says why.
- Resting: devices are free that the job could use, but it has moved shortly before. The message has the time at which
  it may move again (the chart value ``queue.assignment: Together``).
"""

from datetime import datetime, timedelta

from dlcontract import RunPhase
from dljob.api import Disruption, Minimize, PlanningMode, Resize
from dljob.api.spec.spec import DLJobSpec
from dljob.job.plan.stored import StoredPlan
from dljob.planner import Infeasible
from dljob.planner.types.texts import duration, time_text
from dljob.reconcile import gang
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning import make_plan, rest
from dljob.reconcile.planning.replan import layout
from dljob.reconcile.rollout import quiet
from dljob.reconcile.spec import one_node
from dljob.reconcile.volume import blocked, blocks, volume_ready
from dljob.render import RenderConfig
from dljob.scheduling import MIN_LEFT_S, Gain, Move, gain
from dljob.scheduling.gain import MIN_BETWEEN_S
from dljob.status import FALSE, TRUE, Verdict, changed_at, find, is_true

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
    return _moves(parsed) or _stranded(parsed, now) or (parsed.observed.capacity_grew and _can_grow(parsed, now))


def may_grow(parsed: ParsedJob, now: datetime) -> bool:
    """Return True if a job that trains may restart on more or other devices now, if that is better for itself."""
    return not parsed.queued and _may(parsed) and _can_grow(parsed, now)


def may_move(parsed: ParsedJob, now: datetime) -> bool:
    """Return True if a job that trains may restart on other devices now, to finish sooner or to help other jobs."""
    return lets_move(parsed) and _can_grow(parsed, now)


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
    if not lets_move(parsed) or not _can_grow(parsed, now, moving=True):
        return None
    until = _rested_at(parsed, now, is_late=False)
    return until if until is not None and now < until else None


def resize(parsed: ParsedJob, draft: Draft, config: RenderConfig, now: datetime) -> StoredPlan | None:
    """Return the plan to which the job moves now, or None if it keeps its plan for now.

    Set the condition Resizing where a decision was made.

    A job that trains moves in two reconciles. The first sets the condition. The second plans the job again, which
    reserves the additional resources, and only then stops its pods.
    """
    accepted, observed = parsed.accepted, parsed.observed
    if accepted is None or not undecided(parsed, now):
        _cancel(parsed, draft)
        _explain_rest(parsed, draft, now)
        return None
    if not make_plan.ready(parsed):
        return None
    other = _other(parsed, accepted, config)
    if isinstance(other, str):
        draft.verdicts.append(Verdict(CONDITION, FALSE, "NotWorthwhile", other))
        return None
    change = f"from {accepted.status.summary} to {other.status.summary}"
    if quiet(observed):
        if parsed.spec is not None and blocked(observed, parsed.spec, other):
            return other  # The move is not over: the job is planned again until a user has corrected the volume.
        text = f"plan {other.plan.number} replaces plan {accepted.plan.number}: {change}{_why(parsed)}"
        if lets_move(parsed) and _is_moving(parsed):
            text += f". It can move again at {time_text(now + timedelta(seconds=MIN_BETWEEN_S))}"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "Resized", text))
        return other
    if _stranded(parsed, now):
        draft.verdicts.append(Verdict(CONDITION, TRUE, "NodesGone", f"{change}; {_without_node(parsed)}"))
        return other
    before, stops = find(parsed.before.conditions, CONDITION), not any(item.replicas for item in observed.sets)
    if before is not None and _moves(parsed) and (stops or before.reason == "NodesGone"):
        draft.verdicts.append(Verdict(CONDITION, TRUE, before.reason, before.message))
        return other
    if not _can_grow(parsed, now, moving=True):
        draft.verdicts.append(
            Verdict(
                CONDITION,
                FALSE,
                "NotWorthwhile",
                "the job keeps its plan, because its training is disturbed or about to end",
            )
        )
        return None
    return _grow(parsed, draft, other, change, now)


def _grow(parsed: ParsedJob, draft: Draft, other: StoredPlan, change: str, now: datetime) -> StoredPlan | None:
    """Return the plan ``other`` if the job moves to it now; otherwise None. Add the condition Resizing with the gain.

    ``change``: text about the two plans for the condition.
    """
    assert parsed.spec is not None
    if parsed.spec.objective.minimize is not Minimize.TIME:
        why, figures = rest.judge(parsed, other, now)
        if why is None:
            draft.verdicts.append(Verdict(CONDITION, FALSE, "NotWorthwhile", f"{change}; {figures}"))
            return None
        is_late = why is Move.LATE
        draft.verdicts.append(
            Verdict(CONDITION, TRUE, "DeadlineAtRisk" if is_late else "BetterPlan", f"{change}; {figures}")
        )
        draft.requeue_in(0.0)
        return other if _moves(parsed) else None
    found, left = _gain(parsed, other)
    times = (
        f"the remaining {left} steps take {duration(found.stay_s)} with this plan, "
        f"and {duration(found.move_s)} with the other plan, including the restart"
    )
    room, decided = parsed.observed.room_for, _moves(parsed)
    if found.worthwhile:
        text = f"{change}; {times}: {duration(found.seconds)} sooner"
        draft.verdicts.append(Verdict(CONDITION, TRUE, "BetterPlan", text))
    elif room is not None and found.stay_s >= MIN_LEFT_S:
        text = (
            f"{change}; the devices speed up {room} more; {times}. It can take devices back after "
            f"{duration(MIN_BETWEEN_S)} at the earliest"
        )
        draft.verdicts.append(Verdict(CONDITION, TRUE, "DevicesReassigned", text))
    else:
        draft.verdicts.append(Verdict(CONDITION, FALSE, "NotWorthwhile", f"{change}: {times}"))
        return None
    draft.requeue_in(0.0)
    return other if decided else None


def _cancel(parsed: ParsedJob, draft: Draft) -> None:
    """Set the condition Resizing from True to False if the job must not move any more.

    For example, a user has set ``planning.resize: Never``, or the missing nodes are back.
    """
    if _is_moving(parsed):
        draft.verdicts.append(
            Verdict(
                CONDITION,
                FALSE,
                "NotWorthwhile",
                "the job keeps its plan, because the reason for a move no longer exists",
            )
        )


def _explain_rest(parsed: ParsedJob, draft: Draft, now: datetime) -> None:
    """Say in the condition Resizing why devices stay free that a job could use, and when the operator looks again."""
    resting, before = parsed.observed.resting, find(parsed.before.conditions, CONDITION)
    if _is_moving(parsed):
        return
    if resting is not None and now < resting.until:
        text = (
            f"the job would end sooner on {resting.devices}, which are free or its own, but a job trains for "
            f"{duration(MIN_BETWEEN_S)} between two moves; the operator looks again at {time_text(resting.until)}"
        )
        draft.verdicts.append(Verdict(CONDITION, FALSE, "Resting", text))
        draft.requeue_in((resting.until - now).total_seconds())
    elif before is not None and before.reason == "Resting":
        text = "the job keeps its plan: it no longer rests, or the devices that it could use are no longer free"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "NotWorthwhile", text))


def _is_moving(parsed: ParsedJob) -> bool:
    return is_true(parsed.before.conditions, CONDITION)


def _moves(parsed: ParsedJob) -> bool:
    """Return True if the operator has decided to move the job (Resizing is True), and the job is admitted.

    A job that is not admitted has no pods, and is planned again before it starts anyhow.
    """
    return _is_moving(parsed) and is_true(parsed.before.conditions, gang.CONDITION)


def _may(parsed: ParsedJob) -> bool:
    """Return True if the spec lets the operator replace the plan, and the plan was made for this spec."""
    spec, accepted = parsed.spec, parsed.accepted
    return (
        spec is not None
        and accepted is not None
        and not spec.suspend
        and not parsed.finished
        and spec.planning.mode is PlanningMode.AUTO
        and spec.planning.resize is not Resize.NEVER
        and accepted.spec_digest == parsed.digest
    )


def _stranded(parsed: ParsedJob, now: datetime | None) -> bool:
    """Return True if pods of a job that ran before find no node, and the other pods do not train without these."""
    conditions = parsed.before.conditions
    if any(pod.node in parsed.observed.lost_nodes for pod in parsed.observed.pods):
        return False  # The module ``fence`` removes these pods first.
    admitted = find(conditions, gang.CONDITION)
    if admitted is None or (admitted.status, admitted.reason) != (TRUE, "Started") or is_true(conditions, "Running"):
        return False
    if parsed.spec is None or _without_node(parsed) is None or not _missing_for(parsed, now):
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


def _without_node(parsed: ParsedJob) -> str | None:
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


def _can_grow(parsed: ParsedJob, now: datetime | None, *, moving: bool = False) -> bool:
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


def _other(parsed: ParsedJob, accepted: StoredPlan, config: RenderConfig) -> StoredPlan | str:
    """Return the best plan for the cluster as it is now, or a text that says why no plan replaces ``accepted``.

    Pods that have stopped start only with a plan for the devices that are free now, even if it needs new nodes or its
    volume is not usable yet: other jobs may use the devices of ``accepted`` by now.
    """
    found, stopped = make_plan.decide(parsed, config), quiet(parsed.observed)
    if isinstance(found, Infeasible):
        return f"no other plan is possible: {found.field}: {found.message}"
    if found.new_nodes and not stopped:
        return "no other plan is possible on the existing nodes"
    if layout(found) == layout(accepted) and not found.new_nodes:
        only = f"; {one_node.why(parsed.one_node_claim)}" if parsed.one_node_claim else ""
        return f"{accepted.status.summary} is still the best plan{only}"
    assert parsed.spec is not None
    volume = volume_ready(parsed.observed, parsed.spec, found)
    if blocks(volume) and not stopped:
        return f"{found.status.summary} would be better, but {volume.message}"
    return found.model_copy(update={"replans": accepted.replans + 1, "resizes": (accepted.resizes or 0) + 1})


def _gain(parsed: ParsedJob, other: StoredPlan) -> tuple[Gain, int]:
    """Return what a job that trains gains by a move to the plan ``other``, and the number of its remaining steps.

    The gain consists of the seconds until the end of the training with the current plan and with ``other``. The latter
    include the restart.
    """
    accepted, report = parsed.accepted, parsed.report
    assert accepted is not None and report is not None and report.step_s is not None
    left = max(0, report.steps - report.step)
    now, then = accepted.plan.expected, other.plan.expected
    longer, longer_then = accepted.status.predicted.interrupted, other.status.predicted.interrupted
    # Predictions for the same device types are wrong in the same way. Those for others are wrong independently.
    same = {group.device for group in other.groups} <= {group.device for group in accepted.groups}
    found = gain(
        left,
        longer * report.step_s,
        # With fewer ranks than planned, the step time says nothing about the prediction.
        predicted_s=longer * (now.step_s if report.world_size >= len(accepted.plan.ranks) else report.step_s),
        other_s=longer_then * (then.step_s if same else then.step_p90_s),
        restart_s=rest.restart_s(parsed),
        lost_steps=rest.lost_steps(parsed, report),
    )
    return found, left


def _why(parsed: ParsedJob) -> str:
    """Return "; " and the reason of the move, to append to a message; '' if no reason is known.

    The reason comes from the message of Resizing, which was written when the operator decided to move the job.
    """
    before = find(parsed.before.conditions, CONDITION)
    _, found, why = before.message.partition("; ") if before is not None else ("", "", "")
    return f"; {why}" if found else ""
