"""Settings of a dljob installation that affect the manifests of all jobs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dljob.api.defaults import NO_DEFAULTS, JobDefaults
from dljob.api.overrides import OverridePolicy
from dljob.cluster.templates import NO_TEMPLATES, NodeTemplates

Manifest = dict[str, Any]


@dataclass(frozen=True)
class RenderConfig:
    trainer_image: str
    image_pull_policy: str = "IfNotPresent"
    look_image: str = ""
    """Image of look pods, which has dljob: the operator's own. Empty: jobs with ``spec.task`` cannot run."""
    look_pull_policy: str = "IfNotPresent"
    cluster_domain: str = "cluster.local"
    metrics_peers: tuple[Mapping[str, Any], ...] = ()
    """NetworkPolicyPeers that may read the metrics of the trainer pods. Empty: every source may read them."""
    overrides: OverridePolicy = OverridePolicy.ALL
    pod_group_api: str | None = None
    """API version of the PodGroups for the pods of new plans; None: their pods name no PodGroup.

    It follows from the chart value ``gangScheduling`` and from what the API server serves."""
    node_templates: NodeTemplates = NO_TEMPLATES
    """Nodes that an autoscaler can add for jobs that the existing nodes cannot run."""
    provisioning_class: str = ""
    """Class of the ProvisioningRequests with which new plans ask an autoscaler for nodes.

    Empty: pending pods make the autoscaler add nodes."""
    job_defaults: JobDefaults = NO_DEFAULTS
    """The administrator's present defaults, for jobs without a plan. For a job with a plan, the defaults in that plan
    apply."""
