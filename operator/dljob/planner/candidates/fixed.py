"""Check groups of nodes that the user fixes (``planning.mode: Fixed``) against the cluster."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from math import prod

from dljob.calibrate.learned import Learned
from dljob.cluster import nodes_left
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.evaluate import Part
from dljob.planner.candidates.node_layout import with_ranks, with_room
from dljob.planner.candidates.options import Option, options
from dljob.planner.candidates.pools import Eligible, Pool, wanted
from dljob.planner.types import FixedChoice, Infeasible, Request, Strategy

INDISTINCT = 0.02
"""Maximum relative difference at which step times with two numbers of cores tie. The smaller number is then chosen."""
MAX_CANDIDATES = 64
"""Maximum number of combinations of numbers of cores at which all of them are evaluated."""


def fixed_parts(
    request: Request,
    nodes: Eligible,
    workload: Workload,
    learned: Mapping[tuple[str, str], Learned],
) -> list[Part] | Infeasible:
    """Return a ``Part`` for each group in ``spec.planning.groups``, in which the user fixes nodes and ranks per node.

    Ranks on CPUs compute with as many cores as are fastest. Return ``Infeasible`` if the nodes have no room for a
    group, or if the local batch sizes cannot add up to the global batch size.
    """
    found = _ways(request, nodes, workload, learned, "Data")
    if isinstance(found, Infeasible):
        return found
    ranks = sum(choice.nodes * choice.ranks_per_node for choice in request.fixed)
    parts = []
    for choice, ways in zip(request.fixed, found, strict=True):
        share = choice.batch_per_rank or max(1, request.global_batch // ranks)
        parts.append(Part(_fastest(ways, share), choice.nodes, choice.batch_per_rank))
    return parts


def fixed_candidates(
    request: Request,
    nodes: Eligible,
    workload: Workload,
    learned: Mapping[tuple[str, str], Learned],
    strategy: Strategy = "Data",
) -> list[list[Part]] | Infeasible:
    """Return the plans with the user's groups that differ in the cores of their ranks on CPUs, the most cores first.

    Each has a ``Part`` for each group. If the numbers of cores of several groups have more than ``MAX_CANDIDATES``
    combinations, all groups go down from their most cores together. Return ``Infeasible`` as ``fixed_parts`` does.
    """
    found = _ways(request, nodes, workload, learned, strategy)
    if isinstance(found, Infeasible):
        return found
    most_first = [ways[::-1] for ways in found]
    combinations: Iterable[tuple[Option, ...]] = product(*most_first)
    if prod(map(len, most_first)) > MAX_CANDIDATES:
        steps = range(max(map(len, most_first)))
        combinations = [tuple(ways[min(i, len(ways) - 1)] for ways in most_first) for i in steps]
    return [
        [
            Part(option, choice.nodes, choice.batch_per_rank)
            for option, choice in zip(options, request.fixed, strict=True)
        ]
        for options in combinations
    ]


def _ways(
    request: Request,
    nodes: Eligible,
    workload: Workload,
    learned: Mapping[tuple[str, str], Learned],
    strategy: Strategy,
) -> list[list[Option]] | Infeasible:
    """Return the options for each group that the user fixes, with rising numbers of cores; or ``Infeasible``."""
    if (wrong := _batch(request)) is not None:
        return wrong
    ways = []
    ranks = sum(choice.nodes * choice.ranks_per_node for choice in request.fixed)
    rooms = Rooms(request)
    for i, choice in enumerate(request.fixed):
        field = f"spec.planning.groups[{i}]"
        pool = next((p for p in nodes.pools if wanted(p.device, [choice.device])), None)
        room = rooms.take(pool, choice) if pool else 0
        if pool is None or room < choice.nodes:
            return Infeasible(
                "TooFewNodes" if nodes.busy == 0 else "DeviceBusy",
                f"{field}.nodes",
                f"found {room} nodes with device {choice.device} and room for {choice.ranks_per_node} ranks "
                f"on each node; expected {choice.nodes}, as this group requests: lower nodes or ranksPerNode, or wait "
                "until more nodes are free",
                transient=True,
                refusals=nodes.refusals,
            )
        found = [
            _roomiest(each, choice.nodes)
            for layout in with_ranks(pool, request, choice.ranks_per_node)
            for each in [options(pool, layout, workload, request, learned, strategy, ranks)]
            if any(option.min_nodes <= choice.nodes <= option.nodes for option in each)
        ]
        ways.append(found)
    return ways


def _roomiest(found: Sequence[Option], nodes: int) -> Option:
    """Return the option with the most memory per rank among those for ``nodes`` nodes.

    This is possible because Kubernetes places pods only where their memory requests fit. At least one option must have
    enough nodes. GPU nodes with the same GPUs differ in main memory.
    """
    return max((o for o in found if o.min_nodes <= nodes <= o.nodes), key=lambda o: (o.memory_nbytes, o.host_nbytes))


def _fastest(found: Sequence[Option], share: int) -> Option:
    """Return the option whose ranks process ``share`` samples first; if options tie, the one with the fewest cores."""
    lowest_s = min(option.curve.seconds(share) for option in found)
    tied = [option for option in found if option.curve.seconds(share) <= lowest_s * (1 + INDISTINCT)]
    return min(tied, key=lambda option: option.cores)


class Rooms:
    """How many nodes the groups that the user fixes can have, one group after another."""

    def __init__(self, request: Request) -> None:
        self._request, self._taken = request, defaultdict[str, list[tuple[Collection[int], int]]](list)
        """By device type, for each group so far, the nodes on which its pods fit, and their number.

        Groups with different names of a device may have the same type."""

    def take(self, pool: Pool, choice: FixedChoice) -> int:
        """Return how many nodes of the pool a group can have beside the groups so far. It then counts as one of these.

        Call it no more if the group needs more nodes.
        """
        nodes, before = room_for(pool, choice, self._request), self._taken[pool.device]
        found = nodes_left(nodes, before)
        before.append((nodes, choice.nodes))
        return found


def room_for(pool: Pool, choice: FixedChoice, request: Request) -> Collection[int]:
    """Return the indices of the pool's nodes on which a pod of a fixed group fits; CPU nodes all count."""
    if not pool.is_gpu:
        return range(pool.nodes)
    return with_room(pool, with_ranks(pool, request, choice.ranks_per_node)[0], request)


def _batch(request: Request) -> Infeasible | None:
    """Return ``Infeasible`` if the groups' local batch sizes cannot add up to the global batch size, else None."""
    ranks = sum(f.nodes * f.ranks_per_node for f in request.fixed)
    fixed_samples = sum(f.nodes * f.ranks_per_node * (f.batch_per_rank or 0) for f in request.fixed)
    rest = sum(f.nodes * f.ranks_per_node for f in request.fixed if f.batch_per_rank is None)
    if request.strategy in ("Pipeline", "Tensor"):
        return None  # All ranks of a replica have the same samples.
    if request.global_batch < ranks:
        return Infeasible(
            "BatchTooSmall",
            "spec.globalBatchSize",
            f"found a global batch of {request.global_batch} samples for {ranks} ranks; expected at least one sample "
            "per rank: raise globalBatchSize or use fewer ranks",
        )
    if fixed_samples + rest > request.global_batch or (not rest and fixed_samples != request.global_batch):
        expected = f"{request.global_batch}, the value of spec.globalBatchSize"
        if rest:
            expected = (
                f"at most {request.global_batch - rest}, because spec.globalBatchSize is {request.global_batch}, and "
                f"the ranks without batchPerRank ({rest}) need at least one sample each"
            )
        return Infeasible(
            "BatchMismatch",
            "spec.planning.groups",
            f"found values of batchPerRank that add up to {fixed_samples} samples over all ranks; expected "
            f"{expected}: change batchPerRank or spec.globalBatchSize",
        )
    return None
