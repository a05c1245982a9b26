"""Move a running job to another plan: decide, explain the decision in the condition Resizing, and replace the plan."""

from datetime import datetime, timedelta

from dljob.api import Minimize
from dljob.job.plan.stored import StoredPlan
from dljob.planner import Infeasible
from dljob.planner.types.texts import duration, time_text
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning import make_plan, rest
from dljob.reconcile.planning.replan import layout
from dljob.reconcile.planning.resize.permission import (
    CONDITION,
    has_decided_to_move,
    is_moving,
    lets_move,
    may_restart,
    stranded,
    undecided,
    without_node,
)
from dljob.reconcile.rollout import quiet
from dljob.reconcile.volume import blocked, blocks, volume_ready
from dljob.render import RenderConfig
from dljob.scheduling import MIN_LEFT_S, Gain, Move, gain
from dljob.scheduling.gain import MIN_BETWEEN_S
from dljob.status import FALSE, TRUE, Verdict, find


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
        if lets_move(parsed) and is_moving(parsed):
            text += f". It can move again at {time_text(now + timedelta(seconds=MIN_BETWEEN_S))}"
        draft.verdicts.append(Verdict(CONDITION, FALSE, "Resized", text))
        return other
    if stranded(parsed, now):
        draft.verdicts.append(Verdict(CONDITION, TRUE, "NodesGone", f"{change}; {without_node(parsed)}"))
        return other
    before, stops = find(parsed.before.conditions, CONDITION), not any(item.replicas for item in observed.sets)
    if before is not None and has_decided_to_move(parsed) and (stops or before.reason == "NodesGone"):
        draft.verdicts.append(Verdict(CONDITION, TRUE, before.reason, before.message))
        return other
    if not may_restart(parsed, now, moving=True):
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
        return other if has_decided_to_move(parsed) else None
    found, left = _gain(parsed, other)
    times = (
        f"the remaining {left} steps take {duration(found.stay_s)} with this plan, "
        f"and {duration(found.move_s)} with the other plan, including the restart"
    )
    room, decided = parsed.observed.room_for, has_decided_to_move(parsed)
    if found.worthwhile:
        text = f"{change}; {times}: {duration(found.seconds)} sooner"
        draft.verdicts.append(Verdict(CONDITION, TRUE, "BetterPlan", text))
    elif room is not None and found.stay_s >= MIN_LEFT_S:
        text = (
            f"{change}; what it releases speeds up {room} more; {times}. It can take devices back after "
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
    if is_moving(parsed):
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
    if is_moving(parsed):
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
        only = "".join(f"; {text}" for text in parsed.limits)
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
    present, changed, steps = accepted.status.predicted, other.status.predicted, report.steps
    # Predictions for the same device types are wrong in the same way. Those for others are wrong independently.
    same = {group.device for group in other.groups} <= {group.device for group in accepted.groups}
    found = gain(
        left,
        present.per_step_s(report.step_s, steps),
        # With fewer ranks than planned, the step time says nothing about the prediction.
        predicted_s=present.per_step_s(
            now.step_s if report.world_size >= len(accepted.plan.ranks) else report.step_s, steps
        ),
        other_s=changed.per_step_s(then.step_s if same else then.step_p90_s, steps),
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
