"""Kubernetes events about changes of a job's conditions."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dljob.api import Condition
from dljob.status.conditions import FALSE, TRUE, find

_BAD_WHEN_TRUE = {
    "Failed", "DeviceMismatch", "WorldSizeRefused", "PlanContradicted", "PlanEdited", "NodeFaulty", "StorageExceeded",
    "MemoryExceeded", "DeadlineAtRisk",
}  # fmt: skip
_QUIET = {
    "Starting", "NotStarted", "Stopping", "Stopped", "Finished", "Suspending", "NotSuspended", "Binding",
    "FetchingDataset", "NoPlan", "Suspended", "WorkloadAbsent", "NotWorthwhile", "Preempting",
    "NoForecast", "NoDeadline", "Looking", "LookDelayed",
}  # fmt: skip
"""Reasons of conditions that cause no event if the condition is not True.

They only say that something has not started yet or is over.
"""
_QUIET_WHEN_TRUE = {
    "Accepted", "NotNeeded", "Starting", "Started", "PodEvicted", "InQueue", "PriorityClassFound", "WithinQuota",
    "Reported",
}  # fmt: skip
_NORMAL_WHEN_FALSE = {
    "WaitingForNodes", "Queued", "AdmissionChecks", "MakingRoom", "MeasuringHardware", "DeviceBusy", "Replacing",
    "FetchingSource", "WaitingForDeletion", "NoReports",
}  # fmt: skip
"""Reasons of conditions that are False although nothing is wrong: the job waits as it should, or a script is silent.

Their events have the type Normal instead of Warning.
"""
_NEVER_BAD = {"Resizing", "Preempted"}
_NEWS_BY_MESSAGE = {("Planned", TRUE), ("Accepted", FALSE)}
"""(Type, status) of conditions that cause an event also if only their message changes.

The new message describes another plan, or another problem of the spec.
"""
MAX_MESSAGE = 1000
"""Maximum length of an event's message in characters. The API server rejects messages of more than 1024 characters."""


@dataclass(frozen=True)
class Event:
    type: Literal["Normal", "Warning"]
    reason: str
    message: str

    def name(self, job: str, uid: str) -> str:
        """Return the name of the Kubernetes object for this event. Equal events of a job have equal names.

        If an event repeats, the operator therefore finds the existing object and raises its count. ``job``, ``uid``:
        name and UID of the job.
        """
        digest = hashlib.sha256(f"{uid}/{self.reason}/{self.message}".encode()).hexdigest()[:16]
        return f"{job}.{digest}"


def events(before: Iterable[Condition], after: Iterable[Condition]) -> tuple[Event, ...]:
    """Return an event for each condition that changed in a way that matters to users.

    ``before``, ``after``: the conditions of the job before and after a reconcile. A condition has changed if its status
    or reason differs. For the conditions in ``_NEWS_BY_MESSAGE``, a different message is a change, too. Changes of no
    interest to users, such as those with the reasons in ``_QUIET``, cause no event.
    """
    before = tuple(before)
    news = [new for new in after if _is_news(find(before, new.type), new)]
    # Both conditions about deadlines notice that finishBy passes. One event about it is enough.
    posted = {new.reason for new in news if new.type == "DeadlineFeasible"}
    return tuple(_event(new) for new in news if new.type != "DeadlineAtRisk" or new.reason not in posted)


def _is_news(old: Condition | None, new: Condition) -> bool:
    if old is not None and (old.status, old.reason) == (new.status, new.reason):
        return (new.type, new.status) in _NEWS_BY_MESSAGE and old.message != new.message
    if new.status is TRUE:
        return new.reason not in _QUIET_WHEN_TRUE
    if new.type in _BAD_WHEN_TRUE:
        return old is not None and old.status is TRUE
    return new.reason not in _QUIET


def _event(condition: Condition) -> Event:
    bad = condition.status is TRUE if condition.type in _BAD_WHEN_TRUE else condition.status is FALSE
    bad = bad and condition.type not in _NEVER_BAD and condition.reason not in _NORMAL_WHEN_FALSE
    message = condition.message
    if len(message) > MAX_MESSAGE:
        message = f"{message[: MAX_MESSAGE - 4]} ..."
    return Event("Warning" if bad else "Normal", condition.reason, message)
