"""Settings of a dljob installation that affect the manifests of all jobs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dljob.api.defaults import NO_DEFAULTS, JobDefaults
from dljob.api.overrides import OverridePolicy

Manifest = dict[str, Any]


@dataclass(frozen=True)
class RenderConfig:
    trainer_image: str
    image_pull_policy: str = "IfNotPresent"
    cluster_domain: str = "cluster.local"
    metrics_peers: tuple[Mapping[str, Any], ...] = ()
    """NetworkPolicyPeers that may read the metrics of the trainer pods. Empty: every source may read them."""
    overrides: OverridePolicy = OverridePolicy.ALL
    port_ranges: bool = True
    """True if the API server supports ``endPort`` in a NetworkPolicy (Kubernetes 1.25 and later)."""
    job_defaults: JobDefaults = NO_DEFAULTS
    """The administrator's defaults for jobs that are planned now. A planned job has those of its stored plan."""
