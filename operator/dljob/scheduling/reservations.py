"""Reservations: resources of accepted plans whose pods the scheduler has not bound to nodes yet."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import groupby

from dljob.cluster import ClusterView, Node
from dljob.cluster.domains import ANYWHERE, Domain
from dljob.scheduling.limits.charges import Charge


@dataclass(frozen=True, slots=True)
class Reservation:
    """Resources on ``nodes`` nodes for pods of a plan that the scheduler of Kubernetes has not placed yet.

    All of these nodes have the device type ``device``: a reservation belongs to one group of a plan (the pods on nodes
    of one device type). ``devices``, ``cpu`` (in cores) and ``memory_nbytes`` are needed on each of these nodes.
    """

    device: str
    nodes: int
    devices: int
    """Devices on each node."""
    cpu: float
    memory_nbytes: int
    charge: Charge | None = None
    """What each of the ``uncreated`` objects will charge to quotas; None if the namespace had no quotas."""
    uncreated: int = 0
    """Number of objects with this charge that do not exist yet. A pod that waits for a node exists and is not counted
    here, because it is in the usage of the quotas already."""
    domain: Domain = ANYWHERE
    """The nodes on which the pods may run."""
    job: str = ""
    """The uid of the job. A node runs at most one pod of a job. Empty: no other reservation is for the same job."""
    beside: frozenset[str] = frozenset()
    """The names of the nodes with pods of the job. The pods of the reservation come to other nodes."""

    def allows(self, node: Node) -> bool:
        """Return True if the scheduler may place a pod on the node, if that has enough free resources."""
        return node.name not in self.beside and self.domain.has(node)


def without_reserved(view: ClusterView, reservations: Iterable[Reservation]) -> ClusterView:
    """Return the view with the reserved resources subtracted from the free resources of its nodes.

    They are subtracted where the pods will most likely run: on nodes of the reservation's device type and domain that
    have no pod of the job. Nodes
    that have enough of every resource are taken first, and others only if those are too few. In both cases, the node
    with the most free devices (then the most free CPU) comes first; of equal nodes, the first in the view. Each pod
    also takes one of the pods that its node can run. Nothing is free on a node that has no room for another pod.

    Reservations of one job follow one another, and are on different nodes. The one with the most devices comes first.
    """
    by_device: dict[str, list[_Left]] = {}
    for i, node in enumerate(view.nodes):
        by_device.setdefault(node.device, []).append(
            (
                -node.free_devices,
                -node.free_cpu,
                i,
                node.free_memory_nbytes,
                node.is_gpu,
                ANY_NUMBER if node.free_pods is None else node.free_pods,
            )
        )
    changed: dict[int, _Left] = {}
    heaps: set[str] = set()
    for _, of_job in groupby(enumerate(reservations), lambda each: each[1].job or each[0]):
        taken: list[tuple[list[_Left], _Left]] = []
        for _, reservation in sorted(of_job, key=lambda each: size(each[1]), reverse=True):
            left = by_device.get(reservation.device)
            if not left:
                continue
            if reservation.device not in heaps:
                heapify(left)
                heaps.add(reservation.device)
            taken.extend((left, node_left) for node_left in _take(left, reservation, view))
        for left, node_left in taken:
            heappush(left, node_left)
            changed[node_left[2]] = node_left
    nodes = list(view.nodes)
    for i, (devices, cpu, _, memory_nbytes, _, pods) in changed.items():
        nodes[i] = replace(
            nodes[i],
            free_devices=-devices,
            free_cpu=max(0.0, -cpu),
            free_memory_nbytes=memory_nbytes,
            free_pods=None if nodes[i].free_pods is None else pods,
        )
    return ClusterView(tuple(nodes))


ANY_NUMBER = 2**31
"""Number of pods for which a node has room, if it does not say how many it can run."""
_Left = tuple[int, float, int, int, bool, int]
"""What a node has left, as a tuple.

It contains: -free devices, -free CPU, index of the node, bytes of free memory, True if it has GPUs, and the number of
pods for which it has room.

In this order, a heap of nodes begins with the one that has the most free devices, then the most free CPU. Hundreds of
plans may be accepted within the seconds that the scheduler needs for their pods. Sorting all nodes for each of these
plans took seconds.
"""


def _take(left: list[_Left], reservation: Reservation, view: ClusterView) -> list[_Left]:
    """Remove the nodes of a reservation from the heap ``left``. Return them with what the reservation leaves free.

    The caller puts the returned nodes back. They are fewer than ``reservation.nodes`` if its pods may run on fewer.
    """
    fitting: list[_Left] = []
    others: list[_Left] = []
    outside: list[_Left] = []
    while left and len(fitting) < reservation.nodes:
        node = heappop(left)
        if not reservation.allows(view.nodes[node[2]]):
            outside.append(node)
            continue
        (fitting if _fits(node, reservation) else others).append(node)
    missing = reservation.nodes - len(fitting)
    for node in (*outside, *others[missing:]):
        heappush(left, node)
    return [_less(node, reservation) for node in (*fitting, *others[:missing])]


def size(reservation: Reservation) -> tuple[int, float, int]:
    """Return the order of the reservations of a job: where a larger pod fits, a smaller one usually fits, too."""
    return reservation.devices, reservation.cpu, reservation.memory_nbytes


def _fits(node: _Left, reservation: Reservation) -> bool:
    devices, cpu, _, memory_nbytes, is_gpu, pods = node
    enough_devices = not is_gpu or -devices >= reservation.devices
    return pods > 0 and enough_devices and -cpu >= reservation.cpu and memory_nbytes >= reservation.memory_nbytes


def _less(node: _Left, reservation: Reservation) -> _Left:
    devices, cpu, i, memory_nbytes, is_gpu, pods = node
    if pods <= 1:
        return (0 if is_gpu else devices, 0.0, i, 0, is_gpu, 0)
    return (
        min(0, devices + reservation.devices) if is_gpu else devices,
        min(0.0, cpu + reservation.cpu),
        i,
        max(0, memory_nbytes - reservation.memory_nbytes),
        is_gpu,
        pods - 1,
    )
