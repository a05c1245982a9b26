"""Overrides and what they need, for the Python rule and the admission policy alike."""

from typing import Any

Json = dict[str, Any]


def trainer(**fields: Any) -> Json:
    return {"containers": [{"name": "trainer", **fields}]}


def volume(**fields: Any) -> Json:
    return {"volumes": [{"name": "more", **fields}]}


SAFE: dict[str, Json] = {
    "nothing": {},
    "node selector": {"nodeSelector": {"a": "b"}},
    "tolerations": {"tolerations": [{"operator": "Exists"}]},
    "affinity": {"affinity": {"nodeAffinity": {}}},
    "runtime class": {"runtimeClassName": "gvisor"},
    "scheduler": {"schedulerName": "volcano"},
    "extended resources": trainer(resources={"limits": {"rdma/hca": "1"}, "requests": {"rdma/hca": "1"}}),
    "environment": trainer(env=[{"name": "A", "value": "b"}]),
    "config map": volume(configMap={"name": "scripts"}),
    "scratch": volume(emptyDir={"medium": "Memory"}),
    "claim": volume(persistentVolumeClaim={"claimName": "data"}),
    "mount": trainer(volumeMounts=[{"name": "more", "mountPath": "/more"}]),
    "secret volume": volume(secret={"secretName": "marked"}),
    "secret variable": trainer(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "marked", "key": "a"}}}]),
    "config variable": trainer(env=[{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]),
    "config environment": trainer(envFrom=[{"configMapRef": {"name": "c"}}]),
    "field variable": trainer(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
    "secret environment": trainer(envFrom=[{"prefix": "A_", "secretRef": {"name": "marked"}}]),
}
UNSAFE: dict[str, tuple[Json, str]] = {
    # name: (part of a pod spec, end of the path that the message names)
    "host network": ({"hostNetwork": True}, ".hostNetwork"),
    "host processes": ({"hostPID": True}, ".hostPID"),
    "service account": ({"serviceAccountName": "admin"}, ".serviceAccountName"),
    "old service account": ({"serviceAccount": "admin"}, ".serviceAccount"),
    "security context": ({"securityContext": {"runAsUser": 0}}, ".securityContext"),
    "node": ({"nodeName": "control-plane"}, ".nodeName"),
    "init container": ({"initContainers": [{"name": "x", "image": "y"}]}, ".initContainers"),
    "priority": ({"priorityClassName": "system-node-critical"}, ".priorityClassName"),
    "sidecar": ({"containers": [{"name": "sidecar", "image": "x"}]}, ".containers[0].image"),
    "unnamed container": ({"containers": [{"name": "sidecar"}]}, ".containers[0].name"),
    "privileged": (trainer(securityContext={"privileged": True}), ".containers[0].securityContext"),
    "image": (trainer(image="other"), ".containers[0].image"),
    "command": (trainer(command=["sh"]), ".containers[0].command"),
    "lifecycle": (trainer(lifecycle={}), ".containers[0].lifecycle"),
    "processor": (trainer(resources={"requests": {"cpu": "0"}}), ".resources.requests.cpu"),
    "no resources": (trainer(resources=None), ".resources"),
    "no limits": (trainer(resources={"limits": None}), ".resources.limits"),
    "claims": (trainer(resources={"claims": [{"name": "gpu"}]}), ".resources.claims"),
    "resource variable": (
        trainer(env=[{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}]),
        ".valueFrom.resourceFieldRef",
    ),
    "unknown source": (trainer(envFrom=[{"other": {"name": "c"}}]), ".envFrom[0].other"),
    "host path": (volume(hostPath={"path": "/"}), ".volumes[0].hostPath"),
    "projected": (volume(projected={"sources": []}), ".volumes[0].projected"),
    "csi": (volume(csi={"driver": "x"}), ".volumes[0].csi"),
    "no list": ({"containers": {"name": "trainer", "image": "x"}}, ".containers"),
}
UNSAFE_ANNOTATIONS = (
    "container.apparmor.security.beta.kubernetes.io/trainer",
    "container.seccomp.security.alpha.kubernetes.io/trainer",
    "seccomp.security.alpha.kubernetes.io/pod",
)
SAFE_ANNOTATIONS = ("sidecar.istio.io/inject", "example.com/seccomp.security.alpha.kubernetes.io", "note")


def annotated(key: str) -> Json:
    """Return an override that adds an annotation to the pods."""
    return {"manager": "me", "metadata": {"annotations": {key: "unconfined"}}}
