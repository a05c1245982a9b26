"""The claims that all pods of a job mount, and the nodes on which their volumes can be mounted.

The operator makes no claim for a single pod: all pods mount the same claims. Its own claim for checkpoints counts like
one of the user's as soon as it has a volume, so that a job that stops starts again where its checkpoints are.
"""

from collections.abc import Iterable, Mapping

from dljob.api import DLJobSpec
from dljob.cluster.node_selector import NodeSelector
from dljob.job.observed import ClaimSeen, ClassSeen
from dljob.planner import VolumeLimit


def mounted_claims(spec: DLJobSpec, own: str) -> dict[str, str]:
    """Return the name of each claim that all pods of a job mount → the field of the spec because of which they do.

    ``own``: name of the claim that the operator makes for checkpoints.
    """
    found: dict[str, str] = {}
    for i, override in enumerate(spec.pod_template_overrides):
        volumes = override.spec.get("volumes")
        for volume in volumes if isinstance(volumes, list) else ():
            claim = volume.get("persistentVolumeClaim") if isinstance(volume, Mapping) else None
            if isinstance(claim, Mapping) and isinstance(name := claim.get("claimName"), str):
                found[name] = f"spec.podTemplateOverrides[{i}].spec.volumes"
    archive = spec.trainer.source.archive if spec.trainer.source is not None else None
    if archive is not None and archive.claim is not None:
        found[archive.claim] = "spec.trainer.source.archive.uri"
    if (name := spec.dataset.claim) is not None:
        found[name] = f"spec.dataset.{'cacheClaimName' if spec.dataset.remote else 'uri'}"
    if spec.checkpoint.creates_claim:
        found[own] = "spec.checkpoint.volume"
    elif spec.checkpoint.on_volume and (name := spec.checkpoint.volume.claim_name) is not None:
        found[name] = "spec.checkpoint.volume.claimName"
    return found


def volume_limits(
    spec: DLJobSpec,
    own: str,
    claims: Mapping[str, ClaimSeen],
    classes: Iterable[ClassSeen] | None,
    volumes: Mapping[str, NodeSelector],
) -> tuple[VolumeLimit, ...]:
    """Return the claims that all pods of a job mount and that only some nodes can mount.

    A bound claim is limited by the node affinity of its volume, and a claim without a volume by the
    ``allowedTopologies`` of its StorageClass, whatever its ``volumeBindingMode``. ``own``: name of the claim that the
    operator makes for checkpoints. It may not exist yet. ``claims``, ``classes``, ``volumes``: as in ``Observed``.
    """
    found: list[VolumeLimit] = []
    by_name = {each.name: each for each in classes or ()}
    for name, field in mounted_claims(spec, own).items():
        claim = claims.get(name)
        if claim is not None and claim.phase == "Bound":
            source, nodes = f"volume {claim.volume!r}", volumes.get(claim.volume)
        elif claim is None and name != own:
            continue
        else:
            asked = spec.checkpoint.volume.storage_class_name or _default(by_name.values())
            storage_class = by_name.get((asked if claim is None else claim.storage_class) or "")
            if storage_class is None or (claim is not None and claim.phase != "Pending"):
                continue
            source, nodes = f"StorageClass {storage_class.name!r}", storage_class.topologies
        if nodes is not None:
            found.append(VolumeLimit(field, name, source, nodes))
    return tuple(found)


def _default(classes: Iterable[ClassSeen]) -> str | None:
    """Return the name of the default StorageClass; None if there is none, or if there are several."""
    found = [each.name for each in classes if each.default]
    return found[0] if len(found) == 1 else None
