"""Explain the storage of a plan's data: why no node has space for it, or how much space and time it takes."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from dljob.cluster import ClusterView
from dljob.perf.resources.data_fetch import fetch_s
from dljob.perf.step.communication import ETHERNET_BANDWIDTH_Bps
from dljob.perf.step.input_data import DISK_BANDWIDTH_Bps
from dljob.planner.candidates.evaluate import Part
from dljob.planner.candidates.pools import usable, wanted
from dljob.planner.types import Choice, Infeasible, Request
from dljob.planner.types.storage import FILLED, Storage
from dljob.planner.types.texts import duration, gibibytes

_SIZE = "spec.dataset.size"


def too_little_storage(request: Request, view: ClusterView) -> Infeasible | None:
    """Return why no plan can store the job's data, or None if a plan can or if the sizes are unknown."""
    need = request.storage
    if need is None:
        return None
    names = (*request.devices, *(f.device for f in request.fixed))
    nodes = [node for node in usable(replace(request, storage=None), view) if not names or wanted(node.device, names)]
    fitting = [node for node in nodes if node.storage_nbytes is None or node.storage_nbytes >= need.node_nbytes]
    if nodes and not fitting:
        most = max(node.storage_nbytes or 0 for node in nodes)
        return Infeasible(
            "DoesNotFit",
            _SIZE,
            f"found nodes with at most {gibibytes(most)} of storage; expected a node with "
            f"{gibibytes(need.node_nbytes)} for the data (dataset.distribution "
            f"{'Sharded' if need.sharded else 'Full'}): add nodes with more storage, lower dataset.size if the data on "
            f"a node is smaller{_or_shards(need)}",
            transient=True,
        )
    return _too_few_for_shards(request, need, len(fitting))


def _too_few_for_shards(request: Request, need: Storage, fitting: int) -> Infeasible | None:
    """Return why even all nodes together cannot store the shards; None if they can.

    ``fitting``: number of nodes that have the space that each pod requests (``need.node_nbytes``).
    """
    fixed = sum(f.nodes for f in request.fixed) or fitting
    nodes = min(fitting, fixed, request.nodes_max or fitting, request.global_batch or fitting)
    if not need.sharded or not need.data_nbytes or not nodes or nodes * need.shard_room_nbytes >= need.data_nbytes:
        return None
    enough = ceil(need.data_nbytes / need.shard_room_nbytes)
    return Infeasible(
        "DoesNotFit",
        _SIZE,
        f"found {gibibytes(need.node_nbytes)} on each of at most {nodes} nodes; expected at least "
        f"{gibibytes(need.data_nbytes / nodes / FILLED)} on each, or {enough} nodes, for shards of "
        f"{gibibytes(need.data_nbytes)} (dataset.samples x dataset.sampleBytes): raise dataset.size, or allow more "
        "nodes",
        transient=True,
    )


def _or_shards(need: Storage) -> str:
    if need.sharded:
        return ""
    if not need.divisible:
        return ", or store the data in one .npz, .npy or .bin file and set dataset.distribution to Sharded"
    return ", or set dataset.distribution to Sharded, with which each node has only a part of the data"


def prices(request: Request, chosen: Choice, parts: Sequence[Part]) -> str | None:
    """Return a text with the space that the plan's data takes on each node, and the time to fetch it; None if unknown.

    If the file can be sharded, the text compares shards with a full copy on each node. ``parts``: the groups of nodes
    of the chosen plan.
    """
    need = request.storage
    if need is None or not need.data_nbytes:
        return None
    rate_Bps = min((p.fetching_nodes.rate_Bps for p in parts), default=min(ETHERNET_BANDWIDTH_Bps, DISK_BANDWIDTH_Bps))
    shards = _shards_nbytes(chosen, need.data_nbytes)
    full = [float(need.data_nbytes)] * len(shards)
    used, other = ("Sharded", "Full") if need.sharded else ("Full", "Sharded")
    nbytes = full if need.sharded else shards
    times = {
        used: duration(chosen.prediction.fetch_s),
        other: duration(float(fetch_s(sum(nbytes), max(nbytes), rate_Bps, request.data_source_Bps))),
    }
    texts = {
        "Sharded": f"at most {gibibytes(max(shards))} on a node, fetched in {times['Sharded']}",
        "Full": f"{gibibytes(need.data_nbytes)} on each node, fetched in {times['Full']}",
    }
    if not need.sharded and not need.divisible:
        return f"{used}: {texts[used]}"
    return f"{used}: {texts[used]}; with {other}: {texts[other]}"


def _shards_nbytes(chosen: Choice, data_nbytes: int) -> list[float]:
    """Return the bytes of data that each node of the plan stores if the data is sharded.

    They are in proportion to the local batch sizes of the node's ranks. ``data_nbytes``: bytes of the whole data.
    """
    batch = sum(sum(group.shares) for group in chosen.groups)
    return [
        data_nbytes * sum(group.shares[node * group.ranks_per_node : (node + 1) * group.ranks_per_node]) / batch
        for group in chosen.groups
        for node in range(group.nodes)
    ]
