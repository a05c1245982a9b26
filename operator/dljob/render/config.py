"""What the installation, not the job, says about manifests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]


@dataclass(frozen=True)
class RenderConfig:
    trainer_image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    cluster_domain: str = "cluster.local"
    metrics_peers: tuple[Mapping[str, Any], ...] = ()
    """NetworkPolicyPeers that may read the pods' metrics; empty: everyone."""
    port_ranges: bool = True
    """Whether the server knows ``endPort`` in a NetworkPolicy (1.25 and later)."""
