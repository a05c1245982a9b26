"""Serve something from a pod of the cluster: a program in the trainer image, behind a Service."""

from typing import Any

from support.cluster.kubectl import Kubectl


def trainer_image(admin: Kubectl) -> str:
    """Return the reference of the trainer image that the installed operator uses."""
    [operator] = Kubectl(admin.kubeconfig, "dljob-system").list("deployments", "app.kubernetes.io/name=dljob")
    environment = operator["spec"]["template"]["spec"]["containers"][0]["env"]
    return str(next(item["value"] for item in environment if item["name"] == "DLJOB_TRAINER_IMAGE"))


def pod_server(name: str, image: str, program: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a Pod and a Service, both called ``name``. ``program``: Python code that serves on port 8080.

    The pod satisfies the Pod Security Standard ``restricted``. Only /tmp can be written.
    """
    restricted = {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True, "runAsUser": 65532,
        "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    container = {
        "name": name, "image": image, "imagePullPolicy": "IfNotPresent", "command": ["python", "-c", program],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}], "securityContext": restricted,
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
    }  # fmt: skip
    pod = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    meta = {"name": name, "labels": {"app": name}}
    service = {"selector": {"app": name}, "ports": [{"port": 8080}]}
    return (
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service},
    )
