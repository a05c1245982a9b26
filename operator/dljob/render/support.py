"""Kubernetes objects that the pods of a job need before they start.

These are the ServiceAccount with its Role, the ConfigMaps of plan and report, the Service, the NetworkPolicy and the
volume claim.
"""

from collections.abc import Iterable

from dlcontract import AGENT_PORT, METRICS_PORT
from dljob.api import DLJobSpec
from dljob.api.spec import ReclaimPolicy
from dljob.job.observed import JOB_LABEL, ClassSeen, JobSeen
from dljob.job.plan.stored import StoredPlan
from dljob.render.config import Manifest, RenderConfig
from dljob.render.disruption import budget
from dljob.render.gang import pod_group
from dljob.render.names import Names, metadata
from dljob.render.network_policy import network_policy
from dljob.render.volumes.access_mode import claim_mode


def plan_config_map(job: JobSeen, accepted: StoredPlan) -> Manifest:
    name = Names.of(job).plan
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, name), "data": accepted.data()}


def _report_config_map(job: JobSeen) -> Manifest:
    """Return the ConfigMap for the job's report (the trainer's progress) without the field ``data``.

    Only the job's coordinator writes ``data``. When the operator applies the manifest, it therefore does not
    change the report.
    """
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, Names.of(job).report)}


def _logs_config_map(job: JobSeen) -> Manifest:
    """Return the ConfigMap of the ranks' last output, which the coordinator fills.

    It lacks the label of the job's objects, so that the operator does not watch it and never has its content in memory.
    """
    meta = metadata(job, Names.of(job).logs)
    meta["labels"] = {key: value for key, value in meta["labels"].items() if key != JOB_LABEL}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}


def _service_account(job: JobSeen) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(job, Names.of(job).account),
        "automountServiceAccountToken": False,
    }


def _role(job: JobSeen) -> Manifest:
    """Return the Role of the job's agents. They may only read the plan, and read and write the report and logs."""
    names = Names.of(job)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(job, names.account),
        "rules": [
            {
                "apiGroups": [""],
                "resources": ["configmaps"],
                "resourceNames": [names.plan],
                "verbs": ["get", "list", "watch"],
            },
            {
                "apiGroups": [""],
                "resources": ["configmaps"],
                "resourceNames": [names.report, names.logs],
                "verbs": ["get", "update", "patch"],
            },
        ],
    }


def _role_binding(job: JobSeen) -> Manifest:
    name = Names.of(job).account
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(job, name),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.namespace}],
    }


def _service(job: JobSeen) -> Manifest:
    """Return the headless Service of the job's pods.

    It publishes the addresses of pods that are not ready, because agents must find each other to become ready.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, Names.of(job).service),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: job.name},
            "ports": [
                {"name": "agent", "port": AGENT_PORT, "targetPort": AGENT_PORT, "protocol": "TCP"},
                {"name": "metrics", "port": METRICS_PORT, "targetPort": METRICS_PORT, "protocol": "TCP"},
            ],
        },
    }


def checkpoint_claim(
    job: JobSeen, spec: DLJobSpec, accepted: StoredPlan, classes: Iterable[ClassSeen] | None
) -> Manifest | None:
    """Return the volume claim for checkpoints, or None if the job needs none.

    It needs none if the user names a claim or an object store, or disables checkpoints.

    ``classes``: the storage classes of the cluster, on which its access mode depends (``claim_mode``); None: unknown.
    """
    volume = spec.checkpoint.volume
    if not spec.checkpoint.creates_claim:
        return None
    claim: Manifest = {
        "accessModes": [claim_mode(spec, accepted.nodes, classes)],
        "resources": {"requests": {"storage": volume.size}},
    }
    if volume.storage_class_name:
        claim["storageClassName"] = volume.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(job, Names.of(job).claim, owned=volume.reclaim_policy is ReclaimPolicy.DELETE),
        "spec": claim,
    }


def support(job: JobSeen, spec: DLJobSpec, accepted: StoredPlan, config: RenderConfig) -> tuple[Manifest, ...]:
    """Return the manifests of all objects that the pods need, except the volume claim and the Secret with the TLS keys.

    ``checkpoint_claim`` returns the claim. The package ``kube`` creates the Secret, because it must generate the keys.
    """
    return (
        _service_account(job),
        _role(job),
        _role_binding(job),
        plan_config_map(job, accepted),
        _report_config_map(job),
        _logs_config_map(job),
        _service(job),
        network_policy(job, spec, accepted, config),
        *budget(job, spec),
        *pod_group(job, spec, accepted, config),
    )
