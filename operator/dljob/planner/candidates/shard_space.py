"""Limits of candidates by memory and by the space on each node: for ranks, for pods, and for shards of the data.

Nodes have shards of the data with ``dataset.distribution: Sharded``.
"""

from collections.abc import Sequence

from dljob.perf.resources import memory
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.batch_split import even
from dljob.planner.candidates.node_layout import Layout, nodes_with_room
from dljob.planner.candidates.options import Option
from dljob.planner.types import Request
from dljob.planner.types.storage import Storage
from dljob.planner.types.texts import gibibytes


def largest_share(option: Option, batch: int, storage: Storage | None) -> int:
    """Return the largest local batch size of a rank, by its memory and by the space for the shards of its node."""
    if storage is None:
        return option.largest_batch
    return min(option.largest_batch, storage.largest_share(batch, option.ranks_per_node))


def too_little_space(parts: Sequence[tuple[int, int, int | None]], request: Request) -> str | None:
    """Return a text that says that a node has too little space for its shards; None if the nodes have enough.

    ``parts``: (number of nodes, ranks per node, local batch size that the user fixes or None) of each group of nodes.
    """
    storage, batch = request.storage, request.global_batch
    if storage is None or not storage.sharded or not storage.data_nbytes:
        return None
    ranks = sum(nodes * per_node for nodes, per_node, _ in parts)
    enough = sum(nodes for nodes, _, _ in parts) * storage.shard_room_nbytes >= storage.data_nbytes
    # If the nodes together have enough space, an uneven split gives no node more than it has space for.
    needed = [
        (share or even(batch, ranks)[0]) * per_node * storage.data_nbytes / batch
        for _, per_node, share in parts
        if share or not request.uneven or not enough
    ]
    if max(needed, default=0.0) <= storage.shard_room_nbytes:
        return None
    return (
        f"does not fit: the shards of a node need {gibibytes(max(needed))}, but it has "
        f"{gibibytes(storage.shard_room_nbytes)} (dataset.size, less a tenth for other data)"
    )


def too_little_memory(groups: Sequence[tuple[Option, int, int]], request: Request) -> str | None:
    """Return a text that says that the pods of a group do not fit on their nodes; None if all fit.

    ``groups``: (option, number of nodes, main memory in bytes that a pod needs) of each group of nodes.
    """
    if request.memory_per_pod_nbytes is not None:
        return None
    for option, nodes, needed in groups:
        layout = Layout(option.ranks_per_node, option.cores, option.machine_nodes)
        free = sorted(nodes_with_room(option.pool, layout, request), reverse=True)[:nodes]
        if free and needed > free[-1]:
            return (
                f"does not fit: a pod on {option.label} requests {gibibytes(needed)} of main memory, with its "
                f"data-loading processes, but {gibibytes(free[-1])} are free"
            )
    return None


def too_large(held: Workload, share: int, option: Option, what: str) -> str:
    """Return a text with the reason why a rank has too little memory for a local batch of ``share`` samples.

    ``held``: the workload with the optimizer state that one rank holds. ``option``: the type of device, and the memory
    of a rank on it. ``what``: the text for the samples, such as '64 samples'. If GPUs have enough memory, the reason is
    the main memory of their nodes.

    Example: 'does not fit: 64 samples need 23.4 GiB (of which 21 GiB are activations), but a rank has 16 GiB'.
    """
    needed = option.needed_nbytes(held, share)
    loaders = 0 if option.pool.is_gpu else memory.loaders_nbytes(held, share, option.processes)
    if needed <= option.memory_nbytes and option.pod_nbytes(held, share) > option.host_nbytes:
        ranks, pod = option.ranks_per_node, gibibytes(option.pod_nbytes(held, share))
        with_ranks = f"a pod with {ranks} rank{'s' if ranks > 1 else ''} and {what}"
        return f"does not fit: {with_ranks} needs {pod} of main memory, but {gibibytes(option.host_nbytes)} are free"
    activations = needed - option.needed_nbytes(held, 0)
    mostly = f"of which {gibibytes(activations)} are activations"
    if activations < needed / 2:
        mostly = f"of which {gibibytes(needed - activations)} do not depend on the batch size"
    if loaders > needed:
        mostly = f"of which {gibibytes(loaders)} are for data-loading processes"
    room = gibibytes(option.memory_nbytes)
    return f"does not fit: {what} need {gibibytes(needed + loaders)} ({mostly}), but a rank has {room}"
