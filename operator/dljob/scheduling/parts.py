"""Parts of a cluster on which a job is planned.

A job is planned on several parts to learn how its run time depends on the number of devices, and on the part that an
assignment gives it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dljob.cluster import ClusterView, Node
from dljob.scheduling.assignment import Option
from dljob.scheduling.reservations import Reservation, without_reserved


def sizes(nodes: int, per_node: int) -> list[tuple[int, int]]:
    """Return the sizes to try for options, as (number of nodes, devices per node), the smallest first.

    ``nodes``: number of nodes of one device type. ``per_node``: devices of each. The sizes are 1, 2, 4, … devices of
    one node, then 1, 2, 4, … whole nodes, and all nodes. Return an empty list if there are no devices.
    """
    powers = [2**n for n in range(max(nodes, per_node).bit_length())]
    found = [(1, n) for n in powers if n < per_node] + [(n, per_node) for n in powers if n < nodes]
    return [*found, (nodes, per_node)] if nodes > 0 and per_node > 0 else []


def device_parts(nodes: Sequence[Node]) -> Iterator[tuple[int, int, ClusterView]]:
    """Yield (number of nodes, devices per node, view) of each part of nodes with the same device type.

    The view has that many nodes, those with the most free devices first, and lets a job use that many devices of each.
    GPU nodes without a free GPU are left out. The nodes of a CPU type count as one device each.
    """
    own = [node for node in nodes if node.free_devices or not node.is_gpu]
    own.sort(key=lambda node: (-node.free_devices, 0.0 if node.is_gpu else -node.free_cpu, node.name))
    per_node = own[0].free_devices if own and own[0].is_gpu else 1
    for count, devices in sizes(len(own), per_node):
        part = own[:count]
        if own[0].is_gpu:
            part = [replace(node, free_devices=min(node.free_devices, devices)) for node in part]
        yield count, devices, ClusterView(tuple(part))


def part_of(view: ClusterView, part: Option, whole: ClusterView | None = None) -> ClusterView:
    """Return the nodes for a part (the option that a job gets), with only the assigned devices free.

    Free devices of ``view`` are assigned, first from the nodes with the most of them, at most ``part.per_node`` from
    each. If that yields too few, more are assigned from the same nodes. If the whole view has too few free devices of
    the part's type, all of these are assigned. If none is free, return the nodes of this type in ``whole``, so that the
    job waits for busy nodes and not for a type that the cluster lacks. ``whole``: all nodes, also those that the job
    cannot use now; None: ``view``.
    """
    fitting = [node for node in view.nodes if node.device == part.device and node.free_devices and not node.left_out]
    if not fitting:
        return ClusterView(tuple(node for node in (whole or view).nodes if node.device == part.device))
    fitting.sort(key=lambda node: (-node.free_devices, node.name))
    left, taken = part.devices, Counter[str]()
    for most in (part.per_node, part.devices):
        for node in fitting:
            count = min(left, most - taken[node.name], node.free_devices - taken[node.name])
            if count > 0:
                taken[node.name] += count
                left -= count
    return ClusterView(tuple(replace(n, free_devices=taken[n.name]) for n in view.nodes if taken[n.name]))


def left_for(view: ClusterView, others: Sequence[Option | None]) -> ClusterView:
    """Return ``view`` without the devices of the options ``others`` of other jobs. None in ``others`` is ignored."""
    return without_reserved(view, (Reservation(o.device, o.nodes, o.per_node, 0.0, 0) for o in others if o is not None))


def could_start(view: ClusterView, options: Sequence[Option | None]) -> list[int]:
    """Return the indices of those options that jobs could take now, one job after another. None takes nothing.

    An option that needs more than is left takes nothing either, because its job has to wait for other devices anyway.
    """
    found = []
    for i, option in enumerate(options):
        if option is not None and option.devices <= free_devices(view).get(option.device, 0):
            view = left_for(view, (option,))
            found.append(i)
    return found


def free_devices(view: ClusterView) -> dict[str, int]:
    """Return the number of free GPUs of each type. Nodes that are left out of plans do not count."""
    free: dict[str, int] = {}
    for node in view.nodes:
        if node.is_gpu and node.left_out is None:
            free[node.device] = free.get(node.device, 0) + node.free_devices
    return free
