"""Tell which jobs wait for free devices, and which jobs release theirs.

A running job does not grow onto free devices for which another job waits. ``reconcile.gang`` makes the texts
about the queue.
"""

from collections.abc import Sequence
from datetime import datetime

from dljob.api.compact import ABSENT, brief_conditions
from dljob.job.observed import JobSeen, queued_elsewhere

_FOR_CAPACITY = {"DeviceBusy", "NodesLeftOut", "Queued", "MakingRoom"}
"""Reasons of Planned=False of a job that could run on the cluster's nodes if none were in use or left out."""

QUOTA_EXCEEDED = "QuotaExceeded"
"""Reason of Planned=False of a job for which the quotas of its namespace leave too little."""
WAITS_FOR_NODES, NODES_NOT_PROVIDED = "WaitingForNodes", "NodesNotProvided"
"""Reasons of the condition Admitted=False of a job that has asked an autoscaler for nodes with a ProvisioningRequest:
while it waits, and if it does not get them."""
START_TIMED_OUT = "StartTimedOut"
BACK_OFFS = frozenset({START_TIMED_OUT, "RejectedByNodes", NODES_NOT_PROVIDED})
"""Reasons of the condition Admitted=False of a job whose pods were stopped, and that is planned again after a time."""

MAX_KEPT_BACK_OFFS = 3
"""Number of back-offs in a row in which running jobs leave a job the devices of its last plan: 210 s in all.

They last 30, 60 and 120 s. Later ones last up to 15 minutes. Otherwise a job with a wrong image, for example, would
keep all others from growing for ever, although it uses no device in this time. After more of them, no running job stops
for such a job either.
"""

FIRST_STATUS_S = 4.0
"""Seconds after the creation of a job after which it gets a status even if its plan is not made yet.

Most plans take less time, so that the first status of most jobs already has the plan.
"""


def first_status_in_s(job: JobSeen, now: datetime) -> float | None:
    """Return the seconds until a job without a plan gets its first status, at least 0; None if it has a status."""
    if brief_conditions(job.status):
        return None
    return max(0.0, FIRST_STATUS_S - (now - job.created).total_seconds())


def earlier_job_text(objects: str) -> str:
    """Return the message of a job that waits for the deletion of ``objects``, those of an earlier job of its name."""
    return (
        f"Kubernetes is still deleting objects of an earlier job of this name: {objects}. The job starts when they are "
        "gone, usually within seconds. If they stay, look at their finalizers, and at the pods that still use them"
    )


def devices_waited_for(job: JobSeen) -> Sequence[str] | None:
    """Return ``spec.devices`` of a job that waits for free capacity (empty: any device), or None if it does not wait.

    Return None also for a job that the cluster's nodes could not run even if all were free, and for one that waits for
    something else, such as its data, its PriorityClass or Kueue. If that job counted as waiting, running jobs could
    never grow. For a job in one of its first back-offs (``MAX_KEPT_BACK_OFFS``), return the devices of its last plan.
    """
    spec, status = job.spec, job.status
    if queued_elsewhere(job) or job.deleting or spec.get("suspend") or status.get("phase") in ("Complete", "Failed"):
        return None
    if (spec.get("planning") or {}).get("mode") == "PlanOnly":
        return None
    found = brief_conditions(status)
    if any(found.get(kind, ABSENT)[0] == "False" for kind in ("Accepted", "PriorityClassFound")):
        return None
    (planned, why), (admitted, cause) = (found.get(kind, ABSENT) for kind in ("Planned", "Admitted"))
    # Its planning begins when the look pod has found a model, or when an earlier job's objects are gone.
    names_free = found.get("PodsReady", ABSENT)[1] not in ("NamesTaken", "WaitingForDeletion")
    is_new = "Planned" not in found and found.get("DataInspected", ("True", ""))[0] == "True" and names_free
    busy = planned == "False" and why in _FOR_CAPACITY
    if is_new or busy:
        return tuple(spec.get("devices") or ())
    backs_off = admitted == "False" and cause in BACK_OFFS
    if not backs_off or often_timed_out(job):
        return None
    groups = (status.get("plan") or {}).get("groups") or ()
    return tuple(group["device"] for group in groups) or tuple(spec.get("devices") or ())


def often_timed_out(job: JobSeen) -> bool:
    """Return True if the pods of a job did not all run in more than ``MAX_KEPT_BACK_OFFS`` starts in a row."""
    return (job.status.get("startTimeouts") or 0) > MAX_KEPT_BACK_OFFS


def lacks_quota(job: JobSeen) -> bool:
    """Return True if the status of a job says that the quotas of its namespace leave too little for its plan."""
    return not ended(job) and brief_conditions(job.status).get("Planned", ABSENT)[1] == QUOTA_EXCEEDED


def stops(job: JobSeen) -> bool:
    """Return True if the pods of a job, if it has any, stop or are about to stop, so that their devices become free."""
    return ended(job) or brief_conditions(job.status).get("Admitted", ABSENT)[0] == "False"


def ended(job: JobSeen) -> bool:
    """Return True if a job has ended, or is suspended or deleted, so that its pods stop and no plan of it is in use."""
    return bool(job.deleting or job.spec.get("suspend") or job.status.get("phase") in ("Complete", "Failed"))
