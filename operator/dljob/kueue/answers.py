"""Patches of the status of a job's Workload, with which the operator tells Kueue how far the job is.

For other kinds of jobs, Kueue's own controllers write the same conditions. Each function returns a JSON merge patch of
the status. The patch replaces the whole list of conditions, so it must be sent with the resourceVersion with which they
were read. Otherwise, it might overwrite a newer condition.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dljob.job.queue import WorkloadSeen

MAX_MESSAGE = 1024
_REQUEUED_BY_JOB = {"Preempted", "NodeFailures"}
"""Reasons of an eviction after which a Workload goes back to its queue as soon as the pods are gone.

After an eviction for another reason, Kueue itself decides when the Workload goes back: after a back-off, when somebody
activates it, or when its queue resumes.
"""

Patch = dict[str, Any]


def released(found: WorkloadSeen, now: datetime) -> Patch:
    """Return the status patch that gives up the quota of an evicted Workload whose pods have stopped."""
    evicted = found.condition("Evicted") or {}
    reason, message = str(evicted.get("reason") or "Evicted"), str(evicted.get("message") or "")
    changes = [
        ("Requeued", reason in _REQUEUED_BY_JOB, reason, message),
        ("QuotaReserved", False, "Pending", message),
    ]
    if found.condition("Admitted") is not None:
        changes.append(("Admitted", False, "NoReservation", "The workload has no reservation"))
    if found.condition("PodsReady") is not None:  # The next admission has the whole time for pods to start again.
        changes.append(("PodsReady", False, "WaitForStart", "not all pods of the job are ready"))
    return {"admission": None, "conditions": _changed(found, changes, now)}


def finished(found: WorkloadSeen, *, success: bool, message: str, now: datetime) -> Patch | None:
    """Return the status patch that says that the job has ended, so that Kueue frees its quota.

    ``success``: True if the job is complete, False if it failed. Return None if the Workload has ended already.
    """
    if found.is_true("Finished"):
        return None
    change = ("Finished", True, "Succeeded" if success else "Failed", message)
    return {"conditions": _changed(found, [change], now)}


def pods_ready(found: WorkloadSeen, *, ready: bool, now: datetime) -> Patch | None:
    """Return the status patch for the condition PodsReady; None if the Workload has this condition already.

    ``ready``: True if all pods of the job are ready. With its option waitForPodsReady, Kueue evicts a Workload whose
    pods are not ready in time.
    """
    before = found.condition("PodsReady")
    was, why = (before or {}).get("status"), (before or {}).get("reason")
    if ready:
        reason = "Recovered" if why in ("WaitForRecovery", "Recovered") else "Started"
    else:
        reason = "WaitForRecovery" if was == "True" or why == "WaitForRecovery" else "WaitForStart"
    if before is not None and (was, why) == (str(ready), reason):
        return None
    text = "all pods of the job are ready" if ready else "not all pods of the job are ready"
    return {"conditions": _changed(found, [("PodsReady", ready, reason, text)], now)}


def _changed(found: WorkloadSeen, changes: list[tuple[str, bool, str, str]], now: datetime) -> list[Mapping[str, Any]]:
    """Return all conditions of the Workload after some changes. Each change is (type, status, reason, message)."""
    conditions = {str(item["type"]): item for item in found.conditions}
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    for kind, status, reason, message in changes:
        old, word = conditions.get(kind), str(status)
        since = old["lastTransitionTime"] if old is not None and old.get("status") == word else stamp
        conditions[kind] = {
            "type": kind,
            "status": word,
            "reason": reason,
            "message": message[:MAX_MESSAGE],
            "observedGeneration": found.generation,
            "lastTransitionTime": since,
        }
    return list(conditions.values())
