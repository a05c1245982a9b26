"""Translate nodes and pods of the API server for the ledger of capacity (``dljob.scheduling``). No I/O."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from sys import intern
from typing import Any

from dljob.api.compact import shared
from dljob.cluster import ClusterView, Node, machines
from dljob.cluster.gpu_limits import device_type, limit_error
from dljob.cluster.platforms import platform_error
from dljob.kube.objects.trim import NodeSeen
from dljob.render.helpers.probe import gives_way
from dljob.render.pods import DEVICE_LABEL, GPU_PRODUCT_LABELS, PLAIN_CPU
from dljob.scheduling import BoundPod, Ledger, NodeCapacity, amount, pod_requests
from dljob.scheduling.requests import NOTHING, Requests, in_units, resources

MAX_DEVICES, MAX_CPUS, MAX_NBYTES = 2**10, 2**14, 2**50
"""Largest plausible numbers of GPUs, CPUs and bytes of memory of a node.

The largest machines have less than a tenth of them. Plans are searched over a node's devices and CPUs, so that a node
with billions, such as from a broken device plugin, would keep every job that could use it from being planned.
"""


def cluster_view(nodes: Iterable[NodeSeen], pods: Iterable[Mapping[str, Any]]) -> ClusterView:
    """Return a view of the nodes that are ready and schedulable. Resources that ``pods`` request are not free."""
    ledger = Ledger()
    for node in nodes:
        ledger.put_node(node.name, node_capacity(node))
    for pod in pods:
        ledger.put_pod(pod["metadata"]["uid"], bound_pod(pod))
    return ledger.view()


def usable_cpus(nodes: Iterable[NodeSeen]) -> dict[str, float]:
    """Return node name → number of CPUs that a job's pods on this node can keep busy, if it runs on all ``nodes``.

    Nodes that report no CPUs, or an absurd number of them, are left out.
    """
    cpus = {node.name: (node, float(amount(node.allocatable.get("cpu", "0")))) for node in nodes}
    found = [Node(name, "", cpu=cpu, labels=node.labels) for name, (node, cpu) in cpus.items() if 0 < cpu <= MAX_CPUS]
    return machines.usable_cpus(found)


def bound_pod(body: Mapping[str, Any]) -> BoundPod | None:
    """Return the name of a pod's node and the resources that the pod requests there; None if it takes none.

    A pod takes nothing if it has no node yet or has ended, or if it is a hardware probe that leaves its node to others.
    """
    spec, status = body["spec"], body.get("status") or {}
    name = spec.get("nodeName")
    if not name or status.get("phase") in ("Succeeded", "Failed") or gives_way(body):
        return None
    return shared(BoundPod(intern(name), shared(pod_requests(spec, status))))


@dataclass(frozen=True)
class Devices:
    """The devices of a node: their type, their number, and True if they are GPUs. A CPU node has one device."""

    type: str
    count: int
    is_gpu: bool


def devices_of(node: NodeSeen) -> Devices:
    """Return the devices of a node, from its product label and from the resources that device plugins offer.

    Plans, queues, quotas and forecasts get a node's devices from this function only, so another source of them, such as
    the ResourceSlices of dynamic resource allocation, needs to be read only here.
    """
    count = in_units(resources(node.allocatable)).devices
    product = next((node.labels[label] for label in GPU_PRODUCT_LABELS.values() if label in node.labels), None)
    if count > 0 and product is None:
        product = node.labels.get(DEVICE_LABEL)
    # If the device plugin of a GPU node does not run, the node has no free device. It must not count as a CPU node,
    # because CPU pods are not placed on nodes with a GPU label.
    if product and (count > 0 or DEVICE_LABEL not in node.labels):
        return Devices(device_type(product, True, node.labels), count, True)
    return Devices(node.labels.get(DEVICE_LABEL, PLAIN_CPU), 1, False)


def node_capacity(node: NodeSeen, architectures: Collection[str] = ()) -> NodeCapacity | None:
    """Return a node's device type, devices and allocatable resources; None if it is not ready or not schedulable.

    All resources count as free: the ledger subtracts those that pods take. A node on which no pod of a job can run has
    none. ``architectures``: those for which the trainer image is built; empty: any.
    """
    if not (node.ready and node.schedulable):
        return None
    total = in_units(resources(node.allocatable))
    found = devices_of(node)
    other_platform = platform_error(node.labels, architectures)
    if unusable := other_platform or _absurd(node.name, total):
        total, found = NOTHING, replace(found, count=0 if found.is_gpu else 1)
    bandwidth = float(amount(node.bandwidth)) if node.bandwidth else 0.0
    shown = Node(
        name=node.name,
        device=found.type,
        devices=found.count,
        free_devices=found.count,
        cpu=total.cpu_m / 1000,
        free_cpu=total.cpu_m / 1000,
        memory_nbytes=total.memory_nbytes,
        free_memory_nbytes=total.memory_nbytes,
        link_bandwidth_Bps=bandwidth if bandwidth > 0 else None,
        is_gpu=found.is_gpu,
        labels=node.labels,
        taints=tuple(taint for taint in node.taints if taint[2] != "PreferNoSchedule"),
        left_out=unusable or limit_error(node.name, found.type, found.is_gpu, node.labels),
        wrong_platform=other_platform is not None,
        storage_nbytes=int(storage) if (storage := amount(node.allocatable.get("ephemeral-storage", "0"))) else None,
    )
    pods = int(amount(node.allocatable["pods"])) if "pods" in node.allocatable else None
    return NodeCapacity(shown, replace(total, devices=found.count) if found.is_gpu else total, pods)


def _absurd(name: str, total: Requests) -> str | None:
    """Return why new plans must not use a node, because it reports an absurd capacity; None if its capacity is not."""
    for found, most, what in (
        (total.devices, MAX_DEVICES, "devices"),
        (total.cpu_m / 1000, MAX_CPUS, "CPUs"),
        (total.memory_nbytes, MAX_NBYTES, "bytes of memory"),
    ):
        if found > most:
            return f"node {name} reports {found:.3g} {what}, and at most {most:.3g} are plausible: correct its capacity"
    return None
