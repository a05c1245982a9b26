"""The look pod of a job: it looks at the data for ``spec.task``. It meets the Pod Security Standard ``restricted``."""

import hashlib
import json

from dljob.api import DLJobSpec
from dljob.api.defaults import JobDefaults
from dljob.cluster import quantity
from dljob.job.observed import DIGEST_ANNOTATION, JOB_LABEL, LOOK_CONTAINER, LOOK_LABEL, JobSeen
from dljob.job.task.suggestion import BASELINE_S, task_digest
from dljob.render import pods
from dljob.render.config import Manifest, RenderConfig
from dljob.render.environment import fetchers_variables
from dljob.render.names import Names, metadata
from dljob.render.volumes import dataset

DEADLINE_S = 600 + BASELINE_S
"""Seconds from the start of the pod after which Kubernetes ends it, with the time to fetch the data.

The baseline has its own time, so that it cannot fail a pod that has 600 seconds for the rest.
"""
MEMORY = "2Gi"
"""Memory of the pod, if the spec sets no ``resources.memory``."""
CPU = "500m"


def look_objects(job: JobSeen) -> tuple[Manifest, ...]:
    """Return the objects that the look pod needs: the ConfigMap for its result, and an account that may write it."""
    names = Names.of(job)
    rule = {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": [names.suggestion],
        "verbs": ["patch"],
    }
    group = "rbac.authorization.k8s.io"
    return (
        # Without data, which only the pod writes.
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, names.suggestion)},
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata(job, names.look),
            "automountServiceAccountToken": False,
        },
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata(job, names.look), "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(job, names.look),
            "roleRef": {"apiGroup": group, "kind": "Role", "name": names.look},
            "subjects": [{"kind": "ServiceAccount", "name": names.look, "namespace": job.namespace}],
        },
    )


def look_pod(job: JobSeen, spec: DLJobSpec, defaults: JobDefaults, config: RenderConfig) -> Manifest:
    """Return the look pod. ``spec``: the job's spec with a task, and with the administrator's ``defaults``."""
    names, scheduling = Names.of(job), spec.scheduling
    meta = metadata(job, names.look)
    meta["labels"] = {
        "app.kubernetes.io/name": "dljob-look",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": "dljob",
        JOB_LABEL: job.name,
        LOOK_LABEL: "true",
    }
    container = _container(job, spec, config)
    pod: Manifest = {
        "restartPolicy": "OnFailure",  # Kubernetes retries what may succeed later, until the deadline.
        "activeDeadlineSeconds": DEADLINE_S,
        "terminationGracePeriodSeconds": 1,
        "serviceAccountName": names.look,
        "automountServiceAccountToken": False,  # Only the program gets a token, not the container that fetches.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": pods.UID,
            "runAsGroup": pods.UID,
            "fsGroup": pods.UID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
            {"name": "api", "projected": {"defaultMode": 0o644, "sources": pods.api_access()}},
            *dataset.volume(spec),
        ],
    }
    if spec.dataset.remote or spec.dataset.checked:
        image = {"image": config.trainer_image, "imagePullPolicy": config.image_pull_policy}
        first = dataset.init_container(spec, image, fetchers_variables(spec), pods.security())
        pod["initContainers"] = [pods.sized_like(container, first)]
    if scheduling.node_selector:
        pod["nodeSelector"] = dict(scheduling.node_selector)
    if scheduling.tolerations:
        pod["tolerations"] = [dict(item) for item in scheduling.tolerations]
    if scheduling.priority_class_name:
        pod["priorityClassName"] = scheduling.priority_class_name
    if spec.trainer.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.trainer.image_pull_secrets]
    if defaults.runtime_class_name:
        pod["runtimeClassName"] = defaults.runtime_class_name
    digest = hashlib.sha256(json.dumps(pod, sort_keys=True).encode()).hexdigest()[:16]
    meta["annotations"] = {DIGEST_ANNOTATION: digest}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod}


def _container(job: JobSeen, spec: DLJobSpec, config: RenderConfig) -> Manifest:
    memory = spec.resources.memory or MEMORY
    limits = {"memory": memory} | ({"cpu": spec.resources.cpu_limit} if spec.resources.cpu_limit else {})
    cpu = spec.resources.cpu if spec.resources.cpu and spec.resources.cpu_limit else CPU
    if spec.resources.cpu_limit and quantity(spec.resources.cpu_limit) < quantity(cpu):
        cpu = spec.resources.cpu_limit  # The API server rejects a request above the limit.
    return {
        "name": LOOK_CONTAINER,
        "image": config.look_image,
        "imagePullPolicy": config.look_pull_policy,
        "command": ["python", "-m", "dljob.cli.look"],
        # The kubelet would replace references to variables, such as $(HOME), in the name of a column.
        "args": [argument.replace("$", "$$") for argument in _arguments(job, spec)],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": limits},
        "securityContext": pods.security(),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "api", "mountPath": pods.API_DIR, "readOnly": True},
            *dataset.mount(spec),
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _arguments(job: JobSeen, spec: DLJobSpec) -> list[str]:
    task, names = spec.task, Names.of(job)
    assert task is not None and spec.dataset.path is not None, "a rule of the API requires a dataset's URI with a task"
    # In one argument each, because the name of a column may begin with a dash.
    options = {
        "uri": (spec.dataset.uri or "").partition("?")[0],
        "type": task.type.value,
        "target": task.target,
        "text": task.text,
        "within": task.within,
        "uid": job.uid,
        "digest": task_digest(spec),
        "namespace": job.namespace,
        "config-map": names.suggestion,
    }
    return [spec.dataset.path, *(f"--{name}={value}" for name, value in options.items() if value is not None)]
