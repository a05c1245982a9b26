"""The pod that measures the hardware of a node. It meets the Pod Security Standard ``restricted``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dljob.api.defaults import JobDefaults
from dljob.cluster.catalogue import GPU_RESOURCES, vendor
from dljob.job.probes.targets import Target
from dljob.render.config import Manifest, RenderConfig
from dljob.render.pods import UID

PROBE_LABEL = "dljob.dev/hardware-probe"
BY_COMMAND, BY_OPERATOR = "command", "operator"
"""Values of ``PROBE_LABEL``: who started the pod, and deletes it."""
DEVICE_ANNOTATION, NODE_ANNOTATION = "dljob.dev/probed-device", "dljob.dev/probed-node"
LINK_ANNOTATION, CLIENT_NODE_ANNOTATION = "dljob.dev/probed-link", "dljob.dev/client-node"
"""On pods that measure only a link: ``server`` or ``client``; and on the server, the node for the client."""
PEER_DEVICE_ANNOTATION = "dljob.dev/probed-peer-device"
"""On pods that measure the link between nodes of two device types: that of the server's node. The type in
``DEVICE_ANNOTATION`` is then that of the client's node."""
CONTAINER = "probe"
PEER_PORT = 28470
DEADLINE_S = 600
"""Seconds after which Kubernetes ends the pod, with the time to pull its image. The program takes 10 to 20 s."""
SCRATCH, SCRATCH_SIZE, MEMORY = "/scratch", "1Gi", "2Gi"
PROBE_PRIORITY = -1000
"""Priority of the operator's probe pods, by the chart's PriorityClass. Any other pod takes their place, and the Cluster
Autoscaler adds and keeps no nodes for pods below its cut-off of -10."""
SERVES_S = 300
"""Seconds for which the peer answers. The command deletes it earlier."""


@dataclass(frozen=True)
class ProbeImage:
    """The image of the probe's pods, and how nodes get it and run it."""

    image: str
    pull_secrets: tuple[str, ...] = ()
    runtime_class: str | None = None
    tolerations: tuple[Manifest, ...] = ()
    pull_policy: str = "IfNotPresent"
    priority_class: str | None = None


def configured(config: RenderConfig, priority_class: str | None = None) -> ProbeImage:
    """Return the operator's trainer image, with the administrator's defaults for pods of jobs."""
    image = with_defaults(config.trainer_image, config.job_defaults, config.image_pull_policy)
    return replace(image, priority_class=priority_class)


def gives_way(body: Mapping[str, Any]) -> bool:
    """Return True if a pod is a probe of the operator, which leaves its node to every other pod."""
    labels, priority = body["metadata"].get("labels") or {}, body["spec"].get("priority")
    return labels.get(PROBE_LABEL) == BY_OPERATOR and isinstance(priority, int) and priority <= PROBE_PRIORITY


def with_defaults(image: str, defaults: JobDefaults, pull_policy: str = "IfNotPresent") -> ProbeImage:
    """Return the image with the pull secrets, the runtime class and the tolerations of jobs."""
    scheduling, trainer = defaults.scheduling, defaults.trainer
    return ProbeImage(
        image,
        tuple(trainer.image_pull_secrets or ()) if trainer else (),
        scheduling.runtime_class_name if scheduling else None,
        tuple(item.manifest() for item in scheduling.tolerations or ()) if scheduling else (),
        pull_policy,
    )


def probe_pod(
    name: str,
    namespace: str,
    target: Target,
    image: ProbeImage,
    peer: str | None = None,
    by: str = BY_COMMAND,
    structures: int | None = None,
) -> Manifest:
    """Return the pod that measures ``target``.

    ``peer``: address of a pod on another node that answers messages. ``by``: who starts the pod. ``structures``: number
    of random networks to train.
    """
    arguments = ["--device", "gpu" if target.is_gpu else "cpu", "--scratch", SCRATCH]
    if not target.is_gpu and target.cpu >= 2:
        arguments.append("--node-link")
    if structures is not None:
        arguments += ["--structures", str(structures)]
    if peer is not None:
        arguments += _connecting_to(peer)
    return _pod(name, namespace, target.node, target, image, arguments, by=by)


def peer_pod(name: str, namespace: str, target: Target, image: ProbeImage, by: str = BY_COMMAND) -> Manifest:
    """Return the pod that answers the messages of a probe, on the target's second node. ``by``: who starts it."""
    assert target.peer is not None, "the caller chose a target with a second node"
    arguments = ["--serve", str(PEER_PORT), "--seconds", str(SERVES_S)]
    return _pod(name, namespace, target.peer, target, image, arguments, computes=False, by=by)


def link_server_pod(name: str, namespace: str, target: Target, image: ProbeImage) -> Manifest:
    """Return the pod of the operator that answers messages on the target's second node, to measure only the link."""
    pod = peer_pod(name, namespace, target, image, by=BY_OPERATOR)
    pod["metadata"]["annotations"] |= {LINK_ANNOTATION: "server", CLIENT_NODE_ANNOTATION: target.node}
    return pod


def link_client_pod(
    name: str, namespace: str, target: Target, image: ProbeImage, server: str, by: str = BY_OPERATOR
) -> Manifest:
    """Return the pod that measures only the link to the pod with the address ``server``. ``by``: who starts it."""
    arguments = [*_connecting_to(server), "--only-link"]
    pod = _pod(name, namespace, target.node, target, image, arguments, computes=False, by=by)
    pod["metadata"]["annotations"] |= {LINK_ANNOTATION: "client"}
    return pod


def _connecting_to(address: str) -> list[str]:
    """Return the options with which a probe connects to a serving pod."""
    host = f"[{address}]" if ":" in address else address
    return ["--peer", f"{host}:{PEER_PORT}"]


def _pod(
    name: str,
    namespace: str,
    node: str,
    target: Target,
    image: ProbeImage,
    arguments: Sequence[str],
    computes: bool = True,
    by: str = BY_COMMAND,
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
                "imagePullPolicy": image.pull_policy,
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
    if image.priority_class:
        pod["priorityClassName"] = image.priority_class
    if image.runtime_class:
        pod["runtimeClassName"] = image.runtime_class
    labels = {"app.kubernetes.io/managed-by": "dljob", PROBE_LABEL: by}
    annotations = {DEVICE_ANNOTATION: target.device, NODE_ANNOTATION: node}
    if target.other:
        annotations[PEER_DEVICE_ANNOTATION] = target.other
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels, "annotations": annotations},
        "spec": pod,
    }
