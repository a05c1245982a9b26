"""Parts of a cluster on which a job is planned to learn how its run time depends on the number of devices."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dljob.cluster import ClusterView, Node


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
