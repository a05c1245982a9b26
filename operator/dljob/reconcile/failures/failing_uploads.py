"""Jobs whose script writes checkpoints that do not reach the object store.

The agents try again, and the ranks train on. One condition says since when nothing was uploaded, why, and what a
failure would lose now.
"""

from collections.abc import Iterator

from dlcontract import Upload, reasons
from dljob.reconcile.parsed import ParsedJob
from dljob.status import FALSE, TRUE, Verdict, find
from dljob.status.build import time_of

CONDITION = "CheckpointsUploaded"


def verdicts(parsed: ParsedJob) -> Iterator[Verdict]:
    """Yield the condition CheckpointsUploaded: False while nothing is uploaded, and True after that.

    A job whose uploads have always worked never gets it. ``status.lastCheckpoint`` shows its last upload. A problem
    that ends with the ranks, not with a commit, does not change the condition while nothing is committed.
    """
    uploads = parsed.report.uploads if parsed.report is not None else None
    if uploads is None:
        return
    problem = uploads.problem
    if problem is None:
        if uploads.last is not None and find(parsed.before.conditions, CONDITION) is not None:
            yield Verdict(CONDITION, TRUE, "Uploaded", f"uploads work again. {_resume(uploads.last)}")
        return
    reason = problem.reason if problem.reason in reasons.OF_UPLOADS else reasons.UPLOAD_FAILED
    yield Verdict(CONDITION, FALSE, reason, f"{problem.message.rstrip('. ')}. {_resume(uploads.last)}")


def _resume(last: Upload | None) -> str:
    """Return a sentence that says from where the ranks would resume after a failure."""
    if last is None:
        return "Nothing is committed: after a failure, the training starts from the beginning"
    step = "" if last.step is None else f" of step {last.step}"
    named = f"{last.name}{step}, " if last.name else ""
    return f"After a failure, the ranks resume from the last commit ({named}{time_of(last.unix_s):%Y-%m-%dT%H:%M:%SZ})"
