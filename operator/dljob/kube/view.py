"""Build the ClusterView (total and free resources of each node) from nodes and pods. The module does no I/O."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from dljob.cluster import ClusterView, Node, quantity
from dljob.cluster.catalogue import GPU_RESOURCES
from dljob.kube.trim import NodeSeen
from dljob.render.pods import DEVICE_LABEL, GPU_PRODUCT_LABELS, PLAIN_CPU


@dataclass(frozen=True)
class Reservation:
    """Resources on ``nodes`` nodes for one group of a plan whose pods the scheduler has not placed yet.

    ``devices``, ``cpu`` (in cores) and ``memory_nbytes`` are needed on each of these nodes.
    """

    device: str
    nodes: int
    devices: int
    """Devices on each node."""
    cpu: float
    memory_nbytes: int


@dataclass
class _Used:
    cpu: Decimal = Decimal(0)
    memory: Decimal = Decimal(0)
    gpus: Decimal = Decimal(0)


def cluster_view(
    nodes: Iterable[NodeSeen], pods: Iterable[Mapping[str, Any]], reservations: Iterable[Reservation] = ()
) -> ClusterView:
    """Return a view of the nodes that are ready and schedulable.

    Resources that ``pods`` (API objects) request or that ``reservations`` contain do not count as free.
    """
    used: dict[str, _Used] = {}
    for pod in pods:
        name = pod["spec"].get("nodeName")
        if name and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            _add(used.setdefault(name, _Used()), pod["spec"])
    found = [_node(node, used.get(node.name, _Used())) for node in nodes if node.ready and node.schedulable]
    for reservation in reservations:
        found = _less(found, reservation)
    return ClusterView(tuple(sorted(found, key=lambda node: node.name)))


def amount(text: str) -> Decimal:
    """Parse a Kubernetes quantity, including forms such as ``1e3`` and ``100n``. Return 0 for invalid text."""
    try:
        return quantity(text)
    except ValueError:
        scale = {"n": Decimal("1e-9"), "u": Decimal("1e-6")}.get(text[-1:])
        try:
            return Decimal(text[:-1]) * scale if scale else Decimal(text)
        except InvalidOperation:
            return Decimal(0)


def _requests(container: Mapping[str, Any], resource: str) -> Decimal:
    return amount(((container.get("resources") or {}).get("requests") or {}).get(resource, "0"))


def _add(used: _Used, spec: Mapping[str, Any]) -> None:
    """Add the resource requests of a pod to ``used``, counted as the scheduler counts them.

    They are the sum over containers or the largest request of an init container, whichever is larger, plus the pod's
    overhead.
    """
    gpus = ((resource, "gpus") for resource in GPU_RESOURCES.values())
    for resource, attribute in (("cpu", "cpu"), ("memory", "memory"), *gpus):
        total = sum((_requests(item, resource) for item in spec.get("containers") or ()), Decimal(0))
        first = max((_requests(item, resource) for item in spec.get("initContainers") or ()), default=Decimal(0))
        overhead = amount((spec.get("overhead") or {}).get(resource, "0"))
        setattr(used, attribute, getattr(used, attribute) + max(total, first) + overhead)


def _node(node: NodeSeen, used: _Used) -> Node:
    cpu = amount(node.allocatable.get("cpu", "0"))
    memory = amount(node.allocatable.get("memory", "0"))
    gpus = sum((amount(node.allocatable.get(resource, "0")) for resource in GPU_RESOURCES.values()), Decimal(0))
    product = next((node.labels[label] for label in GPU_PRODUCT_LABELS.values() if label in node.labels), None)
    if gpus > 0 and product is None:
        product = node.labels.get(DEVICE_LABEL)
    # If the device plugin of a GPU node does not run, the node has no free device. It must not count as a CPU node,
    # because CPU pods are not placed on nodes with a GPU label.
    is_gpu = product is not None and (gpus > 0 or DEVICE_LABEL not in node.labels)
    bandwidth = float(amount(node.bandwidth)) if node.bandwidth else 0.0
    return Node(
        name=node.name,
        device=product if is_gpu and product else node.labels.get(DEVICE_LABEL, PLAIN_CPU),
        devices=int(gpus) if is_gpu else 1,
        free_devices=max(0, int(gpus - used.gpus)) if is_gpu else 1,
        cpu=float(cpu),
        free_cpu=float(max(Decimal(0), cpu - used.cpu)),
        free_memory_nbytes=int(max(Decimal(0), memory - used.memory)),
        link_bandwidth_Bps=bandwidth if bandwidth > 0 else None,
        is_gpu=is_gpu,
        labels=node.labels,
        taints=tuple(taint for taint in node.taints if taint[2] != "PreferNoSchedule"),
    )


def _less(nodes: list[Node], reservation: Reservation) -> list[Node]:
    """Return all nodes, with the reserved resources subtracted from those where the pods will most likely run.

    These are the nodes of the reservation's device type with the most free resources.
    """
    fitting = sorted(
        (node for node in nodes if node.device == reservation.device), key=lambda n: (-n.free_devices, -n.free_cpu)
    )[: reservation.nodes]
    names = {node.name for node in fitting}
    return [
        replace(
            node,
            free_devices=max(0, node.free_devices - reservation.devices) if node.is_gpu else node.free_devices,
            free_cpu=max(0.0, node.free_cpu - reservation.cpu),
            free_memory_nbytes=max(0, node.free_memory_nbytes - reservation.memory_nbytes),
        )
        if node.name in names
        else node
        for node in nodes
    ]
