"""Choose which device types to measure, and on which nodes. No I/O."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dljob.calibrate.learned import Learned, hardware_of
from dljob.cluster import ClusterView, Node
from dljob.cluster.catalogue import GPU_RESOURCES
from dljob.cluster.machines import neighbours
from dljob.perf.resources.memory import PROCESS_NBYTES
from dljob.planner.candidates.pools import tolerates

MIN_CPU = 0.5
"""Free CPUs that a node needs. With less, the probe would measure its share instead of the node."""
IDLE_CPU = 0.5
"""Fraction of the CPUs of an idle node that no pod requests."""
MIN_MEMORY_NBYTES = 2 * 2**30 + PROCESS_NBYTES // 4
MAX_REASONS = 4
"""Maximum number of reasons in a message. Each left-out node has a reason of its own."""


@dataclass(frozen=True)
class Target:
    """A device type to measure on ``node``. ``peer``: another node for the link; None if there is none.

    ``cpu``: free CPUs of the node. ``other``: device type of the peer; empty: the same type.
    """

    device: str
    is_gpu: bool
    node: str
    cpu: float
    peer: str | None = None
    other: str = ""


def probe_targets(
    view: ClusterView,
    known: Mapping[tuple[str, str], Learned],
    devices: Sequence[str] = (),
    node: str | None = None,
    busy: Collection[str] = (),
    tolerations: Sequence[Mapping[str, object]] = (),
    *,
    idle: bool = False,
) -> tuple[list[Target], list[str]]:
    """Return one target for each device type that no measurement knows, and why others have none.

    ``devices``: only these types, also those that were measured before; empty: all. ``node``: only this node, and the
    type of its device. ``busy``: names of nodes on which pods of jobs run. Such nodes, and others on their machines,
    are not measured, because the probe and the job would disturb each other. ``tolerations``: those of the probe's
    pods. ``known``: measured constants by (model key, device type). ``idle``: True to measure only nodes on which other
    pods have no GPU and request at most half of the CPUs.
    """
    near = neighbours(view.nodes, busy)
    named = [each for each in view.nodes if each.name == node]
    if node is not None and not named:
        return [], [f"--node: found no node {node}; expected one of the cluster's nodes"]
    types = [each.device for each in named] or list(devices) or list(view.device_types)
    found, why = [], []
    for device in dict.fromkeys(types):
        nodes = named or [each for each in view.nodes if each.device == device]
        if not nodes:
            what = ", ".join(view.device_types) or "no nodes"
            why.append(f"--device: found {device}; expected one of {what}")
        elif not devices and node is None and hardware_of(device, known) is not None:
            why.append(f"{device}: measured before; measure it again with --device {device}")
        elif not (able := [each for each in nodes if _obstacle(each, busy, near, tolerations, idle=idle) is None]):
            reasons = {_obstacle(each, busy, near, tolerations, idle=idle) or "" for each in nodes}
            why.append(f"{device}: not measured, because {_listed(sorted(reasons))}")
        else:
            able.sort(key=lambda each: (-each.free_cpu, each.name))
            others = [each for each in view.nodes if each.device == device and each != able[0]]
            first = able[0]
            beside = neighbours(view.nodes, [first.name])  # The link to these nodes is not that of the network.
            others.sort(key=lambda each: each.name in beside)
            peers = [each.name for each in others if _obstacle(each, (), (), tolerations) is None]
            found.append(Target(device, first.is_gpu, first.name, first.free_cpu, next(iter(peers), None)))
    return found, why


def link_target(
    view: ClusterView,
    device: str,
    busy: Collection[str],
    tolerations: Sequence[Mapping[str, object]] = (),
    other: str = "",
) -> Target | None:
    """Return the two idle nodes of device types between which to measure the network; None if there are none.

    Nodes on different machines come first: the link within a machine is not that of the network. If annotations give
    the bandwidth of nodes of both types, their administrator knows the network, and there is no target. ``busy``: names
    of nodes with pods of jobs or probes; these nodes, and others on their machines, are left out. ``other``: type of
    the second node; empty: that of the first.
    """
    if is_annotated(view, device, other):
        return None
    nodes, others = ([node for node in view.nodes if node.device == each] for each in (device, other or device))
    near = neighbours(view.nodes, busy)

    def idle(among: Sequence[Node]) -> list[Node]:
        found = [node for node in among if _obstacle(node, busy, near, tolerations, idle=True) is None]
        return sorted(found, key=lambda node: (-node.free_cpu, node.name))

    if not (able := idle(nodes)):
        return None
    first = able[0]
    beside = neighbours(view.nodes, [first.name])
    seconds = [node for node in idle(others) if node != first]
    if not seconds:
        return None
    second = min(seconds, key=lambda node: node.name in beside)
    return Target(device, first.is_gpu, first.name, first.free_cpu, second.name, other)


def is_annotated(view: ClusterView, device: str, other: str = "") -> bool:
    """Return True if annotations give the bandwidth of nodes of both types. ``other``: empty: that of the first."""
    given = {node.device for node in view.nodes if node.link_bandwidth_Bps is not None}
    return {device, other or device} <= given


def _listed(reasons: Sequence[str]) -> str:
    text = "; or ".join(reasons[:MAX_REASONS])
    more = len(reasons) - MAX_REASONS
    return f"{text}; and for {more} more reason{'s' if more > 1 else ''}" if more > 0 else text


def _obstacle(
    node: Node,
    busy: Collection[str],
    near: Collection[str],
    tolerations: Sequence[Mapping[str, object]],
    *,
    idle: bool = False,
) -> str | None:
    """Return why a node cannot be measured now, or None.

    ``busy``: names of nodes with pods of jobs. ``near``: names of all nodes on the machines of these nodes. ``idle``:
    as of ``probe_targets``.
    """
    for taint in node.taints:
        of_gpus = node.is_gpu and taint[0] in GPU_RESOURCES.values()
        if taint[2] in ("NoSchedule", "NoExecute") and not of_gpus and not tolerates(tolerations, taint):
            return f"the taint {taint[0]} of its nodes is not tolerated"
    if node.left_out is not None:
        return f"plans leave out node {node.name} ({node.left_out})"
    if node.name in busy:
        return "pods of jobs run on its nodes"
    if node.name in near:
        return "jobs use the machine of its nodes (label dljob.dev/machine)"
    if node.free_devices < 1:
        return "no device of its nodes is free"
    if node.free_cpu < MIN_CPU:
        return f"fewer than {MIN_CPU:g} CPUs of its nodes are free"
    if node.free_memory_nbytes < MIN_MEMORY_NBYTES:
        return "too little memory of its nodes is free"
    if idle and node.is_gpu and node.free_devices < node.devices:
        return "other pods use GPUs of its nodes"
    if idle and node.free_cpu < node.cpu * IDLE_CPU:
        return f"other pods request more than {1 - IDLE_CPU:.0%} of the CPUs of its nodes"
    return None
