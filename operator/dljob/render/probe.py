"""The pod that measures the hardware of a node. It meets the Pod Security Standard ``restricted``."""

from collections.abc import Sequence
from dataclasses import dataclass

from dljob.cluster.catalogue import GPU_RESOURCES, vendor
from dljob.job.probe_targets import Target
from dljob.render.config import Manifest
from dljob.render.pods import UID

PROBE_LABEL = "dljob.dev/hardware-probe"
CONTAINER = "probe"
PEER_PORT = 28470
DEADLINE_S = 600
"""Seconds after which Kubernetes ends the pod, with the time to pull its image. The program takes 10 to 20 s."""
SCRATCH, SCRATCH_SIZE, MEMORY = "/scratch", "1Gi", "2Gi"
SERVES_S = 300
"""Seconds for which the peer answers. The command deletes it earlier."""


@dataclass(frozen=True)
class ProbeImage:
    """The image of the probe's pods, and how nodes get it and run it."""

    image: str
    pull_secrets: tuple[str, ...] = ()
    runtime_class: str | None = None
    tolerations: tuple[Manifest, ...] = ()


def probe_pod(name: str, namespace: str, target: Target, image: ProbeImage, peer: str | None = None) -> Manifest:
    """Return the pod that measures ``target``. ``peer``: address of a pod on another node that answers messages."""
    arguments = ["--device", "gpu" if target.is_gpu else "cpu", "--scratch", SCRATCH]
    if not target.is_gpu and target.cpu >= 2:
        arguments.append("--node-link")
    if peer is not None:
        host = f"[{peer}]" if ":" in peer else peer
        arguments += ["--peer", f"{host}:{PEER_PORT}"]
    return _pod(name, namespace, target.node, target, image, arguments)


def peer_pod(name: str, namespace: str, target: Target, image: ProbeImage) -> Manifest:
    """Return the pod that answers the messages of a probe, on the target's second node."""
    assert target.peer is not None, "the caller chose a target with a second node"
    arguments = ["--serve", str(PEER_PORT), "--seconds", str(SERVES_S)]
    return _pod(name, namespace, target.peer, target, image, arguments, computes=False)


def _pod(
    name: str,
    namespace: str,
    node: str,
    target: Target,
    image: ProbeImage,
    arguments: Sequence[str],
    computes: bool = True,
) -> Manifest:
    requests: Manifest = {"cpu": f"{int(1000 * min(1.0, target.cpu)) if computes else 100}m", "memory": MEMORY}
    limits: Manifest = {"memory": MEMORY}  # no limit of CPUs: on an idle node, the probe uses all of them
    tolerations = [dict(item) for item in image.tolerations]
    if target.is_gpu:
        resource = GPU_RESOURCES[vendor(target.device)]
        tolerations.append({"key": resource, "operator": "Exists", "effect": "NoSchedule"})
        if computes:
            requests[resource] = limits[resource] = "1"
    own = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    pod: Manifest = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": DEADLINE_S,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [own]}}},
        "containers": [
            {
                "name": CONTAINER,
                "image": image.image,
                "command": ["python", "-m", "dltrain.hardware_probe", *arguments],
                "resources": {"requests": requests, "limits": limits},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "scratch", "mountPath": SCRATCH}, {"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [
            {"name": "scratch", "emptyDir": {"sizeLimit": SCRATCH_SIZE}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
        ],
    }
    if tolerations:
        pod["tolerations"] = tolerations
    if image.pull_secrets:
        pod["imagePullSecrets"] = [{"name": each} for each in image.pull_secrets]
    if image.runtime_class:
        pod["runtimeClassName"] = image.runtime_class
    labels = {"app.kubernetes.io/managed-by": "dljob", PROBE_LABEL: "true"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": pod,
    }
