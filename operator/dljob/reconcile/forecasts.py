"""Forecasts in the status: the start of a job that waits, and the end and the cost of a stop of a job that runs.

The condition DeadlineFeasible says whether a job with ``spec.scheduling.finishBy`` ends in time, according to the 90th
percentile of the prediction. True: InTime, or DeadlineMet after the end. False: TooLate, DeadlinePassed, or
DeadlineMissed after the end. Unknown: NoForecast, or NoDeadline if the user has removed ``finishBy``.

Predictions change all the time, and each write of a status is a request to the API server. The status therefore keeps
a predicted time while new predictions are close to it. A new forecast of a running job is written only together with
another change of the status.
"""

from datetime import datetime, timedelta

from dljob.api import Condition, DLJobStatus, ForecastSize, PlanStatus, QueueStatus, RunForecast
from dljob.job.observed import Outlook
from dljob.job.plan.status import figures
from dljob.job.remaining import lost_s, remaining, start_s
from dljob.planner.types.texts import time_text
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning.deadlines import deadlines, waits
from dljob.reconcile.planning.rest import START_UP_S
from dljob.scheduling import UNKNOWN
from dljob.status import FALSE, TRUE, Verdict, find, is_true
from dljob.status import UNKNOWN as NOT_KNOWN
from dljob.status.build import human_duration
from dljob.status.conditions import merge

CONDITION = "DeadlineFeasible"
STEADY_S, STEADY_SHARE = 60.0, 0.1
"""The status keeps a predicted time while the new prediction differs by at most ``STEADY_S`` seconds, or by at most
``STEADY_SHARE`` of the time from now to the new prediction.
"""
MIN_SLACK_SHARE = 0.05
"""Minimum slack with which DeadlineFeasible becomes True again, as a fraction of the time from now to the deadline.

The slack is the time from the predicted end (90th percentile) to the deadline."""
MAX_SIZES = 8
_NO_FORECAST = (
    "the end of the job cannot be predicted yet, because the job has no plan, or because the remaining time of a "
    "running job is unknown"
)


def with_forecasts(parsed: ParsedJob, status: DLJobStatus, now: datetime) -> DLJobStatus:
    """Return ``status``, the new status of a job, with predicted times and the condition DeadlineFeasible added.

    A waiting job gets its predicted start and end, and a job that holds devices gets its predicted remaining time. To
    avoid writes of the status, the result keeps a previous start or end that is close to the new one. It keeps the
    previous remaining time if no other field of the status except ``conditions`` changes.
    """
    before = parsed.before
    queue = _queue(before.queue, parsed.observed.place, parsed.observed.outlook, now)
    admitted = find(status.conditions, "Admitted")
    if queue is None and parsed.decision is None and admitted is not None and admitted.reason == "NoPlan":
        queue = before.queue  # The job is being planned again. It shows its place meanwhile.
    found = _run_forecast(status, now)
    if found is not None and before.forecast is not None:
        same = {"forecast": before.forecast, "queue": before.queue}
        if status.model_copy(update=same) == before.model_copy(update={"conditions": status.conditions}):
            found = before.forecast
    verdict = _deadline(parsed, status, queue, now)
    conditions = status.conditions
    if verdict is not None:
        conditions = merge(conditions, [verdict], parsed.observed.job.generation, now)
    return status.model_copy(update={"queue": queue, "forecast": found, "conditions": conditions})


def deadline_in_s(parsed: ParsedJob, now: datetime) -> float | None:
    """Return the seconds until DeadlineFeasible or DeadlineAtRisk must be updated, because a deadline passes.

    Return None if the job has ended, has no deadline, or if its deadlines have passed already.
    """
    if parsed.spec is None or parsed.finished:
        return None
    # The run time of a job that waits does not pass, and its deadline moves on.
    times = [] if waits(parsed.before) else [*deadlines(parsed.spec, parsed.before, now)]
    finish_by = parsed.spec.scheduling.finish_by
    times += [finish_by] if finish_by is not None else []
    return min(((at - now).total_seconds() + 1.0 for at in times if at >= now), default=None)


def steady(shown: datetime | None, found: datetime | None, now: datetime) -> datetime | None:
    """Return the predicted time to show in the status, so that it does not change with each small new prediction.

    ``shown``: time that the status shows now. ``found``: new prediction. Return ``shown`` if it is not in the past, and
    if the two differ by at most ``STEADY_S`` seconds or by at most ``STEADY_SHARE`` of the time from ``now`` to
    ``found``. Otherwise return ``found`` in whole seconds, or None if it is None. What is late is predicted anew
    all the time, and never in the past: if ``shown`` has just passed or ``found`` is in the past, return a full minute.
    """
    if shown is None or found is None:
        return found if found is None else _next_minute(now) if found < now else _whole_s(found)
    off_s, left_s = abs((found - shown).total_seconds()), (found - now).total_seconds()
    if shown >= now and off_s <= max(STEADY_S, STEADY_SHARE * left_s):
        return shown
    if found < now or (shown < now and off_s <= STEADY_S):
        return _next_minute(max(found, now))
    return _whole_s(found)


def queue_text(queue: QueueStatus | None) -> str:
    """Return the text about the predicted start for the condition Admitted; empty if no start is predicted."""
    if queue is None or queue.forecast_start is None:
        return ""
    latest = f", at the latest {_shown(queue.latest_start)} (p90)" if queue.latest_start is not None else ""
    return f"; the job is predicted to start at {_shown(queue.forecast_start)}{latest}"


def place_of(parsed: ParsedJob, now: datetime) -> QueueStatus | None:
    """Return the queue position and the predicted start of a waiting job, as its status shows them.

    Return None if the job has no position in the queue.
    """
    return _queue(parsed.before.queue, parsed.observed.place, parsed.observed.outlook, now)


def _queue(
    shown: QueueStatus | None, place: tuple[int, int] | None, outlook: Outlook | None, now: datetime
) -> QueueStatus | None:
    if place is None:
        return None
    old = shown or QueueStatus(position=place[0], jobs=place[1])
    if outlook is None:  # The operator has just started, and has not made it yet.
        return old.model_copy(update={"position": place[0], "jobs": place[1]})
    found = outlook
    return QueueStatus(
        position=place[0],
        jobs=place[1],
        earliest_start=steady(old.earliest_start, found.earliest, now),
        forecast_start=steady(old.forecast_start, found.start, now),
        latest_start=steady(old.latest_start, found.latest, now),
        latest_finish=steady(old.latest_finish, found.finish_p90, now),
    )


def _run_forecast(status: DLJobStatus, now: datetime) -> RunForecast | None:
    """Return the forecast of a job that holds devices: its remaining time, and what stopping it now would cost.

    Return None for any other job, or if the remaining time is unknown.
    """
    left, plan = remaining(status), status.plan
    if left is UNKNOWN or plan is None or _over(status) or not is_true(status.conditions, "Admitted"):
        return None
    return RunForecast(
        time=now.replace(microsecond=0),
        remaining_seconds=figures(left.p50),
        remaining_seconds_p10=figures(left.p10),
        remaining_seconds_p90=figures(left.p90),
        # Not the time since the checkpoint was written: the job may have waited since.
        unsaved_seconds=float(round(lost_s(status, now))),
        restart_seconds=figures(start_s(status) or START_UP_S),
        sizes=_sizes(plan),
    )


def _sizes(plan: PlanStatus) -> tuple[ForecastSize, ...]:
    """Return the predicted seconds of a whole training with each number of nodes, the fastest first.

    For each number, these are the seconds of the fastest plan that the planner considered. The result has at most
    ``MAX_SIZES`` entries.
    """
    best: dict[int, float] = {plan.nodes: plan.predicted.total_seconds}
    for candidate in (*plan.candidates, *plan.trade_offs):
        if candidate.nodes is not None and not candidate.chosen:
            total_s = candidate.predicted.total_seconds
            best[candidate.nodes] = min(total_s, best.get(candidate.nodes, total_s))
    ranked = sorted(best.items(), key=lambda item: (item[1], item[0]))[:MAX_SIZES]
    return tuple(ForecastSize(nodes=nodes, total_seconds=total_s) for nodes, total_s in ranked)


def _deadline(parsed: ParsedJob, status: DLJobStatus, queue: QueueStatus | None, now: datetime) -> Verdict | None:
    """Return the condition DeadlineFeasible; None for a job that never had a deadline."""
    if parsed.finished:
        return None  # The job has ended before. What its end meant for its deadline does not change any more.
    before = find(parsed.before.conditions, CONDITION)
    finish_by = parsed.spec.scheduling.finish_by if parsed.spec is not None else None
    if finish_by is None:
        if before is None or (parsed.spec is None and not _over(status)):
            return None
        return Verdict(CONDITION, NOT_KNOWN, "NoDeadline", "spec.scheduling.finishBy is not set")
    due = f"spec.scheduling.finishBy: found {_shown(finish_by)}"
    if _over(status):
        return _after_end(status, finish_by, due)
    if finish_by < now:
        text = (
            f"{due}, which has passed; expected a later time. The job continues, but this deadline no longer gives it "
            "precedence in the queue"
        )
        return Verdict(CONDITION, FALSE, "DeadlinePassed", text)
    finish = _finish_p90(status, parsed.observed.outlook, queue, now)
    if finish is None or parsed.spec is None or parsed.spec.suspend:
        return Verdict(CONDITION, NOT_KNOWN, "NoForecast", f"{due}; {_NO_FORECAST}")
    slack_s = (finish_by - finish).total_seconds()
    was_late = before is not None and before.reason == "TooLate"
    late = slack_s < (MIN_SLACK_SHARE * (finish_by - now).total_seconds() if was_late else 0.0)
    if before is not None and before.reason == ("TooLate" if late else "InTime") and due in before.message:
        text = before.message
        if (shown := _in_text(before)) is not None and steady(shown, finish, now) == shown:
            return Verdict(CONDITION, before.status, before.reason, text)
    ends = f"the job is predicted to end at the latest at {_shown(finish)} (p90)"
    if late:
        expected = f"{_shown(finish)} or later" if slack_s < 0 else "a later time"
        how = "after this deadline" if slack_s < 0 else "before this deadline, which is too close"
        text = (
            f"{due}; expected {expected}, because {ends}, {human_duration(abs(slack_s))} {how}. Allow more or other "
            "nodes, raise the priority of the job, or set a later time"
        )
        return Verdict(CONDITION, FALSE, "TooLate", text)
    return Verdict(CONDITION, TRUE, "InTime", f"{due}; {ends}, with a slack of {human_duration(slack_s)}")


def _after_end(status: DLJobStatus, finish_by: datetime, due: str) -> Verdict:
    ended = status.completion_time
    if is_true(status.conditions, "Complete") and ended is not None and ended <= finish_by:
        return Verdict(CONDITION, TRUE, "DeadlineMet", f"{due}; the job ended at {_shown(ended)}")
    how = f"ended at {_shown(ended)}" if is_true(status.conditions, "Complete") and ended is not None else "failed"
    return Verdict(CONDITION, FALSE, "DeadlineMissed", f"{due}; the job {how}")


def _finish_p90(
    status: DLJobStatus, outlook: Outlook | None, queue: QueueStatus | None, now: datetime
) -> datetime | None:
    """Return the time before which a job that runs or waits ends with a probability of 90 %; None if it is unknown.

    ``outlook``: new forecast of the start and end of a waiting job. ``queue``: queue position and forecast for the
    status. If both are None, the time is computed from the remaining time of a job that holds devices.
    """
    if outlook is not None:
        return outlook.finish_p90
    if queue is not None:
        return queue.latest_finish
    left = remaining(status)
    if not is_true(status.conditions, "Admitted") or left is UNKNOWN:
        return None
    return now + timedelta(seconds=min(left.p90, timedelta(days=36500).total_seconds()))


def _in_text(condition: Condition) -> datetime | None:
    """Return the predicted end that the message of the condition DeadlineFeasible shows; None if it shows no end."""
    found = condition.message.partition("at the latest at ")[2].partition(" ")[0]
    try:
        return datetime.fromisoformat(found)
    except ValueError:
        return None


def _over(status: DLJobStatus) -> bool:
    return is_true(status.conditions, "Complete") or is_true(status.conditions, "Failed")


def _whole_s(time: datetime) -> datetime:
    return time.replace(microsecond=0)


def _next_minute(time: datetime) -> datetime:
    return time.replace(second=0, microsecond=0) + timedelta(minutes=1)


def _shown(time: datetime | None) -> str:
    return "" if time is None else time_text(time)
