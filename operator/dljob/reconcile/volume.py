"""Check that the volumes of a job are usable, before its pods wait for them. Every message names the remedies."""

from collections.abc import Iterable

from dljob.api import DLJobSpec, Resize
from dljob.job.defaults import is_default
from dljob.job.observed import ClaimSeen, Observed
from dljob.job.plan.stored import StoredPlan
from dljob.render import Names
from dljob.render.volumes.access_mode import claim_mode
from dljob.status import FALSE, TRUE, UNKNOWN, Verdict

_CLASS_FIELD = "checkpoint.volume.storageClassName"
_SHARED = ("ReadWriteMany",)
_SHARED_READ = ("ReadWriteMany", "ReadOnlyMany")
_HOPELESS = {
    "ClaimNotFound", "ClaimNotShared", "StorageClassNotFound", "NoDefaultStorageClass", "DatasetClaimNotFound",
    "DatasetClaimNotShared", "SourceClaimNotFound", "SourceClaimNotShared",
}  # fmt: skip
"""Reasons of VolumeReady=False for which pods would wait forever."""


def volume_ready(observed: Observed, spec: DLJobSpec, accepted: StoredPlan) -> Verdict:
    """Return the VolumeReady condition, which says if the job's PersistentVolumeClaims are usable for the plan.

    If the claim of the dataset, or the one with the files of the script, has a problem, the condition reports this
    problem. Otherwise, it reports the state of the claim for checkpoints.
    """
    return (
        _dataset(observed, spec, accepted)
        or _source(observed, spec, accepted)
        or _checkpoints(observed, spec, accepted)
    )


def blocks(verdict: Verdict) -> bool:
    """Return True if the VolumeReady condition ``verdict`` says that no pod can start until a user fixes a problem."""
    return verdict.status is FALSE and verdict.reason in _HOPELESS


def blocked(observed: Observed, spec: DLJobSpec, plan: StoredPlan) -> bool:
    """Return True if no pod of the plan can start until a user fixes a problem of a volume."""
    return blocks(volume_ready(observed, spec, plan))


def _no(reason: str, message: str) -> Verdict:
    return Verdict("VolumeReady", FALSE, reason, message)


def _dataset(observed: Observed, spec: DLJobSpec, accepted: StoredPlan) -> Verdict | None:
    name, cache = spec.dataset.claim, spec.dataset.remote
    if name is None:
        return None
    field, wanted = ("cacheClaimName", _SHARED) if cache else ("uri", _SHARED_READ)
    claim = observed.claims.get(name)
    if claim is None:
        return _no(
            "DatasetClaimNotFound",
            f"spec.dataset.{field}: found no PersistentVolumeClaim {name!r} in namespace "
            f"{observed.job.namespace!r}; create the claim, or {'remove' if cache else 'correct'} the field",
        )
    if accepted.nodes > 1 and not _any(claim.access_modes, wanted):
        return _no(
            "DatasetClaimNotShared",
            f"spec.dataset.{field}: claim {name!r} has access modes {_list(claim.access_modes)}, but the plan needs it "
            f"on {accepted.nodes} nodes; use a claim with {' or '.join(reversed(wanted))}, or set spec.nodes.max: 1",
        )
    return None


def _source(observed: Observed, spec: DLJobSpec, accepted: StoredPlan) -> Verdict | None:
    source = spec.trainer.source
    if source is None or source.archive is None or (name := source.archive.claim) is None:
        return None
    claim = observed.claims.get(name)
    if claim is None:
        return _no(
            "SourceClaimNotFound",
            f"spec.trainer.source.archive.uri: found no PersistentVolumeClaim {name!r} in namespace "
            f"{observed.job.namespace!r}; create the claim, or correct the field",
        )
    if accepted.nodes > 1 and not _any(claim.access_modes, _SHARED_READ):
        return _no(
            "SourceClaimNotShared",
            f"spec.trainer.source.archive.uri: claim {name!r} has access modes {_list(claim.access_modes)}, but the "
            f"plan needs it on {accepted.nodes} nodes; use a claim with {' or '.join(reversed(_SHARED_READ))}, or set "
            "spec.nodes.max: 1",
        )
    return None


def _checkpoints(observed: Observed, spec: DLJobSpec, accepted: StoredPlan) -> Verdict:
    if not spec.checkpoint.enabled:
        return Verdict("VolumeReady", TRUE, "NotNeeded", "spec.checkpoint.enabled is false")
    if spec.checkpoint.uri is not None:
        return Verdict("VolumeReady", TRUE, "NotNeeded", f"checkpoints are in {spec.checkpoint.uri}")
    volume, nodes = spec.checkpoint.volume, accepted.nodes
    name = volume.claim_name or Names.of(observed.job).claim
    claim = observed.claims.get(name)
    if claim is not None and nodes > 1 and not _any(claim.access_modes, _SHARED):
        return _no(
            "ClaimNotShared",
            f"spec.checkpoint.volume: claim {name!r} has access modes {_list(claim.access_modes)}, but {nodes} nodes "
            "write to it; use a claim with ReadWriteMany (of a class that shares its volumes), or set "
            "spec.nodes.max: 1",
        )
    if claim is not None:
        return _existing(claim, spec, nodes)
    if volume.claim_name:
        return _no(
            "ClaimNotFound",
            f"spec.checkpoint.volume.claimName: found no PersistentVolumeClaim {name!r} in namespace "
            f"{observed.job.namespace!r}; create the claim, or remove claimName so that dljob creates one",
        )
    mode = claim_mode(spec, nodes, observed.classes)
    return _class(observed, spec, accepted) or Verdict(
        "VolumeReady", UNKNOWN, "Binding", f"claim {name!r} is being created{_limit(spec, (mode,))}"
    )


def _limit(spec: DLJobSpec, modes: Iterable[str]) -> str:
    """Return a warning if the job may move to several nodes, but its checkpoint claim does not allow it; else ''.

    ``modes``: access modes of the claim. The warning is appended to the message of VolumeReady.
    """
    several = spec.nodes.max is not None and spec.nodes.max > 1 and spec.planning.resize is not Resize.NEVER
    if not several or _any(modes, _SHARED):
        return ""
    remedy = "use another claim" if spec.checkpoint.volume.claim_name else "set spec.checkpoint.volume.shared: true"
    return f". The claim is not ReadWriteMany, so the job cannot move to several nodes: {remedy} before training begins"


def _existing(claim: ClaimSeen, spec: DLJobSpec, nodes: int) -> Verdict:
    limit = _limit(spec, claim.access_modes)
    if claim.phase == "Bound":
        return Verdict("VolumeReady", TRUE, "Bound", f"claim {claim.name!r} is bound{limit}")
    if claim.phase == "Lost":
        return _no("ClaimLost", f"claim {claim.name!r} lost its volume; restore the volume, or delete the claim")
    if claim.problem:
        return _no(
            "ProvisioningFailed",
            f"PersistentVolumeClaim {claim.name!r}: found no volume of StorageClass {claim.storage_class!r} "
            f"({claim.problem}); expected one with {_list(claim.access_modes)}. {_other_volume(claim, spec, nodes)}",
        )
    return Verdict("VolumeReady", UNKNOWN, "Binding", f"claim {claim.name!r} waits for its volume{limit}")


def _other_volume(claim: ClaimSeen, spec: DLJobSpec, nodes: int) -> str:
    """Return what a user can do if the checkpoint claim gets no volume.

    Most default storage classes do not support ReadWriteMany. The spec of a claim is immutable, so that a change of the
    job takes effect only in a new claim.
    """
    volume, modes = spec.checkpoint.volume, _list(claim.access_modes)
    if volume.claim_name:
        return f"Create the claim in a class that supports {modes}, or set claimName to another claim"
    ways = [f"spec.checkpoint.volume.storageClassName to a class that supports {modes}", "spec.checkpoint.uri"]
    if _any(claim.access_modes, _SHARED):
        ways.insert(0, "spec.nodes.max: 1" if nodes > 1 else "spec.checkpoint.volume.shared: false")
    return f"Set {', or '.join(ways)}; then delete this claim, so that dljob creates another if it needs one"


def _class(observed: Observed, spec: DLJobSpec, accepted: StoredPlan) -> Verdict | None:
    """Return VolumeReady=False if the cluster has no storage class for the checkpoint claim that dljob would create.

    Return None if there is a storage class, or if the operator may not read storage classes.
    """
    wanted = spec.checkpoint.volume.storage_class_name
    if observed.classes is None:
        return None
    present = sorted(item.name for item in observed.classes)
    if wanted is not None and wanted not in present:
        whose = ", the administrator's default" if is_default(accepted.status.defaults, _CLASS_FIELD) else ""
        return _no(
            "StorageClassNotFound",
            f"spec.{_CLASS_FIELD}: found no StorageClass {wanted!r}{whose}; expected one of "
            f"{_list(present)}; choose one of these, create the class, or set claimName to an existing claim",
        )
    if wanted is None and not any(item.default for item in observed.classes):
        return _no(
            "NoDefaultStorageClass",
            "spec.checkpoint.volume: no storageClassName is set and the cluster has no default StorageClass; set "
            f"storageClassName to one of {_list(present)}, or set claimName to an existing claim",
        )
    return None


def _any(found: Iterable[str], wanted: Iterable[str]) -> bool:
    return not set(found).isdisjoint(wanted)


def _list(items: Iterable[str]) -> str:
    return ", ".join(items) or "none"
