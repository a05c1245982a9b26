"""Build the status of a job, and the events about changes of the status. The package does no I/O.

The inputs are the job's plan, the observed state of its objects and the verdicts of the checks in a reconcile.
"""

from dljob.status.build import build, previous, readable_status
from dljob.status.conditions import FALSE, RECOVERING, TRUE, UNKNOWN, Verdict, changed_at, find, is_true
from dljob.status.events import Event, events
from dljob.status.patch import merge_patch
from dljob.status.pods import NOT_YET, pods_ready, unscheduled_in_s

__all__ = [
    "FALSE",
    "NOT_YET",
    "RECOVERING",
    "TRUE",
    "UNKNOWN",
    "Event",
    "Verdict",
    "build",
    "changed_at",
    "events",
    "find",
    "is_true",
    "merge_patch",
    "pods_ready",
    "previous",
    "readable_status",
    "unscheduled_in_s",
]
