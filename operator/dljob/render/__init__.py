"""Render the Kubernetes manifests of a job from its spec and plan. The package does no I/O."""

from dljob.render.config import RenderConfig
from dljob.render.names import Names
from dljob.render.network_policy import network_policy
from dljob.render.overrides import merged
from dljob.render.pods import pod_template
from dljob.render.provisioning import pod_templates, provisioning_request
from dljob.render.stateful_sets import stateful_set, stateful_sets
from dljob.render.support import checkpoint_claim, plan_config_map, support

__all__ = [
    "Names",
    "RenderConfig",
    "checkpoint_claim",
    "merged",
    "network_policy",
    "plan_config_map",
    "pod_template",
    "pod_templates",
    "provisioning_request",
    "stateful_set",
    "stateful_sets",
    "support",
]
