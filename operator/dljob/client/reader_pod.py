"""A pod that mounts a job's checkpoint volume for reading, for as long as a command copies files from it."""

from collections.abc import Mapping
from typing import Any

from dlcontract import CHECKPOINT_DIR
from dljob.api import API_VERSION
from dljob.api.defaults import NO_DEFAULTS, JobDefaults

LIMIT_S = 4 * 3600
"""Seconds after which Kubernetes ends the pod, even if the command was killed and could not delete it."""
CONTAINER = "reader"
UID = 65532
"""User and group of trainer pods, which have written the files."""
_HOPELESS = {"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError"}
_WAIT = f"import time; time.sleep({LIMIT_S})"
LEFT_OUT = ("optimizer.safetensors", "state.json")
"""Files of a checkpoint that only a resumed training needs."""
_SEND = """
import os, sys, tarfile
folder, whole = sys.argv[1], sys.argv[2] == "all"
if not os.path.isdir(folder):
    print("found no folder " + folder + " on the volume", file=sys.stderr)
    sys.exit(3)
beside = os.path.dirname(folder)
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
    if whole:
        tar.add(folder, arcname="")
        sys.exit()
    found = sorted(os.listdir(folder))
    parts = ("optimizer-part-", "model-part-") if "model.safetensors" in found else ("optimizer-part-",)
    for name in found:
        if os.path.isfile(os.path.join(folder, name)) and name not in sys.argv[3:] and not name.startswith(parts):
            tar.add(os.path.join(folder, name), arcname=name)
    for name in ("model.json", "predict.py", "report.json", "report.html"):
        if os.path.isfile(os.path.join(beside, name)):
            tar.add(os.path.join(beside, name), arcname=name)
"""


def manifest(
    job: Mapping[str, Any], claim: str, image: str, token: str, defaults: JobDefaults = NO_DEFAULTS
) -> dict[str, Any]:
    """Return the pod, which meets the Pod Security Standard "restricted".

    ``job``: the DLJob, with whose deletion the pod goes, too. ``token``: makes the pod's name unique. ``defaults``: the
    administrator's defaults for pods of jobs.
    """
    meta, spec = job["metadata"], job.get("spec") or {}
    trainer = spec.get("trainer") or {}
    secrets = trainer.get("imagePullSecrets") or (defaults.trainer.image_pull_secrets if defaults.trainer else ()) or ()
    resources = {"cpu": "100m", "memory": "256Mi"}
    owner = {"apiVersion": API_VERSION, "kind": "DLJob", "name": meta["name"], "uid": meta["uid"]}
    container = {
        "name": CONTAINER,
        "image": image,
        "command": ["python3", "-c", _WAIT],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "checkpoints", "mountPath": CHECKPOINT_DIR, "readOnly": True}],
    }  # fmt: skip
    if policy := trainer.get("imagePullPolicy"):
        container["imagePullPolicy"] = policy
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": LIMIT_S,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID, "fsGroup": UID,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}],
    }  # fmt: skip
    if secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in secrets]
    if tolerations := _tolerations(spec, defaults):
        pod["tolerations"] = tolerations
    if defaults.runtime_class_name:
        pod["runtimeClassName"] = defaults.runtime_class_name
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{meta['name']}-reader-{token}",
            "namespace": meta["namespace"],
            "labels": {"app.kubernetes.io/name": "dljob-reader", "app.kubernetes.io/instance": meta["name"]},
            "ownerReferences": [owner],
        },
        "spec": pod,
    }


def _tolerations(spec: Mapping[str, Any], defaults: JobDefaults) -> list[Any]:
    """Return the tolerations of the job's pods. The volume may be bound to one of their nodes."""
    own = (spec.get("scheduling") or {}).get("tolerations") or []
    given = defaults.scheduling.tolerations if defaults.scheduling else None
    others = [item.manifest() for item in given or ()]
    found = [*own, *(item for item in others if item not in own)]
    for override in spec.get("podTemplateOverrides") or ():
        # An override replaces a list whose items have no names.
        found = (override.get("spec") or {}).get("tolerations", found) or []
    return list(found)


def command(folder: str, *, whole: bool) -> list[str]:
    """Return the command that writes the files of ``folder`` to standard output as a tar archive.

    ``whole``: True: all files and folders. False: the files of a checkpoint that a trained model needs, and the files
    about the model and the run beside the folder.
    """
    return ["python3", "-c", _SEND, folder, "all" if whole else "model", *LEFT_OUT]


def running(pod: Mapping[str, Any]) -> bool:
    """Return True if the container runs."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any((each.get("state") or {}).get("running") is not None for each in statuses)


def trouble(pod: Mapping[str, Any], *, late: bool) -> str | None:
    """Return why the pod does not run; None while it may still start. ``late``: True if the time limit is over."""
    status = pod.get("status") or {}
    for each in status.get("containerStatuses") or ():
        state = each.get("state") or {}
        if ended := state.get("terminated"):
            return f"its container ended with exit code {ended.get('exitCode')} ({ended.get('reason', '')})"
        waiting = state.get("waiting") or {}
        if waiting.get("reason") in _HOPELESS or (late and waiting.get("reason")):
            return f"{waiting['reason']}: {waiting.get('message') or 'no message'}"
    if status.get("phase") in ("Failed", "Succeeded"):
        return str(status.get("message") or f"phase {status['phase']}")
    if not late:
        return None
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    return "it has not started"
