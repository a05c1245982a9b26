"""Reservations: resources of accepted plans whose pods the scheduler has not bound to nodes yet."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from heapq import nsmallest

from dljob.cluster import ClusterView, Node
from dljob.scheduling.charges import Charge


@dataclass(frozen=True, slots=True)
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
    charge: Charge | None = None
    """What each of the ``uncreated`` objects will charge to quotas; None if the namespace had none."""
    uncreated: int = 0
    """Number of these objects that do not exist yet. A pod that waits for a node is in the quotas' usage already."""


def without_reserved(view: ClusterView, reservations: Iterable[Reservation]) -> ClusterView:
    """Return the view without the reserved resources.

    They are subtracted where the pods will most likely run: on the nodes of the reservation's device type that have
    enough of every resource, or else on others, those with the most free resources first.
    """
    found = {node.name: node for node in view.nodes}
    by_device: dict[str, list[str]] = {}
    for node in view.nodes:
        by_device.setdefault(node.device, []).append(node.name)
    for reservation in reservations:
        candidates = [found[name] for name in by_device.get(reservation.device, ())]
        for node in nsmallest(reservation.nodes, candidates, partial(_order, reservation)):
            found[node.name] = _less(node, reservation)
    return ClusterView(tuple(found.values()))


def _order(reservation: Reservation, node: Node) -> tuple[bool, int, float]:
    fits = (
        (not node.is_gpu or node.free_devices >= reservation.devices)
        and node.free_cpu >= reservation.cpu
        and node.free_memory_nbytes >= reservation.memory_nbytes
    )
    return not fits, -node.free_devices, -node.free_cpu


def _less(node: Node, reservation: Reservation) -> Node:
    return replace(
        node,
        free_devices=max(0, node.free_devices - reservation.devices) if node.is_gpu else node.free_devices,
        free_cpu=max(0.0, node.free_cpu - reservation.cpu),
        free_memory_nbytes=max(0, node.free_memory_nbytes - reservation.memory_nbytes),
    )
