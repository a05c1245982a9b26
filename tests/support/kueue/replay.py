"""Play the part of Kueue: change the status of a Workload as a real Kueue 0.19 was seen to do.

The functions return the new Workload; they do not change their argument.
"""

import copy
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
STAMP = "2026-03-01T12:00:00Z"


def with_condition(body: Json, kind: str, status: bool, reason: str, message: str = "") -> Json:
    body = copy.deepcopy(body)
    conditions = body.setdefault("status", {}).setdefault("conditions", [])
    conditions[:] = [item for item in conditions if item["type"] != kind]
    conditions.append(
        {"type": kind, "status": str(status), "reason": reason, "message": message or reason,
         "lastTransitionTime": STAMP, "observedGeneration": 1}
    )  # fmt: skip
    return body


def pending(body: Json, message: str = "couldn't assign flavors: insufficient quota") -> Json:
    return with_condition(body, "QuotaReserved", False, "Pending", message)


def reserved(body: Json, counts: Mapping[str, int] | None = None, flavor: str = "default") -> Json:
    """Reserve quota for ``counts`` pods of each podSet; default: all."""
    body = with_condition(body, "QuotaReserved", True, "QuotaReserved", "Quota reserved in ClusterQueue shared")
    assignments = [
        {
            "name": item["name"],
            "count": (counts or {}).get(item["name"], item["count"]),
            "flavors": {"cpu": flavor, "memory": flavor},
        }
        for item in body["spec"]["podSets"]
    ]
    body["status"]["admission"] = {"clusterQueue": "shared", "podSetAssignments": assignments}
    if any(item["type"] == "Evicted" for item in body["status"]["conditions"]):
        body = with_condition(body, "Evicted", False, "QuotaReserved", "Previously evicted")
    return body


def admitted(body: Json, counts: Mapping[str, int] | None = None, flavor: str = "default") -> Json:
    return with_condition(reserved(body, counts, flavor), "Admitted", True, "Admitted", "The workload is admitted")


def evicted(body: Json, reason: str = "Preempted", message: str = "preempted by a Workload of higher priority") -> Json:
    return with_condition(body, "Evicted", True, reason, message)


def deactivated(body: Json) -> Json:
    """Deactivate a Workload, and evict it if it has quota."""
    body = copy.deepcopy(body)
    body["spec"]["active"] = False
    if body.get("status", {}).get("admission"):
        return evicted(body, "Deactivated", "The workload is deactivated")
    return body


def merged(body: Json, patch: Mapping[str, Any]) -> Json:
    """Return ``body`` after a JSON merge patch."""
    result = dict(body)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            result[key] = merged(result.get(key) or {}, value)
        else:
            result[key] = copy.deepcopy(value)
    return result
