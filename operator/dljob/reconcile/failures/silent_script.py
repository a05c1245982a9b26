"""Jobs whose script for torchrun or MPI runs and reports no progress.

Such a script is supported, but nobody counts its steps. One condition says what the job lacks, and how to get it.
"""

from collections.abc import Iterator
from datetime import datetime

from dlcontract import Report
from dljob.job.plan.stored import StoredPlan
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.status import FALSE, TRUE, Verdict, changed_at, find
from dljob.status.build import human_duration

CONDITION = "ProgressReported"
SILENT_S = 300.0
"""Seconds for which the ranks run before the condition says that the script reports nothing. Chosen, not measured: some
scripts load a model or compile it for minutes before their first step. The condition stops nothing."""
_TEXT = (
    f"spec.trainer.command: found a script that has run for {human_duration(SILENT_S)} without a call of "
    "dltrain.report; expected one after each step. Without it, the job shows no progress and no remaining time, and "
    "ranks that hang are not restarted. Call dltrain.report(step=step, steps=steps), or add a callback of "
    "dltrain.integrations for Hugging Face, Lightning or Accelerate"
)


def verdicts(parsed: ParsedJob, draft: Draft, accepted: StoredPlan | None, now: datetime) -> Iterator[Verdict]:
    """Yield the condition ProgressReported: False while ranks run and report nothing, and True after the first report.

    A job gets it when its ranks have run for ``SILENT_S`` without a report. Jobs whose scripts report earlier never get
    it. If that time has not passed yet, requeue the job for its end.
    """
    report, before = parsed.report, parsed.before.conditions
    if accepted is None or report is None or accepted.plan.model.framework == "DLTrain":
        return
    if _reports(report):
        if find(before, CONDITION) is not None:
            yield Verdict(CONDITION, TRUE, "Reported", "the script reports its progress")
        return
    running = next((verdict for verdict in reversed(draft.verdicts) if verdict.type == "Running"), None)
    if running is None or running.status is not TRUE:
        return
    was = find(before, "Running")
    since = changed_at(was, now) if was is not None and was.status is TRUE else now
    left_s = SILENT_S - (now - since).total_seconds()
    if left_s > 0:
        draft.requeue_in(left_s)
    else:
        yield Verdict(CONDITION, FALSE, "NoReports", _TEXT)


def _reports(report: Report) -> bool:
    """Return True if a script has reported at least once, also if it was under an earlier plan.

    The report of a coordinator has a step time from the first report of a script on, which is 0 while it is unknown.
    """
    return report.step > 0 or report.step_s is not None
