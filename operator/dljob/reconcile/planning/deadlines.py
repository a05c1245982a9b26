"""The deadlines of a job: a run time (``spec.objective.deadline``) and a time (``spec.scheduling.finishBy``).

The run time begins when the operator first accepts a plan (``status.startTime``). It does not pass while the job is not
admitted, because it is suspended or preempted or waits for devices. ``status.waitedSeconds`` stores how long that was.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from dljob.api import DLJobSpec, DLJobStatus, duration_s
from dljob.status import FALSE, TRUE, find

_ADMITTED = "Admitted"
MAX_DEADLINE_S = timedelta(days=36500).total_seconds()
"""Longest run time that is added to a time. Longer ones would exceed the latest time that datetime supports."""


def deadlines(spec: DLJobSpec, status: DLJobStatus, now: datetime) -> Iterator[datetime]:
    """Yield the times by which a job should end: none, one or two.

    They are ``scheduling.finishBy``, and the end of the run time in ``objective.deadline``. The latter moves on while
    the job waits.
    """
    if spec.scheduling.finish_by is not None:
        yield spec.scheduling.finish_by
    if spec.objective.deadline is not None and status.start_time is not None:
        waited_s = (status.waited_seconds or 0.0) + _waits_s(status, now)
        yield status.start_time + timedelta(seconds=min(duration_s(spec.objective.deadline) + waited_s, MAX_DEADLINE_S))


def deadline_of(spec: DLJobSpec, status: DLJobStatus, now: datetime) -> datetime | None:
    """Return the time by which a job should end: the earlier of its two deadlines; None if it has none yet."""
    return min(deadlines(spec, status, now), default=None)


def next_deadline(spec: DLJobSpec, status: DLJobStatus, now: datetime) -> datetime | None:
    """Return the earlier of the deadlines that have not passed yet; None if there is none."""
    return min((due for due in deadlines(spec, status, now) if due > now), default=None)


def waits(status: DLJobStatus) -> bool:
    """Return True if a job with this status has started before and is not admitted now."""
    admitted = find(status.conditions, _ADMITTED)
    return status.start_time is not None and admitted is not None and admitted.status is FALSE


def with_waited(before: DLJobStatus, status: DLJobStatus, now: datetime) -> DLJobStatus:
    """Return ``status``, the new status of a job. If it is admitted again, add its wait to ``waitedSeconds``.

    ``before``: the status before this reconcile.
    """
    admitted, waited_s = find(status.conditions, _ADMITTED), _waits_s(before, now)
    if admitted is None or admitted.status is not TRUE or waited_s <= 0:
        return status
    return status.model_copy(update={"waited_seconds": round((before.waited_seconds or 0.0) + waited_s, 3)})


def _waits_s(status: DLJobStatus, now: datetime) -> float:
    """Return the seconds since a job that started before was last admitted; 0 if it is admitted or never started."""
    admitted = find(status.conditions, _ADMITTED)
    if status.start_time is None or admitted is None or not waits(status):
        return 0.0
    return max(0.0, (now - max(status.start_time, admitted.last_transition_time)).total_seconds())
