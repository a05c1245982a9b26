"""The ProvisioningRequest of a job: it asks an autoscaler of the cluster for the nodes of a plan, before pods exist.

It is an API of the Cluster Autoscaler (cluster-autoscaler/apis/provisioningrequest in kubernetes/autoscaler). Each of
its pod sets refers to a PodTemplate. The pods that use the nodes name the request in an annotation.
"""

import hashlib
import json

from dljob.api import DLJobSpec
from dljob.job.observed import SPEC_ANNOTATION, JobSeen
from dljob.job.plan.stored import StoredPlan
from dljob.render.config import Manifest, RenderConfig
from dljob.render.names import Names, metadata
from dljob.render.pods import pod_template

PROVISIONING_API = "autoscaling.x-k8s.io/v1"
MAX_POD_SETS = 32
"""Maximum number of pod sets of a ProvisioningRequest."""


def pod_templates(job: JobSeen, spec: DLJobSpec, accepted: StoredPlan, config: RenderConfig) -> tuple[Manifest, ...]:
    """Return one PodTemplate for each group of the plan, with the template of the group's pods."""
    return tuple(
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": metadata(job, Names.of(job).set(group.name)),
            "template": pod_template(job, spec, accepted, group, config),
        }
        for group in accepted.groups
    )


def provisioning_request(job: JobSeen, accepted: StoredPlan, templates: tuple[Manifest, ...]) -> Manifest:
    """Return the ProvisioningRequest for all pods of a plan. ``templates``: those that ``pod_templates`` returns.

    Its annotation ``SPEC_ANNOTATION`` is a digest of all that it asks for, because nobody can change its spec.
    """
    sets = [
        {"podTemplateRef": {"name": template["metadata"]["name"]}, "count": group.nodes}
        for template, group in zip(templates, accepted.groups, strict=True)
    ]
    ask = {"provisioningClassName": accepted.provisioning_class, "podSets": sets}
    text = json.dumps([ask, [template["template"] for template in templates]], sort_keys=True)
    annotations = {SPEC_ANNOTATION: hashlib.sha256(text.encode()).hexdigest()[:16]}
    meta = metadata(job, Names.of(job).provisioning, annotations=annotations)
    return {"apiVersion": PROVISIONING_API, "kind": "ProvisioningRequest", "metadata": meta, "spec": ask}
