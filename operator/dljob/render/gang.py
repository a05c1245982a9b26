"""The PodGroup of a job, with which a scheduler places all pods of the job together or none of them (gang scheduling).

There are three kinds of PodGroups: of Kubernetes' own scheduler, of the coscheduling plugin, and of Volcano. The chart
value ``gangScheduling`` chooses one for the installation. A plan stores the API version of the PodGroup that its pods
name, so that the pod templates of an accepted plan do not change with the installation or with the API server.

In Kubernetes 1.35, the PodGroup is a part of an object of the kind Workload. This is not the Workload of Kueue.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dljob.api import DLJobSpec
from dljob.cluster.domains import ZONE_LABEL, Domain
from dljob.job.observed import JobSeen
from dljob.job.plan.stored import StoredPlan
from dljob.render.config import Manifest, RenderConfig
from dljob.render.names import metadata

DEFAULT_SCHEDULER = "default-scheduler"
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
"""Annotation of pods with the name of their queue, as Volcano reads it. An override of a job can set it."""


class GangScheduling(StrEnum):
    """Values of the chart value ``gangScheduling``."""

    NONE = "none"
    KUBERNETES = "kubernetes"
    COSCHEDULING = "coscheduling"
    VOLCANO = "volcano"


KUBERNETES_BETA = "scheduling.k8s.io/v1beta1"
KUBERNETES_ALPHA = "scheduling.k8s.io/v1alpha2"
KUBERNETES_FIRST = "scheduling.k8s.io/v1alpha1"
COSCHEDULING_API = "scheduling.x-k8s.io/v1alpha1"
VOLCANO_API = "scheduling.volcano.sh/v1beta1"
API_VERSIONS = {
    GangScheduling.KUBERNETES: (KUBERNETES_BETA, KUBERNETES_ALPHA, KUBERNETES_FIRST),
    GangScheduling.COSCHEDULING: (COSCHEDULING_API,),
    GangScheduling.VOLCANO: (VOLCANO_API,),
}
"""API versions of the PodGroups of each scheduler, the preferred one first.

Kubernetes 1.35 has v1alpha1, 1.36 has v1alpha2, and 1.37 has v1beta1.
"""
_WORKLOAD_GROUP = "pods"
"""Name of the only PodGroup in a Workload of Kubernetes 1.35."""


@dataclass(frozen=True)
class _Form:
    """The form of PodGroups in one API version: their spec, and how a pod names its PodGroup."""

    spec: Callable[[int], Manifest]
    """Number of pods → spec of the PodGroup."""
    has_priority: bool
    """True if the PodGroup has a priority class, like its pods."""
    is_mutable: bool
    """True if the API server lets the spec of a PodGroup change."""
    member: Callable[[str], Manifest]
    """Name of the PodGroup → the part of a pod template that names it."""
    has_topology: bool = False
    """True if the PodGroup can require that all pods run on nodes with the same value of a label.

    The API server drops the requirement unless its feature gate TopologyAwareWorkloadScheduling is on."""
    kind: str = "PodGroup"
    plural: str = "podgroups"


_KUBERNETES = _Form(
    spec=lambda pods: {"schedulingPolicy": {"gang": {"minCount": pods}}},
    has_priority=True,
    is_mutable=False,
    member=lambda name: {"spec": {"schedulingGroup": {"podGroupName": name}}},
    has_topology=True,
)
_FORMS = {
    KUBERNETES_BETA: _KUBERNETES,
    KUBERNETES_ALPHA: _KUBERNETES,
    KUBERNETES_FIRST: _Form(
        spec=lambda pods: {"podGroups": [{"name": _WORKLOAD_GROUP, "policy": {"gang": {"minCount": pods}}}]},
        has_priority=False,
        is_mutable=False,
        member=lambda name: {"spec": {"workloadRef": {"name": name, "podGroup": _WORKLOAD_GROUP}}},
        kind="Workload",
        plural="workloads",
    ),
    COSCHEDULING_API: _Form(
        spec=lambda pods: {"minMember": pods},
        has_priority=False,
        is_mutable=True,
        member=lambda name: {"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": name}}},
    ),
    VOLCANO_API: _Form(
        spec=lambda pods: {"minMember": pods},
        has_priority=True,
        is_mutable=True,
        member=lambda name: {"metadata": {"annotations": {"scheduling.k8s.io/group-name": name}}},
    ),
}


def kind_of(api_version: str) -> tuple[str, str]:
    """Return the kind of the object with which pods are placed together in an API version, and the plural of its name.

    ``api_version``: one of ``API_VERSIONS``.
    """
    return _FORMS[api_version].kind, _FORMS[api_version].plural


def api_for(spec: DLJobSpec, config: RenderConfig) -> str | None:
    """Return the API version of the PodGroup that the pods of a new plan name; None: the pods name no PodGroup.

    Volcano places only pods that name its scheduler, so jobs of the default scheduler get no PodGroup of Volcano.
    """
    if config.pod_group_api == VOLCANO_API and spec.scheduling.scheduler_name in (None, DEFAULT_SCHEDULER):
        return None
    return config.pod_group_api


def topology_key(spec: DLJobSpec, config: RenderConfig, domain: Domain, rack_label: str) -> str | None:
    """Return the label that has the same value on all nodes of a new plan: that of racks, or else that of zones.

    ``domain``: the part of the cluster for which the plan was priced. ``rack_label``: label of the nodes' racks. Return
    None if the plan may span racks and zones, or if PodGroups of the plan cannot require such a label.
    """
    form = _FORMS.get(api_for(spec, config) or "")
    if form is None or not form.has_topology or not domain.terms:
        return None
    fixed = [{item.key: item.values for item in term if item.operator == "In"} for term in domain.terms]
    for key in (rack_label, ZONE_LABEL):
        values = {term.get(key, ()) for term in fixed}
        if len(values) == 1 and len(values.pop()) == 1:
            return key
    return None


def with_pod_group(template: Manifest, job: JobSeen, spec: DLJobSpec, accepted: StoredPlan) -> Manifest:
    """Return the pod template with the name of the PodGroup to which the pods belong.

    If the plan has no PodGroup, return the template unchanged.
    """
    form = _form(accepted)
    return template if form is None else _joined(template, form.member(_name(job, form, _spec(form, spec, accepted))))


def pod_group(job: JobSeen, spec: DLJobSpec, accepted: StoredPlan, config: RenderConfig) -> tuple[Manifest, ...]:
    """Return a tuple with the manifest of the plan's PodGroup, or an empty tuple.

    The tuple is empty if the plan's pods name no PodGroup, or if they name one of an API version that the installation
    no longer uses.

    The PodGroup requires all pods of the plan, so the scheduler places the first pods only together. Later, pods that
    still run count too, so the scheduler places a replacement pod alone.
    """
    form = _form(accepted)
    if form is None or accepted.pod_group_api != config.pod_group_api:
        return ()
    body = _spec(form, spec, accepted)
    meta = metadata(job, _name(job, form, body))
    return ({"apiVersion": accepted.pod_group_api, "kind": form.kind, "metadata": meta, "spec": body},)


def _form(accepted: StoredPlan) -> _Form | None:
    # A later release may have stored another API version before a rollback.
    return _FORMS.get(accepted.pod_group_api) if accepted.pod_group_api is not None else None


def _spec(form: _Form, spec: DLJobSpec, accepted: StoredPlan) -> Manifest:
    body = form.spec(accepted.nodes)
    if form.has_priority and (priority := spec.scheduling.priority_class_name):
        body["priorityClassName"] = priority
    if form.has_topology and accepted.topology_key is not None:
        body["schedulingConstraints"] = {"topology": [{"key": accepted.topology_key}]}
    if accepted.pod_group_api == VOLCANO_API and (queue := _volcano_queue(spec)):
        body["queue"] = queue
    return body


def _volcano_queue(spec: DLJobSpec) -> str | None:
    named = [override.metadata.annotations.get(VOLCANO_QUEUE) for override in spec.pod_template_overrides]
    return next((queue for queue in reversed(named) if queue), None)


def _name(job: JobSeen, form: _Form, body: Manifest) -> str:
    """Return the name of a PodGroup with the spec ``body``.

    If specs cannot change, the name contains a digest of the spec. A plan that needs another spec then gets another
    PodGroup, and pods that run keep theirs. The garbage collector deletes all of them with the job.
    """
    if form.is_mutable:
        return job.name
    return f"{job.name}-{hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:8]}"


def _joined(base: Any, more: Manifest) -> Manifest:
    """Return ``base`` with the fields of ``more`` added, also in nested maps. A value in ``more`` takes precedence."""
    result = dict(base)
    for key, value in more.items():
        result[key] = _joined(base.get(key, {}), value) if isinstance(value, dict) else value
    return result
