"""The checkpoints in the pod: the volume with them, or for an object store a staging volume and the credentials."""

from math import ceil

from dlcontract import CHECKPOINT_DIR, CHECKPOINT_SECRET_DIR
from dljob.api import DLJobSpec, Framework
from dljob.api.base import AUTO_SIZE
from dljob.cluster import quantity
from dljob.perf.workload.workload import REAL_NBYTES, builtin, reference
from dljob.render.config import Manifest
from dljob.render.names import Names

VOLUME, SECRET_VOLUME = "checkpoints", "checkpoint-secret"
BASE_SIZE = "2Gi"
"""Base of the staging size ``Auto``."""
UNKNOWN_SIZE = "20Gi"
"""Staging size ``Auto`` for a script whose model is not described."""
STATE_COPIES = 3
"""Training state divided by the parameters: the parameters, and two values per parameter of an optimizer like Adam."""
OWN_FACTOR, SCRIPT_FACTOR = 4, 12
"""Number of training states for which a staging volume of size ``Auto`` has room.

The trainer needs one, for the checkpoint that it restores. A script keeps several checkpoints, and writes a new one
before it deletes an old one.
"""
_MOST_NBYTES = 2**60


def staging_size(spec: DLJobSpec) -> str:
    """Return the size limit of the staging volume as a Kubernetes quantity, such as '20Gi'."""
    given = spec.checkpoint.staging_size
    if given is not None and given != AUTO_SIZE:
        return given
    count = parameters(spec)
    own = spec.trainer.framework is Framework.DLTRAIN
    if not count and not own:
        return UNKNOWN_SIZE
    state = STATE_COPIES * REAL_NBYTES * count
    nbytes = int(quantity(BASE_SIZE)) + (OWN_FACTOR if own else SCRIPT_FACTOR) * state
    return f"{ceil(min(nbytes, _MOST_NBYTES) / 2**30)}Gi"


def staging(spec: DLJobSpec) -> list[Manifest]:
    """Return a list with the staging volume on the node's disk, or an empty list if the job has no object store."""
    if not spec.checkpoint.enabled or spec.checkpoint.uri is None:
        return []
    return [{"name": VOLUME, "emptyDir": {"sizeLimit": staging_size(spec)}}]


def volumes(spec: DLJobSpec, names: Names) -> list[Manifest]:
    """Return the volumes for checkpoints. ``names``: the names of the job's objects, such as that of its claim."""
    if not spec.checkpoint.enabled:
        return []
    if spec.checkpoint.on_volume:
        claim = spec.checkpoint.volume.claim_name or names.claim
        return [{"name": VOLUME, "persistentVolumeClaim": {"claimName": claim}}]
    secret = spec.checkpoint.secret_name
    if secret is None:
        return staging(spec)
    return [*staging(spec), {"name": SECRET_VOLUME, "secret": {"secretName": secret, "defaultMode": 0o440}}]


def mounts(spec: DLJobSpec) -> list[Manifest]:
    if not spec.checkpoint.enabled:
        return []
    found: list[Manifest] = [{"name": VOLUME, "mountPath": CHECKPOINT_DIR}]
    if spec.checkpoint.uri is not None and spec.checkpoint.secret_name is not None:
        # Files rather than environment variables: scripts keep their own AWS_… variables, and a changed Secret takes
        # effect without a restart.
        found.append({"name": SECRET_VOLUME, "mountPath": CHECKPOINT_SECRET_DIR, "readOnly": True})
    return found


def parameters(spec: DLJobSpec) -> int:
    """Return the number of the model's parameters; 0 if the spec does not describe the model."""
    hints = spec.model.hints
    if hints is None:
        if spec.model.name is None:
            return 0  # A job with trainer.framework Torchrun or MPI need not describe its model.
        return builtin(spec.model.name.value, spec.dataset.name.value if spec.dataset.name else None).parameters
    return hints.parameters or (reference(hints.like.value).parameters if hints.like else 0)
