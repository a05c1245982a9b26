"""The StatefulSets of a job, one per group of the plan."""

from dljob.api import DLJobSpec
from dljob.job.observed import GROUP_LABEL, JOB_LABEL, SPEC_ANNOTATION, JobSeen
from dljob.job.plan.pod_groups import PodGroup
from dljob.job.plan.stored import StoredPlan
from dljob.render.config import Manifest, RenderConfig
from dljob.render.names import Names, labels, metadata
from dljob.render.pods import pod_template


def stateful_set(
    job: JobSeen, spec: DLJobSpec, accepted: StoredPlan, group: PodGroup, config: RenderConfig
) -> Manifest:
    """Return the StatefulSet that runs the pods of one group of the plan, which are on one type of device.

    The StatefulSet starts all pods at once and does not update running pods. The operator changes its pod template only
    while it has zero replicas.
    """
    names = Names.of(job)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(job, names.set(group.name))
        | {"labels": labels(job, group.name), "annotations": {SPEC_ANNOTATION: accepted.revision}},
        "spec": {
            "replicas": group.nodes,
            "serviceName": names.service,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": {JOB_LABEL: job.name, GROUP_LABEL: group.name}},
            "template": pod_template(job, spec, accepted, group, config),
        },
    }


def stateful_sets(job: JobSeen, spec: DLJobSpec, accepted: StoredPlan, config: RenderConfig) -> tuple[Manifest, ...]:
    return tuple(stateful_set(job, spec, accepted, group, config) for group in accepted.groups)
