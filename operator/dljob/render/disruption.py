"""Protection of a job's pods against voluntary disruptions: drained nodes, and nodes that autoscalers remove."""

from dljob.api import GROUP, Disruption, DLJobSpec
from dljob.job.observed import JOB_LABEL, JobSeen
from dljob.render.config import Manifest
from dljob.render.names import Names, metadata

LABEL = f"{GROUP}/disruption"
"""Label of the pods that the PodDisruptionBudget selects. A budget that still exists after a change of the spec selects
no pods without the label."""
_AVOID = "avoid"
_MARKS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Annotations of a pod that prevent Cluster Autoscaler and Karpenter from removing its node."""


def marked(template: Manifest, spec: DLJobSpec) -> Manifest:
    """Return the metadata of a pod template with the label and annotations that protect the pod against disruptions.

    ``template``: the metadata without these. Return it unchanged unless the spec asks for protection
    (``scheduling.disruption: Avoid``).
    """
    if spec.scheduling.disruption is not Disruption.AVOID:
        return template
    return {
        **template,
        "labels": {**template["labels"], LABEL: _AVOID},
        "annotations": {**template["annotations"], **_MARKS},
    }


def budget(job: JobSeen, spec: DLJobSpec) -> tuple[Manifest, ...]:
    """Return the PodDisruptionBudget that forbids the eviction of the job's ready pods.

    Draining a node then waits until the job has ended. Return an empty tuple if the spec allows disruptions.
    """
    if spec.scheduling.disruption is not Disruption.AVOID:
        return ()
    made = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(job, Names.of(job).service),
        "spec": {
            "maxUnavailable": 0,
            "selector": {"matchLabels": {JOB_LABEL: job.name, LABEL: _AVOID}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
    return (made,)
