"""Build the DLJobStatus of a job: conditions, progress, remaining time with its 90th percentile, measured times."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import isfinite, nan
from typing import Any

from pydantic import ValidationError

from dlcontract import AnalysisSummary, Report, RunPhase, TargetProgress, Upload
from dljob.api import (
    ClassScore,
    DLJobStatus,
    GroupStatus,
    LastCheckpoint,
    Measured,
    ModelScore,
    PlanStatus,
    Progress,
    Result,
    ResultAnalysis,
    ResultFinding,
    Startup,
    TargetStatus,
)
from dljob.api.status.suggestion import SuggestionStatus
from dljob.job.observed import JOB_LABEL, JobSeen, Observed
from dljob.job.plan.status import figures
from dljob.job.plan.stored import StoredPlan
from dljob.job.remaining import saved_step, steps_time
from dljob.scheduling import Interval
from dljob.status.comparison import WORSE_THAN_OTHER, comparison
from dljob.status.conditions import Verdict, is_true, merge, phase


def previous(job: JobSeen) -> DLJobStatus:
    """Return the status of a job as the API server has stored it, without invalid fields.

    Valid fields stay even if others are invalid. If the whole status were dropped, a job that has ended would start
    again.
    """
    return readable_status(job.status)


def readable_status(given: Mapping[str, Any]) -> DLJobStatus:
    """Return the status ``given`` as an object, without its unknown and invalid fields.

    A later release or an edit by hand may have written such fields. If one field is invalid inside, the whole field at
    the top of the status is left out. ``given``: the status of a DLJob as an API object.
    """
    status = dict(given.items())
    while True:
        try:
            return DLJobStatus.model_validate(status, extra="ignore")
        except ValidationError as error:
            invalid = {str(item["loc"][0]) for item in error.errors() if item["loc"]}
            if not invalid & status.keys():
                return DLJobStatus()
            status = {key: value for key, value in status.items() if key not in invalid}


def build(
    observed: Observed,
    before: DLJobStatus,
    verdicts: Sequence[Verdict],
    accepted: StoredPlan | None,
    report: Report | None,
    now: datetime,
    *,
    wanted: int = 0,
    start_timeouts: int | None = None,
    preemptions: int | None = None,
    plan_only: PlanStatus | None = None,
    suggestion: SuggestionStatus | None = None,
) -> DLJobStatus:
    """Return the status of a job after this reconcile.

    ``observed``: the job and its objects, as the operator sees them now. ``before``: the status before this reconcile.
    ``verdicts``: results of the checks in this reconcile, which become conditions. ``accepted``: the plan in force;
    None: the job has none. ``report``: last valid report of this job, possibly for an older plan. If it is None, the
    values of earlier reports do not change. ``wanted``: number of pods that should run now. ``start_timeouts``,
    ``preemptions``: new values of the status fields with these names; None: the fields do not change. ``plan_only``: a
    plan to show that must not run (``spec.planning.mode`` is PlanOnly); None in other modes. ``suggestion``: the choice
    for ``spec.task``; None: there is none.
    """
    job = observed.job
    conditions = merge(before.conditions, verdicts, job.generation, now)
    plan = plan_only or (accepted.status if accepted else before.plan)
    changes: dict[str, object] = {
        "observed_generation": job.generation,
        "conditions": conditions,
        "phase": phase(conditions),
        "plan": plan,
        "nodes": plan.nodes if plan else 0,
        "selector": f"{JOB_LABEL}={job.name}",
        "ready": f"{len(observed.ready_pods)}/{wanted}",
        "groups": _groups(observed, accepted, wanted),
        "suggestion": suggestion,
    }
    if plan is not None and before.plan is not None and plan.number != before.plan.number:
        changes["measured"] = None  # It was measured with the former plan.
    if observed.plan_record is not None:
        changes["plan_record"] = observed.plan_record
    if start_timeouts is not None:
        changes["start_timeouts"] = start_timeouts
    if preemptions is not None:
        changes["preemptions"] = preemptions
    if accepted is not None and accepted.failures is not None:
        changes["failures_ignored"] = accepted.failures.ignored or None
    # A start or end in the future comes from a clock that was wrong. It would delay deadlines and the time to live.
    if accepted is not None and (before.start_time is None or before.start_time > now):
        changes["start_time"] = _milliseconds(now)
    done = is_true(conditions, "Complete") or is_true(conditions, "Failed")
    if done and (before.completion_time is None or before.completion_time > now):
        changes["completion_time"] = now.replace(microsecond=0)
    current = before.model_copy(update=changes)
    record = accepted.failures if accepted is not None else None
    others = record.evictions + record.pod_kills if record is not None else 0
    if report is not None or others:
        changes = {"failures": (report.failures if report is not None else 0) + others}
        current = current.model_copy(update=changes)
    if report is not None:
        current = current.model_copy(update=_from_report(current, observed, accepted, report, done))
    elif done:
        current = current.model_copy(update={"eta": None, "remaining": None})
    return current


def _milliseconds(time: datetime) -> datetime:
    return time.replace(microsecond=time.microsecond // 1000 * 1000)


def time_of(unix_s: float) -> datetime:
    """Convert ``unix_s`` (seconds since 1970) to a time in UTC, rounded down to seconds and limited to the year 9999.

    The limit prevents errors, because the time may come from a report, and reports are untrusted.
    """
    return datetime.fromtimestamp(min(unix_s, 253402300799.0), UTC).replace(microsecond=0)


def _groups(observed: Observed, accepted: StoredPlan | None, wanted: int) -> tuple[GroupStatus, ...]:
    ready = Counter(pod.group for pod in observed.ready_pods)
    return tuple(
        GroupStatus(name=group.name, replicas=group.nodes if wanted else 0, ready=ready[group.name])
        for group in (accepted.groups if accepted else ())
    )


def _from_report(
    status: DLJobStatus, observed: Observed, accepted: StoredPlan | None, report: Report, done: bool
) -> dict[str, object]:
    changes: dict[str, object] = {
        "restarts": sum(report.restarts.values()),
        "restarts_by_cause": dict(sorted(report.restarts.items())),
        "eta": None,
        "remaining": None,
    }
    last = last_checkpoint(report, status.last_checkpoint)
    if report.steps > 0 or report.step > 0:
        # A checkpoint proves that training reached its step. The report may show a lower step if it is older than the
        # checkpoint, or if an attempt is just resuming from the checkpoint.
        step = max(report.step, saved_step(last))
        percent = None
        if report.steps > 0:  # A script may report its steps without their total number.
            step = min(step, report.steps)
            percent = 100 * step // report.steps
        changes["progress"] = Progress(
            step=step,
            steps=report.steps or None,
            epoch=report.epoch,
            percent=percent,
            display=f"step {step}" if percent is None else f"{percent}%",
            loss=_rounded(report.loss, 6),
            accuracy=_rounded(report.accuracy, 6),
            metrics={name: float(f"{value:.6g}") for name, value in sorted(report.metrics.items())} or None,
            steps_repeated=report.steps_repeated or None,
            bound_ranks=report.bound_ranks,
        )
    if report.target is not None and accepted is not None and accepted.plan.until is not None:
        changes["target"] = _target(report, report.target, accepted, done)
    if report.step_s and accepted is not None and report.plan_number == accepted.plan.number:
        changes["measured"] = _measured(report, accepted)
    changes["last_checkpoint"] = last
    if status.startup is None or status.startup.first_step_seconds is None:
        changes["startup"] = _startup(observed, status, report) or status.startup
    other_plan = accepted is not None and report.plan_number != accepted.plan.number
    if report.phase is RunPhase.RUNNING and report.step_s and report.steps > report.step and not (done or other_plan):
        expected = accepted.plan.expected if accepted is not None else None
        predicted = (expected.step_s, expected.step_p90_s) if expected is not None else (0.0, 0.0)
        step_s = report.step_s
        if accepted is not None:
            step_s = accepted.status.predicted.per_step_s(step_s, report.steps)
        left = steps_time(report.steps - report.step, step_s, *predicted)
        changes |= {"eta": time_of(report.unix_s + left.p50), "remaining": _remaining(left)}
    if report.outcome is not None and is_true(status.conditions, "Complete"):
        out = report.outcome
        analysis = None if out.analysis is None else _analysis(out.analysis)
        worse = any(each.name == WORSE_THAN_OTHER for each in out.findings)
        changes["result"] = Result(
            steps=out.steps,
            seconds=round(out.seconds, 3),
            loss=_rounded(out.loss, 6),
            accuracy=_rounded(out.accuracy, 6),
            checkpoint=out.checkpoint,
            report=out.report,
            analysis=analysis,
            comparison=comparison(analysis, worse, status.suggestion, observed.job.name),
            findings=tuple(ResultFinding(name=each.name, message=each.message) for each in out.findings) or None,
        )
    return changes


def last_checkpoint(report: Report, before: LastCheckpoint | None) -> LastCheckpoint | None:
    """Return the last complete checkpoint. None: there is none, such as in a bucket that someone has emptied.

    ``before``: the one in the job's status, which stays if ``report`` has none.
    """
    if report.uploads is not None:
        return None if report.uploads.last is None else _last_upload(report.uploads.last)
    mark = report.last_checkpoint
    if mark is None:
        return before
    return LastCheckpoint(
        step=mark.step,
        time=time_of(mark.unix_s),
        path=mark.path,
        bytes=mark.nbytes,
        write_seconds=_rounded(mark.duration_s, 3),
    )


def _last_upload(made: Upload) -> LastCheckpoint:
    return LastCheckpoint(
        step=made.step,
        time=time_of(made.unix_s),
        path=made.path,
        name=made.name,
        bytes=made.nbytes,
        write_seconds=_rounded(made.duration_s, 3),
    )


def _remaining(left: Interval) -> str:
    """Format the remaining time and its 90th percentile, such as 2h (<3h); the time alone if both look the same."""
    median, p90 = human_duration(left.p50), human_duration(left.p90)
    return f"{median} (<{p90})" if p90 != median else median


def _analysis(found: AnalysisSummary) -> ResultAnalysis:
    return ResultAnalysis(
        task=found.task,
        samples=found.samples,
        metric=found.metric,
        value=float(f"{found.value:.6g}"),
        baseline=None if found.baseline is None else float(f"{found.baseline:.6g}"),
        calibration_error=_rounded(found.calibration_error, 4),
        worst_classes=tuple(
            ClassScore(name=each.name, f1=round(each.f1, 4), samples=each.samples) for each in found.worst_classes
        )
        or None,
        other_models=tuple(ModelScore(name=each.name, value=float(f"{each.value:.6g}")) for each in found.other_models)
        or None,
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _measured(report: Report, accepted: StoredPlan) -> Measured:
    assert report.step_s
    predicted_s = accepted.status.predicted.step_seconds
    error = (predicted_s - report.step_s) / report.step_s if predicted_s else nan  # 0: nothing was predicted
    return Measured(
        step_seconds=round(report.step_s, 6),
        samples_per_second=round(report.samples_per_s or 0.0, 1),
        step_error=round(error, 4) if isfinite(error) else None,
        noise_scale=figures(report.noise.samples) if report.noise else None,
    )


def _target(report: Report, target: TargetProgress, accepted: StoredPlan, done: bool) -> TargetStatus:
    """Return the progress to the target of ``spec.until``: values of the metric, and the forecast in seconds.

    The forecast counts from the time of the report. It is left out if the report has no forecast or no step time, if
    the job has ended (``done``), or if the forecast's ``latest_step`` is beyond the last step of the training.
    """
    assert accepted.plan.until is not None
    metric = accepted.plan.until.metric
    found = TargetStatus(metric=metric, value=figures(target.value), best=figures(target.best))
    ahead = target.forecast
    last = report.steps or None
    if ahead is None or done or not report.step_s or (last is not None and ahead.latest_step > last):
        return found
    each_s = report.step_s if last is None else accepted.status.predicted.per_step_s(report.step_s, last)
    left = [
        figures(max(0, step - report.step) * each_s) for step in (ahead.step, ahead.earliest_step, ahead.latest_step)
    ]
    names = ("remaining_seconds", "remaining_seconds_earliest", "remaining_seconds_latest")
    return found.model_copy(update=dict(zip(names, left, strict=True)))


def _startup(observed: Observed, status: DLJobStatus, report: Report) -> Startup | None:
    """Return the seconds of each part of the start-up; None if the job has no start time (no accepted plan) yet.

    The wait for admission includes later waits, such as in a queue of Kueue or in a back-off (``waitedSeconds``), so
    that the other parts show what a restart costs. A part that has not ended yet is None. A negative value becomes 0.
    It can occur because clocks differ and Kubernetes rounds creation times to seconds.
    """
    marks, accepted_at = report.startup, status.start_time
    if accepted_at is None:
        return None
    created_s, accepted_s = observed.job.created.timestamp(), accepted_at.timestamp()
    waited_s = status.waited_seconds or 0.0

    def between(start_s: float | None, end_s: float | None) -> float | None:
        return None if start_s is None or end_s is None else round(max(0.0, end_s - start_s), 3)

    met = [mark for mark in (marks.rendezvous_unix_s, marks.imported_unix_s) if mark is not None]
    return Startup(
        admission_seconds=between(created_s, accepted_s + waited_s),
        pods_seconds=between(accepted_s + waited_s, marks.agents_up_unix_s),
        fetch_seconds=max((pod.fetched_s for pod in observed.pods if pod.fetched_s is not None), default=None),
        rendezvous_seconds=between(marks.agents_up_unix_s, marks.rendezvous_unix_s),
        import_seconds=between(marks.rendezvous_unix_s, marks.imported_unix_s),
        first_step_seconds=between(max(met, default=None), marks.first_step_unix_s),
        total_seconds=between(created_s, marks.first_step_unix_s),
    )


def human_duration(seconds: float) -> str:
    """Format a duration with its two largest units (d, h, m, s), such as 2h5m or 40s. The maximum is 999999 days."""
    left = timedelta(seconds=round(min(seconds, 86400.0 * 999_999)))
    hours, rest = divmod(left.seconds, 3600)
    minutes, rest_s = divmod(rest, 60)
    parts = [(left.days, "d"), (hours, "h"), (minutes, "m"), (rest_s, "s")]
    while len(parts) > 1 and parts[0][0] == 0:
        parts.pop(0)
    return "".join(f"{number}{unit}" for number, unit in parts[:2] if number) or "0s"
