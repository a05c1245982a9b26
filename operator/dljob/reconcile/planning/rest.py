"""The rest of a running job's training: its remaining steps, the time to its deadline, and what a move would change."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from math import inf

from dlcontract import Report, RunPhase
from dljob.api import DLJobSpec, Minimize, PlanStatus, duration_s
from dljob.job.defaults import energy_of
from dljob.job.plan.request import total_steps
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import saved_step, start_s, steps_since
from dljob.planner.types.texts import duration, plain
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning.deadlines import MAX_DEADLINE_S, deadlines, next_deadline
from dljob.scheduling import Move, Rest, move_reason, pace_deadline_s, rest_after_move, rest_with_measured
from dljob.status import is_true
from dljob.status.build import last_checkpoint

START_UP_S = 20.0
"""Seconds that a change of the plan is assumed to take if the job's own start-up time was not measured."""
UNITS = {Minimize.ENERGY: "J", Minimize.COST: "US dollars", Minimize.CARBON: "g CO2"}


def with_pace(parsed: ParsedJob, now: datetime) -> ParsedJob:
    """Return the job with ``pace_s``: the deadline for its next plan, from its remaining steps and remaining time.

    It is infinite once the last deadline has passed: the job then goes on with the least energy, cost or carbon. Jobs
    that minimize time get none, because their plan does not depend on it. Jobs on a site whose carbon intensity depends
    on the hour of the day also get this hour.
    """
    if len(energy_of(parsed.defaults).carbon.g_per_kwh) > 1:
        parsed = replace(parsed, begin_hour=now.astimezone(UTC).hour)
    spec, before = parsed.spec, parsed.before
    if spec is None or spec.missing or spec.objective.minimize is Minimize.TIME or parsed.finished:
        return parsed
    if not any(deadlines(spec, before, now)):
        return parsed
    due = next_deadline(spec, before, now)
    if spec.objective.deadline is not None and before.start_time is None:  # It counts from now.
        begun = now + timedelta(seconds=min(duration_s(spec.objective.deadline), MAX_DEADLINE_S))
        due = begun if due is None else min(due, begun)
    if due is None:
        return replace(parsed, pace_s=inf)
    left, total = _steps(parsed, spec)
    available_s = (due - now).total_seconds()
    report = running_report(parsed)
    if report is None:
        return replace(parsed, pace_s=pace_deadline_s(total, left, available_s))
    restart, lost = restart_s(parsed), lost_steps(parsed, report)
    return replace(parsed, pace_s=pace_deadline_s(total, left, available_s, restart, lost, _slower(parsed, report)))


def running_report(parsed: ParsedJob) -> Report | None:
    """Return the job's report if it describes a training with the job's plan that goes on; otherwise None."""
    report, accepted = parsed.report, parsed.accepted
    if report is None or accepted is None or report.plan_number != accepted.plan.number:
        return None
    return report if report.phase is RunPhase.RUNNING and report.steps and report.step_s else None


def late(parsed: ParsedJob, now: datetime) -> bool:
    """Return True if a job that trains will miss its next deadline with its present plan, by the 90th percentile."""
    due = next_deadline(parsed.spec, parsed.before, now) if parsed.spec is not None else None
    report = running_report(parsed)
    if due is None or report is None or parsed.accepted is None:
        return False
    return _stay(parsed, parsed.accepted, report).p90_s > (due - now).total_seconds()


def judge(parsed: ParsedJob, other: StoredPlan, now: datetime) -> tuple[Move | None, str]:
    """Return (reason why the job should move to ``other``; None: it should stay, text that compares the two plans).

    The job trains and minimizes energy or cost. The text is a part of a condition's message.
    """
    accepted, report, spec = parsed.accepted, running_report(parsed), parsed.spec
    assert accepted is not None and report is not None and spec is not None
    due = next_deadline(spec, parsed.before, now)
    available_s = None if due is None else (due - now).total_seconds()
    then, left = other.plan.expected, max(0, report.steps - report.step)
    predicted = other.status.predicted
    same = bool({group.device for group in other.groups} & {group.device for group in accepted.groups})
    stay = _stay(parsed, accepted, report)
    moved = rest_after_move(
        # Without checkpoints, step 0 follows.
        left if accepted.plan.checkpoint.enabled else report.steps,
        lost_steps(parsed, report) if accepted.plan.checkpoint.enabled else 0,
        predicted.per_step_s(then.step_s, report.steps),
        predicted.per_step_s(then.step_p90_s, report.steps),
        restart_s(parsed),
        _per_s(other.status, spec.objective.minimize),
        _slower(parsed, report) if same else 1.0,
    )
    if spec.objective.minimize is Minimize.CARBON:
        stay, moved = (_in_grams(parsed, rest, now) for rest in (stay, moved))
    unit = UNITS.get(spec.objective.minimize, "s")

    def text_of(found: Rest) -> str:
        return f"{duration(found.p50_s)} (<{duration(found.p90_s)}) and {plain(found.expense)} {unit}"

    text = (
        f"the remaining {left} steps take {text_of(stay)} with this plan, and {text_of(moved)} with the other, "
        "including the restart"
    )
    if available_s is not None:
        text += f"; {duration(available_s)} are left to the deadline"
    return move_reason(stay, moved, available_s), text


def restart_s(parsed: ParsedJob) -> float:
    """Estimate the seconds that a restart with another plan takes, until the ranks train again.

    The estimate is the duration of the job's start, as the status shows it, without the wait for admission, and at
    least ``START_UP_S``. If the start was not measured, it is ``START_UP_S``.
    """
    return max(START_UP_S, start_s(parsed.before) or 0.0)


def lost_steps(parsed: ParsedJob, report: Report) -> int:
    """Return the number of steps since the last checkpoint, which a restart may have to repeat.

    Pods also write a checkpoint as they stop, but this can fail.
    """
    saved = last_checkpoint(report, parsed.before.last_checkpoint)
    return round(steps_since(saved, report.step, report.unix_s, report.step_s or 0.0))


def stay_p90_s(parsed: ParsedJob) -> float | None:
    """Return the 90th percentile of the remaining seconds of a job that trains; None if it does not train."""
    report = running_report(parsed)
    if report is None or parsed.accepted is None:
        return None
    return _stay(parsed, parsed.accepted, report).p90_s


def _stay(parsed: ParsedJob, accepted: StoredPlan, report: Report) -> Rest:
    assert report.step_s is not None and parsed.spec is not None
    expected = accepted.plan.expected
    spread = expected.step_p90_s / expected.step_s if expected.step_s > 0 else 1.0
    per_s = _per_s(accepted.status, parsed.spec.objective.minimize)
    step_s = accepted.status.predicted.per_step_s(report.step_s, report.steps)
    return rest_with_measured(max(0, report.steps - report.step), step_s, spread, per_s)


def _slower(parsed: ParsedJob, report: Report) -> float:
    """Return the measured step time divided by the predicted one, at least 1, as other plans must expect it.

    It is 1 if profiles have learned from this plan's measurements, because predictions then contain the deviation, and
    if fewer ranks run than planned, because the measurement then says nothing about the prediction.
    """
    assert parsed.accepted is not None and report.step_s is not None
    predicted_s = parsed.accepted.plan.expected.step_s
    fewer = report.world_size < len(parsed.accepted.plan.ranks)
    if is_true(parsed.before.conditions, "PlanContradicted") or fewer or predicted_s <= 0:
        return 1.0
    return max(1.0, report.step_s / predicted_s)


def _in_grams(parsed: ParsedJob, rest: Rest, now: datetime) -> Rest:
    """Return the rest of a training with its energy (J) converted to grams of CO2, by the hours in which it runs."""
    utc = now.astimezone(UTC)
    begin_s = (utc - utc.replace(hour=0, minute=0, second=0, microsecond=0)).total_seconds()
    carbon = energy_of(parsed.defaults).carbon
    return replace(rest, expense=carbon.grams(rest.expense, begin_s, rest.p50_s))


def _per_s(plan: PlanStatus, minimize: Minimize) -> float:
    """Return the predicted expense of a plan per second (W or US dollars/s); 1 if the job minimizes time.

    If it minimizes carbon, return the power, because the carbon depends on the hours of the rest (``_in_grams``).
    """
    found = plan.predicted
    if minimize is Minimize.TIME or found.total_seconds <= 0:
        return 1.0
    minimize = Minimize.ENERGY if minimize is Minimize.CARBON else minimize
    return (found.expense(minimize) or 0.0) / found.total_seconds


def _steps(parsed: ParsedJob, spec: DLJobSpec) -> tuple[int, int]:
    """Return (remaining steps, steps of the whole training). Steps since the last checkpoint count if the job trains.

    For a job that has not reported its number of steps, both are the number of steps in the spec.
    """
    report, done, saved = running_report(parsed), parsed.before.progress, parsed.before.last_checkpoint
    if report is not None:
        return max(0, report.steps - report.step), report.steps
    if done is None or not done.steps:
        total = total_steps(spec)
        return total, total
    return max(0, done.steps - saved_step(saved)), done.steps
