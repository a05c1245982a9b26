"""The condition DeadlineAtRisk: will a job that trains end before its deadline, by the 90th percentile?

The deadline is the earlier of ``spec.objective.deadline`` and ``spec.scheduling.finishBy``
(``planning.deadlines``). The predicted end follows from the remaining steps and the measured step time. True:
PredictedLate, DeadlinePassed, or DeadlineMissed after the end. False: OnTime, or DeadlineMet after the end. A job has
the condition from its first measured step time on. It keeps its last verdict while it waits, and after its end.

DeadlineFeasible, in contrast, also covers waiting jobs, only ``finishBy``, and the uncertainty of the prediction.
"""

from datetime import datetime, timedelta

from dljob.api import Condition, DLJobStatus
from dljob.reconcile.forecasts import steady
from dljob.reconcile.parsed import ParsedJob
from dljob.reconcile.planning.deadlines import deadline_of, waits
from dljob.reconcile.planning.rest import stay_p90_s
from dljob.status import FALSE, TRUE, Verdict, find, is_true
from dljob.status import UNKNOWN as NOT_KNOWN
from dljob.status.build import human_duration
from dljob.status.conditions import merge

CONDITION = "DeadlineAtRisk"
MIN_SLACK_PART = 0.05
"""Slack with which the condition becomes False again, as a fraction of the time to the deadline.

Without it, a job whose slack is about 0 would change the condition, and cause an event, with each report."""
_END = "the training ends by "
_GOES_ON = "the job continues, but no longer moves to other devices to meet this deadline"


def with_deadline_risk(parsed: ParsedJob, status: DLJobStatus, now: datetime) -> DLJobStatus:
    """Return ``status``, the new status of a job, with DeadlineAtRisk and the slack in ``forecast`` added."""
    if parsed.spec is None:
        return status  # The operator follows no spec, so it knows no deadline. The last verdict remains.
    if parsed.finished:
        return status  # The job has ended before. What its end meant for its deadline does not change any more.
    due, left_s = deadline_of(parsed.spec, status, now), stay_p90_s(parsed)
    if due is not None and waits(status) and status.completion_time is None:
        due = parsed.spec.scheduling.finish_by
        if due is None or due >= now:
            return status  # Its run time does not pass. The last verdict remains until it trains again.
    before = find(parsed.before.conditions, CONDITION)
    slack_s = (due - now).total_seconds() - left_s if due is not None and left_s is not None else None
    verdict = _verdict(status, before, due, left_s, now)
    if verdict is not None:
        conditions = merge(status.conditions, [verdict], parsed.observed.job.generation, now)
        status = status.model_copy(update={"conditions": conditions})
    if status.forecast is None or status.forecast == parsed.before.forecast:
        return status  # A forecast is renewed only together with another change of the status.
    shown = None if slack_s is None else float(round(slack_s))
    return status.model_copy(update={"forecast": status.forecast.model_copy(update={"deadline_slack_seconds": shown})})


def _verdict(
    status: DLJobStatus, before: Condition | None, due: datetime | None, left_s: float | None, now: datetime
) -> Verdict | None:
    """Return the condition DeadlineAtRisk; None if it does not change, or if the job never had it."""
    if due is None:
        found = before is not None and before.reason not in ("NoDeadline", "DeadlineMet", "DeadlineMissed")
        return Verdict(CONDITION, NOT_KNOWN, "NoDeadline", "the job has no deadline") if found else None
    text = f"the deadline is {_shown(due)}"
    ended = status.completion_time
    if is_true(status.conditions, "Complete") and ended is not None:
        kept = ended <= due
        reason = "DeadlineMet" if kept else "DeadlineMissed"
        return Verdict(CONDITION, FALSE if kept else TRUE, reason, f"{text}; the job ended at {_shown(ended)}")
    if is_true(status.conditions, "Failed"):
        return Verdict(CONDITION, TRUE, "DeadlineMissed", f"{text}; the job failed") if before is not None else None
    if before is None and left_s is None:
        return None
    if due < now:
        return Verdict(CONDITION, TRUE, "DeadlinePassed", f"{text}, which has passed; {_GOES_ON}")
    if left_s is None:
        return None  # Ranks restart, or the job waits: the last verdict remains until they train again.
    available_s = (due - now).total_seconds()
    end = now + timedelta(seconds=min(left_s, timedelta(days=36500).total_seconds()))
    was_late = before is not None and before.reason == "PredictedLate"
    slack_s = available_s - left_s
    late = slack_s < (MIN_SLACK_PART * available_s if was_late else 0.0)
    if before is not None and before.reason == ("PredictedLate" if late else "OnTime") and text in before.message:
        shown = _end_in(before)
        if shown is not None and steady(shown, end, now) == shown:
            return Verdict(CONDITION, before.status, before.reason, before.message)
    progress = status.progress
    steps = f"{progress.steps - progress.step} steps remain, and " if progress is not None and progress.steps else ""
    text = f"{text}; {steps}{_END}{_shown(end)} (p90), "
    if late:
        how = (
            f"{human_duration(-slack_s)} too late" if slack_s < 0 else f"with a slack of only {human_duration(slack_s)}"
        )
        remedy = "Allow more or other nodes, or set a later deadline"
        return Verdict(CONDITION, TRUE, "PredictedLate", f"{text}{how}. {remedy}")
    return Verdict(CONDITION, FALSE, "OnTime", f"{text}with a slack of {human_duration(slack_s)}")


def _end_in(condition: Condition) -> datetime | None:
    """Return the predicted end that the condition's message shows; None if it shows none."""
    try:
        return datetime.fromisoformat(condition.message.partition(_END)[2].partition(" ")[0])
    except ValueError:
        return None


def _shown(time: datetime) -> str:
    return time.replace(microsecond=0).isoformat().replace("+00:00", "Z")
