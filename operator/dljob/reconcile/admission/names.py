"""Jobs whose objects would have the names of objects of other owners, or of an earlier job of the same name."""

from dljob.job.observed import Observed
from dljob.job.waiting import earlier_job_text
from dljob.reconcile.desired import Draft
from dljob.reconcile.parsed import ParsedJob
from dljob.status import FALSE, Verdict

RECHECK_S = 1.0
"""Seconds after which a job is reconciled again that waits for its names."""


def taken(observed: Observed) -> bool:
    """Return True if a job waits until its names are free. Its plan would only reserve devices meanwhile."""
    return bool(_in_the_way(observed, (*observed.leftovers, *observed.being_deleted)))


def wait(parsed: ParsedJob, draft: Draft) -> bool:
    """Return True if a job waits until its names are free, and add the condition PodsReady that says so.

    The objects of an earlier job of the same name go by themselves, because Kubernetes deletes the objects of a deleted
    owner. A user has to remove those of other owners.
    """
    observed = parsed.observed
    if found := _in_the_way(observed, observed.leftovers):
        text = (
            f"metadata.name: found {', '.join(found)} with another owner; expected no other owner of "
            "the objects that have the names of this job's objects. The job waits until the other owner's objects are "
            "gone: delete these objects, or choose another job name"
        )
        draft.verdicts.append(Verdict("PodsReady", FALSE, "NamesTaken", text))
    elif found := _in_the_way(observed, observed.being_deleted):
        draft.verdicts.append(Verdict("PodsReady", FALSE, "WaitingForDeletion", earlier_job_text(", ".join(found))))
    if found:
        draft.requeue_in(RECHECK_S)
    return bool(found)


def _in_the_way(observed: Observed, objects: tuple[str, ...]) -> list[str]:
    """Return those of the objects that a job waits for: StatefulSets only if it has none of its own."""
    return [each for each in objects if not (observed.sets and each.startswith("StatefulSet "))]
