"""Choose the access mode of the checkpoint claim that dljob creates: ReadWriteOnce, or ReadWriteMany for several nodes.

The spec of a claim is immutable, so that a job whose claim is ReadWriteOnce can never train on several nodes. A storage
class does not say which access modes it supports. Most default classes support only ReadWriteOnce.
"""

from collections.abc import Iterable

from dljob.api import DLJobSpec, PlanningMode
from dljob.job.observed import ClassSeen

SHARING_PROVISIONERS = (
    "beegfs.csi.netapp.com",
    "cephfs.csi.ceph.com",
    "cephfs.manila.csi.openstack.org",
    "csi.juicefs.com",
    "efs.csi.aws.com",
    "file.csi.azure.com",
    "filestore.csi.storage.gke.io",
    "fsx.csi.aws.com",
    "nfs-subdir-external-provisioner",
    "nfs.csi.k8s.io",
    "nfs.manila.csi.openstack.org",
    "spectrumscale.csi.ibm.com",
)
"""Provisioners of file systems that all nodes can mount: each volume of their classes can be ReadWriteMany. An
installation may put a prefix before the name, as Rook does: ``rook-ceph.cephfs.csi.ceph.com``."""


def claim_mode(spec: DLJobSpec, nodes: int, classes: Iterable[ClassSeen] | None) -> str:
    """Return the access mode of the checkpoint claim that dljob creates for a plan on ``nodes`` nodes.

    A job that starts on one node and may use several gets ReadWriteMany if its class shares its volumes, unless the
    spec says otherwise. ``classes``: the storage classes of the cluster; None if the operator may not read them.
    """
    volume = spec.checkpoint.volume
    shared = volume.shared
    if shared is None:
        shared = may_use_several(spec) and _shares(volume.storage_class_name, classes or ())
    return "ReadWriteMany" if nodes > 1 or shared else "ReadWriteOnce"


def may_use_several(spec: DLJobSpec) -> bool:
    """Return True if the spec permits plans on several nodes."""
    if spec.planning.mode is PlanningMode.FIXED and spec.planning.groups:
        return sum(group.nodes for group in spec.planning.groups) > 1
    return spec.nodes.max > 1


def _shares(name: str | None, classes: Iterable[ClassSeen]) -> bool:
    """Return True if the volumes of a storage class can be ReadWriteMany. ``name``: None: the default class."""
    found = [each.provisioner for each in classes if (each.default if name is None else each.name == name)]
    return bool(found) and all(any(_is(each, known) for known in SHARING_PROVISIONERS) for each in found)


def _is(provisioner: str, known: str) -> bool:
    return provisioner == known or provisioner.endswith((f".{known}", f"/{known}", f"-{known}"))
