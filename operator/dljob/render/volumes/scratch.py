"""The scratch space of a pod: the volume at ``/tmp``, on the node's disk, for temporary files, downloads and caches.

The size of /dev/shm is decided in ``perf.resources.memory``.
"""

from math import ceil

from dljob.api import DLJobSpec
from dljob.api.base import AUTO_SIZE
from dljob.cluster import quantity
from dljob.perf.workload.workload import REAL_NBYTES
from dljob.render import agent
from dljob.render.config import Manifest
from dljob.render.volumes import checkpoints, dataset, source

DIRECTORY = "/tmp"
DEFAULT_SIZE = "2Gi"
"""Size limit of the scratch space if the spec sets none. It also is the base of the size ``Auto``."""
COPIES = 2
"""Number of copies of the model's parameters for which a scratch space of size ``Auto`` has room.

A library that downloads weights needs two copies at the same time: the file that it downloads or converts, and the one
in its cache.
"""
RESERVE_NBYTES = 2**30
"""Bytes by which the pod's limit of ephemeral storage exceeds the sizes of its volumes.

They are for the logs, which the kubelet also counts.
"""
_MOST_NBYTES = 2**60
"""Maximum of the size ``Auto`` in bytes. The API server rejects quantities beyond 64 bits."""
_CACHES = {"HF_HOME": "huggingface", "TORCH_HOME": "torch", "XDG_CACHE_HOME": ""}
"""Environment variable by which libraries find their cache directory → directory below ``/tmp/.cache``."""


def size(spec: DLJobSpec) -> str:
    """Return the size limit of the scratch space as a Kubernetes quantity, such as '2Gi'.

    If the spec has the size ``Auto``, compute it from the model and the dataset. Without ``spec.trainer.scratch``,
    return ``DEFAULT_SIZE``.
    """
    scratch = spec.trainer.scratch
    if scratch is None:
        return DEFAULT_SIZE
    return scratch.size if scratch.size != AUTO_SIZE else f"{ceil(_auto_nbytes(spec) / 2**30)}Gi"


def described(spec: DLJobSpec) -> str:
    """Return the size of the scratch space with its origin, for messages, such as '2Gi (the default)'."""
    if spec.trainer.scratch is None:
        return f"{DEFAULT_SIZE} (the default)"
    return f"Auto ({size(spec)})" if spec.trainer.scratch.size == AUTO_SIZE else size(spec)


def doubled(spec: DLJobSpec) -> str:
    """Return twice the size of the scratch space, rounded up to whole Gi, to propose it in messages."""
    return f"{ceil(2 * quantity(size(spec)) / 2**30)}Gi"


def volume(spec: DLJobSpec) -> Manifest:
    return {"name": "tmp", "emptyDir": {"sizeLimit": size(spec)}}


def variables(spec: DLJobSpec) -> dict[str, Manifest]:
    """Return the environment variables (name → fields) that make libraries put their caches into the scratch space.

    Without ``spec.trainer.scratch``, return an empty dict. The image may set these variables to a directory in which
    the trainer cannot write, so the result overrides the image. If the user sets one of the variables in the spec, the
    caller uses the user's value, because it may name a volume that several jobs share.
    """
    if spec.trainer.scratch is None:
        return {}
    return {name: {"value": f"{DIRECTORY}/.cache/{part}".rstrip("/")} for name, part in _CACHES.items()}


def storage(spec: DLJobSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Return the trainer container's requests and limits of ephemeral storage (space on the node's disk).

    Both have the form of ``resources`` in a container, in bytes. Without ``spec.trainer.scratch``, there is no limit,
    and a request only for checkpoints on their way to an object store (``spec.checkpoint.uri``) and for shards. The
    kubelet counts all volumes on the node's disk against the limit of the pod, so fetched data, files of
    ``trainer.source`` and an injected agent are included.
    """
    staged, data = checkpoints.staging(spec), dataset.volume(spec)
    if spec.dataset.sharded:  # Otherwise the init container that fetches the data requests the space.
        staged, data = [*staged, *(item for item in data if "emptyDir" in item)], []
    if spec.trainer.scratch is None:
        nbytes = sum(int(quantity(item["emptyDir"]["sizeLimit"])) for item in staged)
        return ({"ephemeral-storage": str(nbytes)} if staged else {}), {}
    others = (*staged, *data, *agent.volume(spec), *source.volumes(spec))
    nbytes = int(quantity(size(spec)))
    nbytes += sum(int(quantity(item["emptyDir"]["sizeLimit"])) for item in others if "emptyDir" in item)
    return {"ephemeral-storage": str(nbytes)}, {"ephemeral-storage": str(nbytes + RESERVE_NBYTES)}


def _auto_nbytes(spec: DLJobSpec) -> int:
    """Return the size ``Auto`` in bytes, computed from the model and the dataset.

    It is the sum of the default size, ``COPIES`` copies of the model's parameters, and the dataset, and at most
    ``_MOST_NBYTES``. If the spec does not give the size of the model or of the dataset, this part counts as 0 bytes.
    """
    data = (spec.dataset.samples or 0) * (spec.dataset.sample_bytes or 0)
    return min(int(quantity(DEFAULT_SIZE)) + COPIES * REAL_NBYTES * checkpoints.parameters(spec) + data, _MOST_NBYTES)
