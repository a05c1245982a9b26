"""The StorageClass whose volumes all nodes share. A volume is a folder of this machine, created for a claim.

Every node has access to the machine's file system, so a hostPath volume is the same folder on all nodes
(ReadWriteMany).
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from devcluster.embedded.services.api import Api, ApiError, Object
from devcluster.embedded.services.watching import Mirror, Reconciler

CLASS = "dljob-shared"
PROVISIONER = "dljob.dev/shared-folder"

STORAGE_CLASS: Object = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": PROVISIONER,
    "reclaimPolicy": "Delete",
    "volumeBindingMode": "Immediate",
}


def is_waiting(claim: Object) -> bool:
    """Return True if the claim needs a volume of this StorageClass and has none yet."""
    spec = claim["spec"]
    return (
        spec.get("storageClassName") == CLASS
        and not spec.get("volumeName")
        and not claim["metadata"].get("deletionTimestamp")
        and spec.get("volumeMode", "Filesystem") == "Filesystem"
    )


def volume_for(claim: Object, folder: Path) -> Object:
    """Return a PersistentVolume that is already assigned to the claim, so that the claim binds immediately."""
    metadata = claim["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": f"pvc-{metadata['uid']}",
            "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER},
        },
        "spec": {
            "storageClassName": CLASS,
            "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
            "accessModes": claim["spec"]["accessModes"],
            "persistentVolumeReclaimPolicy": "Delete",
            "hostPath": {"path": str(folder / f"pvc-{metadata['uid']}"), "type": "Directory"},
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
        },
    }


def _event(claim: Object, volume: str) -> Object:
    metadata, now = claim["metadata"], time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Normal",
        "reason": "ProvisioningSucceeded",
        "message": f"Made the shared folder {volume}",
        "source": {"component": PROVISIONER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def reconciler(api: Api, folder: Path) -> Reconciler:
    """Return the reconciler that creates volumes for waiting claims and removes volumes of deleted claims."""

    def step() -> None:
        have = {one["metadata"]["name"]: one for one in volumes.objects()}
        for claim in filter(is_waiting, claims.objects()):
            volume = volume_for(claim, folder)
            if volume["metadata"]["name"] not in have:
                _make(api, claim, volume)
        for name, volume in have.items():
            ours = (volume["metadata"].get("annotations") or {}).get("pv.kubernetes.io/provisioned-by") == PROVISIONER
            released = volume.get("status", {}).get("phase") == "Released"
            if ours and released and volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete":
                shutil.rmtree(folder / name, ignore_errors=True)
                _forget(api, name)

    loop = Reconciler(step, "storage")
    claims = Mirror(api, "/api/v1/persistentvolumeclaims", loop.wake)
    volumes = Mirror(api, "/api/v1/persistentvolumes", loop.wake)
    return loop


def _make(api: Api, claim: Object, volume: Object) -> None:
    path = Path(volume["spec"]["hostPath"]["path"])
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o777)  # pods may run as any user, and kubelet does not change the owner of a hostPath
    api.ensure("/api/v1/persistentvolumes", volume)
    namespace = claim["metadata"]["namespace"]
    api.ensure(f"/api/v1/namespaces/{namespace}/events", _event(claim, volume["metadata"]["name"]))


def _forget(api: Api, name: str) -> None:
    try:
        api.request("DELETE", f"/api/v1/persistentvolumes/{name}")
    except ApiError as refusal:
        if refusal.status != 404:
            raise
