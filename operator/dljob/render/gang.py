"""The PodGroup of a job, with which a scheduler places all pods of the job together or none of them (gang scheduling).

There are three kinds of PodGroups: of Kubernetes' own scheduler, of the coscheduling plugin, and of Volcano. The chart
value ``gangScheduling`` chooses one for the installation. A plan stores the API version of the PodGroup that its pods
name, so that the pod templates of an accepted plan do not change with the installation or with the API server.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dljob.api import DLJobSpec
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
COSCHEDULING_API = "scheduling.x-k8s.io/v1alpha1"
VOLCANO_API = "scheduling.volcano.sh/v1beta1"
API_VERSIONS = {
    GangScheduling.KUBERNETES: (KUBERNETES_BETA, KUBERNETES_ALPHA),
    GangScheduling.COSCHEDULING: (COSCHEDULING_API,),
    GangScheduling.VOLCANO: (VOLCANO_API,),
}
"""API versions of the PodGroups of each scheduler, the preferred one first. Kubernetes 1.36 has the alpha version, 1.37
the beta version."""


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


_KUBERNETES = _Form(
    spec=lambda pods: {"schedulingPolicy": {"gang": {"minCount": pods}}},
    has_priority=True,
    is_mutable=False,
    member=lambda name: {"spec": {"schedulingGroup": {"podGroupName": name}}},
)
_FORMS = {
    KUBERNETES_BETA: _KUBERNETES,
    KUBERNETES_ALPHA: _KUBERNETES,
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


def api_for(spec: DLJobSpec, config: RenderConfig) -> str | None:
    """Return the API version of the PodGroup that the pods of a new plan name; None: the pods name no PodGroup.

    Volcano places only pods that name its scheduler, so jobs of the default scheduler get no PodGroup of Volcano.
    """
    if config.pod_group_api == VOLCANO_API and spec.scheduling.scheduler_name in (None, DEFAULT_SCHEDULER):
        return None
    return config.pod_group_api


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
    return ({"apiVersion": accepted.pod_group_api, "kind": "PodGroup", "metadata": meta, "spec": body},)


def _form(accepted: StoredPlan) -> _Form | None:
    # A later release may have stored another API version before a rollback.
    return _FORMS.get(accepted.pod_group_api) if accepted.pod_group_api is not None else None


def _spec(form: _Form, spec: DLJobSpec, accepted: StoredPlan) -> Manifest:
    body = form.spec(accepted.nodes)
    if form.has_priority and (priority := spec.scheduling.priority_class_name):
        body["priorityClassName"] = priority
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
