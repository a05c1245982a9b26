"""Recognize pods that the kubelet of their node has rejected, for example because the node has too little room.

The scheduler that placed such a pod did not know what else the node runs. This happens if two schedulers place pods on
the same nodes, or if a device of the node fails.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from dljob.job.observed import Rejection
from dljob.kube.objects.pods.evictions import MAX_MESSAGE

# pkg/kubelet/kubelet.go (rejectPod) and pkg/kubelet/lifecycle/predicate.go of Kubernetes 1.27 to 1.37.
_PREFIX = "Pod was rejected: "
_TOO_LITTLE = "OutOf"
"""Start of ``status.reason`` if the node has too little of a resource, such as OutOfcpu or OutOfnvidia.com/gpu."""
_REASONS = frozenset(
    {
        "UnexpectedAdmissionError", "TopologyAffinityError", "NodeAffinity", "NodeName", "NodePorts", "TaintToleration",
    }
)  # fmt: skip


def rejection(body: Mapping[str, Any]) -> Rejection | None:
    """Return why the kubelet has rejected a pod before it started a container of it; None if it has not."""
    meta, status = body["metadata"], body.get("status") or {}
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    if status.get("phase") != "Failed":
        return None
    if not (message.startswith(_PREFIX) or reason.startswith(_TOO_LITTLE) or reason in _REASONS):
        return None
    node = (body.get("spec") or {}).get("nodeName") or ""
    text = message.removeprefix(_PREFIX)[:MAX_MESSAGE]
    return Rejection(meta["name"], meta["uid"], node, reason or "Rejected", text, created(body))


def created(body: Mapping[str, Any]) -> datetime:
    """Return the time when an object was created; the epoch if it does not say."""
    text = body["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(text) if text else datetime.fromtimestamp(0, UTC)
