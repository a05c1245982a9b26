"""Reduce claims, StorageClasses and PersistentVolumes to the fields on which decisions depend. No I/O."""

from collections.abc import Mapping
from typing import Any

from dljob.api.compact import compact, shared
from dljob.cluster.node_selector import NodeSelector
from dljob.job.observed import APPLIED_ANNOTATION, ClaimSeen, ClassSeen

Body = Mapping[str, Any]


def claim(body: Body) -> ClaimSeen:
    meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    return ClaimSeen(
        name=meta["name"],
        phase=status.get("phase") or "Pending",
        access_modes=tuple(status.get("accessModes") or spec.get("accessModes") or ()),
        storage_class=spec.get("storageClassName"),
        applied=(meta.get("annotations") or {}).get(APPLIED_ANNOTATION, ""),
        volume=spec.get("volumeName") or "",
    )


def storage_class(body: Body) -> ClassSeen:
    annotations = body["metadata"].get("annotations") or {}
    keys = ("storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class")
    default = any(annotations.get(key) == "true" for key in keys)
    allowed = body.get("allowedTopologies")
    topologies = shared(NodeSelector.parse_topologies(allowed)) if allowed else None
    return ClassSeen(body["metadata"]["name"], default, str(body.get("provisioner") or ""), topologies)


def volume(body: Body) -> NodeSelector | None:
    """Return the nodes on which a PersistentVolume can be mounted; None if its node affinity does not limit them.

    Most volumes of a cluster are in one of a few zones. They share an equal selector, which saves memory. Selectors of
    local volumes, which differ, share the names of labels.
    """
    required = ((body.get("spec") or {}).get("nodeAffinity") or {}).get("required")
    return None if required is None else shared(NodeSelector.parse(compact(required)))
