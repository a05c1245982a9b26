"""ClusterView: what the cluster has and what of it is free, as a frozen snapshot.

``kube`` makes it from nodes and pods; ``dljob plan --cluster FILE`` reads it from a file; the planner reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """A schedulable node. CPU nodes count as one device whose speed follows ``cpu``."""

    name: str
    device: str
    """Device type: GPU product, or the node's CPU class (label ``dljob.dev/device``, default ``cpu``)."""
    devices: int = 1
    """Devices of that type on the node."""
    free_devices: int = 1
    """Of them, not promised to pods."""
    cpu: float = 1.0
    """Allocatable CPUs."""
    free_cpu: float = 1.0
    """Of them, not requested by pods."""
    free_memory_nbytes: int = 2**33
    link_bandwidth_Bps: float | None = None
    """Network bandwidth, from annotation ``dljob.dev/network-bandwidth`` (bytes/s), else None."""
    is_gpu: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[tuple[str, str, str], ...] = ()
    """(key, value, effect) of taints that keep pods away."""


@dataclass(frozen=True)
class ClusterView:
    nodes: tuple[Node, ...] = ()

    @property
    def device_types(self) -> tuple[str, ...]:
        """Device types present, sorted."""
        return tuple(sorted({node.device for node in self.nodes}))
