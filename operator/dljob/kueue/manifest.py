"""The Workload of a job: what the job asks Kueue for."""

from typing import Any

from dljob.api import DLJobSpec, PlanningMode
from dljob.job.observed import JobSeen
from dljob.job.plan.stored import StoredPlan
from dljob.job.queue import QueueSeen
from dljob.render import Names, RenderConfig
from dljob.render.config import Manifest
from dljob.render.names import metadata
from dljob.render.pods import pod_template

DIGEST_ANNOTATION = "dljob.dev/spec"
"""Annotation of a Workload: ``spec_digest`` of the job's spec for which the operator wrote the Workload."""
JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
FIRST_VERSION = "kueue.x-k8s.io/v1beta1"
"""In this version, two fields name the priority class and its kind. Later versions have one reference instead."""
_PRIORITY_GROUPS = {
    "WorkloadPriorityClass": ("kueue.x-k8s.io", "kueue.x-k8s.io/workloadpriorityclass"),
    "PriorityClass": ("scheduling.k8s.io", "scheduling.k8s.io/priorityclass"),
}
"""Kind of a priority class → its API group, and its name in ``FIRST_VERSION``."""


def workload(job: JobSeen, spec: DLJobSpec, accepted: StoredPlan, config: RenderConfig, seen: QueueSeen) -> Manifest:
    """Return the Workload with which a job asks Kueue for the resources of its plan, with one podSet for each group.

    The pod templates lack what Kueue adds with an admission. Kueue reads from them what a pod requests, and on which
    nodes it may run. ``accepted``: the plan. ``seen``: version of Kueue's API and value of the job's priority class.
    """
    asking = accepted.model_copy(update={"admission": None})
    minimum = accepted.least_nodes
    pod_sets: list[Manifest] = []
    for group in accepted.groups:
        item: Manifest = {
            "name": group.name,
            "count": group.nodes,
            "template": pod_template(job, spec, asking, group, config),
        }
        pod_sets.append(item | ({"minCount": minimum} if minimum is not None else {}))
    meta = metadata(job, Names.of(job).workload)
    meta["labels"] = {**meta["labels"], JOB_UID_LABEL: job.uid}
    meta["annotations"] = {DIGEST_ANNOTATION: accepted.spec_digest}
    ask: Manifest = {"queueName": job.queue, "active": True, "podSets": pod_sets}
    return {
        "apiVersion": seen.api_version,
        "kind": "Workload",
        "metadata": meta,
        "spec": ask | _priority(job, spec, seen),
    }


def partial_minimum(spec: DLJobSpec, accepted: StoredPlan) -> int | None:
    """Return the smallest number of pods with which Kueue may admit the job; None if it needs all pods of its plan.

    Kueue can reduce the pods of one podSet only, so a plan with several groups needs all its pods. A plan that splits
    or shards the model and a plan whose groups the user fixes need all their pods, too.
    """
    whole = accepted.plan.splits_model or accepted.plan.shards_model
    if len(accepted.groups) > 1 or whole or spec.planning.mode is PlanningMode.FIXED:
        return None
    least = max(2, spec.nodes.min) if spec.parallelism.asynchronous else spec.nodes.min
    return least if least < accepted.nodes else None


def priority_class(job: JobSeen, spec: DLJobSpec) -> tuple[str, str] | None:
    """Return (kind, name) of the class that determines the priority of the Workload; None if the job names no class.

    A WorkloadPriorityClass of Kueue, which a label of the job names, takes precedence over the PriorityClass of the
    pods, which the spec names.
    """
    if job.queue_priority:
        return "WorkloadPriorityClass", job.queue_priority
    if spec.scheduling.priority_class_name:
        return "PriorityClass", spec.scheduling.priority_class_name
    return None


def _priority(job: JobSeen, spec: DLJobSpec, seen: QueueSeen) -> dict[str, Any]:
    found = priority_class(job, spec)
    if found is None or seen.priority is None:
        return {}
    kind, name = found
    group, source = _PRIORITY_GROUPS[kind]
    if seen.api_version == FIRST_VERSION:
        return {"priorityClassName": name, "priorityClassSource": source, "priority": seen.priority}
    return {"priorityClassRef": {"group": group, "kind": kind, "name": name}, "priority": seen.priority}
