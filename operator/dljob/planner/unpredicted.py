"""Plan a job about which nothing can be predicted: take the nodes that the spec asks for, without a search.

Such a job runs a script for torchrun or an MPI program. Its spec lacks the model, the dataset, the global batch size or
the number of epochs or steps.
"""

from collections.abc import Sequence

from dljob.cluster import ClusterView
from dljob.cluster.catalogue import gpu_or_assumed, vendor
from dljob.cluster.domains import domains
from dljob.perf.resources.memory import AGENT_NBYTES, STORE_CLIENT_NBYTES, shm_nbytes
from dljob.planner.allowed_nodes import allowed_nodes
from dljob.planner.candidates.batch_split import even
from dljob.planner.candidates.cost.loading import UNMEASURED, most_cpus
from dljob.planner.candidates.fixed import Rooms, room_for
from dljob.planner.candidates.node_layout import Layout, nodes_with_room, ranks_per_node_choices
from dljob.planner.candidates.pools import Eligible, Pool, cores_of_rank, usable, wanted
from dljob.planner.explanation.infeasible import too_few
from dljob.planner.types import Choice, Decision, FixedChoice, Group, Infeasible, Prediction, Request
from dljob.planner.types.texts import gibibytes, group_names

ASSUMED_NBYTES = 4 * 2**30
"""Main memory of a rank on CPUs whose model is unknown."""
ASSUMED_GPU_NBYTES = 16 * 2**30
"""Main memory of a rank on a GPU whose model is unknown."""
MAX_NODE_SHARE = 0.5
"""Largest fraction of a node's free memory that a pod requests if its needs are unknown (but at least 512 MiB)."""


def plan_unpredicted(request: Request, view: ClusterView) -> Decision | Infeasible:
    """Return a plan with the nodes that the request asks for, or the reason why no plan is possible.

    If the user fixes groups of nodes (``request.fixed``), the plan consists of these groups. Otherwise, it has
    ``request.nodes_min`` nodes of one device type, or with ``request.takes_most`` up to ``request.nodes_max`` of them.
    GPUs take precedence over CPUs, and then the type with the most computing power is used. A CPU node runs one rank.
    Each GPU node runs the same number of ranks. This number is limited by the fewest free GPUs on one of these nodes,
    by the quota, and by one sample per rank. The plan's predicted times are 0, which means unknown.
    """
    found: Decision | Infeasible | None = None
    for domain in domains(usable(request, view), request.topology, request.spot, avoid_spot=request.avoid_spot):
        found = _plan(request, domain.within(view))
        if isinstance(found, Decision):
            return Decision(found.chosen, found.candidates, found.refusals, found.warning, domain=domain)
    assert found is not None, "there is at least one domain"
    return found


def _plan(request: Request, view: ClusterView) -> Decision | Infeasible:
    nodes = allowed_nodes(request, view)
    if isinstance(nodes, Infeasible):
        return nodes
    parts = _fixed(request, nodes) if request.fixed else _chosen(request, nodes, view)
    if isinstance(parts, Infeasible):
        return parts
    shares = _shares(request, [choice for _, choice in parts])
    if isinstance(shares, Infeasible):
        return shares
    rooms = [_room_nbytes(part, parts, request) for part in parts]
    in_store = request.checkpoints_in_store
    needs = [_memory_nbytes(part, room, in_store=in_store) for part, room in zip(parts, rooms, strict=True)]
    # All pods request the same memory, which must be free on the nodes of each group.
    assumed = min(max(needs), *rooms)
    # What other ranks per node were measured to need is not what these need.
    memory_nbytes = max(assumed, 0 if request.memory_measured else request.memory_least_nbytes)
    names = group_names([pool.device for pool, _ in parts])
    groups = tuple(
        Group(
            name,
            pool.device,
            pool.is_gpu,
            choice.nodes,
            choice.ranks_per_node,
            tuple(sizes),
            choice.ranks_per_node * _cores(pool, choice, request),
            _cores(pool, choice, request),
        )
        for name, (pool, choice), sizes in zip(names, parts, shares, strict=True)
    )
    listed = [
        f"{g.nodes} x {g.device}" + (f" ({g.ranks_per_node} ranks each)" if g.ranks_per_node > 1 else "")
        for g in groups
    ]
    batch = f", {request.global_batch} samples" if request.global_batch else ""
    choice = Choice(
        f"{' + '.join(listed)}, {request.collective or 'Torch'}{batch}",
        groups,
        request.collective or "Torch",
        _unknown(request.memory_per_pod_nbytes or memory_nbytes),
    )
    return Decision(choice, (choice,), nodes.refusals, _warning(request, memory_nbytes))


def _chosen(request: Request, nodes: Eligible, view: ClusterView) -> list[tuple[Pool, FixedChoice]] | Infeasible:
    """Choose the pool (nodes with one type of device) to use, or return the reason why no pool is possible.

    Return a list with one element: the pool, and the nodes and ranks per node to use. Prefer GPUs to CPUs, and then the
    pool with the most computing power.
    """
    if (short := too_few(request, nodes, view)) is not None:
        return short
    needed = max(1, request.nodes_min)
    most = max(needed, request.nodes_max or needed) if request.takes_most else needed
    options = [
        (pool, count, _ranks_per_node(request, pool, count))
        for pool in nodes.pools
        for count in range(needed, min(pool.nodes, most) + 1)
    ]
    found = [
        (pool, FixedChoice(pool.device, count, ranks))
        for pool, count, ranks in options
        if ranks and request.allows_ranks(count * ranks)
    ]
    if found:
        return [max(found, key=lambda item: (item[0].is_gpu, _power(*item), item[0].device))]
    largest = max((pool.nodes for pool in nodes.pools), default=0)
    text = (
        f"found at most {largest} free nodes of one device type; expected at least {needed}, because without a "
        "prediction a plan uses one device type. Wait until nodes are free, lower spec.nodes.min, or list the nodes of "
        "each device type in spec.planning.groups"
    )
    if options:
        text = (
            f"found no device type with {needed} nodes that can all have a rank; expected at least one GPU per node "
            "within the namespace's quota, and one sample per node in spec.globalBatchSize. Lower spec.nodes.min, or "
            "raise the quota or spec.globalBatchSize"
        )
    return Infeasible(
        "DeviceBusy" if nodes.busy else "TooFewNodes",
        "spec.nodes.min",
        text,
        transient=True,
        refusals=nodes.refusals,
    )


def _ranks_per_node(request: Request, pool: Pool, nodes: int) -> int:
    """Return how many ranks each of ``nodes`` nodes of a pool can run; 0 if free GPUs, quota or batch allow none."""
    if not pool.is_gpu:
        return 1
    fitting = [
        r
        for r in ranks_per_node_choices(pool)
        if len(room_for(pool, FixedChoice(pool.device, nodes, r), request)) >= nodes
    ]
    most = min(max(fitting, default=0), request.gpus_max.get(vendor(pool.device), 2**31) // nodes)
    return min(most, request.global_batch // nodes) if request.global_batch else most


def _cores(pool: Pool, choice: FixedChoice, request: Request) -> float:
    cores = cores_of_rank(pool.cpu, choice.ranks_per_node, request, is_gpu=pool.is_gpu)
    if not pool.is_gpu:
        return cores
    return max(cores, min(UNMEASURED, most_cpus(Layout(choice.ranks_per_node, cores), pool, request)))


def _power(pool: Pool, choice: FixedChoice) -> float:
    devices = choice.nodes * choice.ranks_per_node
    return devices * (gpu_or_assumed(pool.device).fp32_FLOPs if pool.is_gpu else pool.cpu)


def _fixed(request: Request, nodes: Eligible) -> list[tuple[Pool, FixedChoice]] | Infeasible:
    """Return the groups that the user fixes, each with its pool, or the reason why there is no room for a group."""
    found: list[tuple[Pool, FixedChoice]] = []
    rooms = Rooms(request)
    for i, choice in enumerate(request.fixed):
        pool = next((pool for pool in nodes.pools if wanted(pool.device, [choice.device])), None)
        room = rooms.take(pool, choice) if pool else 0
        if pool is None or room < choice.nodes:
            return Infeasible(
                "DeviceBusy" if nodes.busy else "TooFewNodes",
                f"spec.planning.groups[{i}].nodes",
                f"found {room} nodes with device {choice.device} and room for {choice.ranks_per_node} ranks "
                f"on each node; expected {choice.nodes}, as this group requests: lower nodes or ranksPerNode, or wait "
                "until more nodes are free",
                transient=True,
                refusals=nodes.refusals,
            )
        found.append((pool, choice))
    return found


def _shares(request: Request, choices: Sequence[FixedChoice]) -> list[list[int]] | Infeasible:
    """Return a list of local batch sizes for each group of nodes, or the reason why they cannot add up.

    They add up to the global batch size. If it is unknown, each rank has a local batch size of 1. If the user fixes
    some local batch sizes, all other ranks have 1. Otherwise, all ranks have nearly the same.
    """
    counts = [choice.nodes * choice.ranks_per_node for choice in choices]
    if not request.global_batch:
        return [[1] * count for count in counts]
    if any(choice.batch_per_rank for choice in choices):
        own = [[choice.batch_per_rank or 1] * count for choice, count in zip(choices, counts, strict=True)]
        if sum(map(sum, own)) == request.global_batch:
            return own
        return Infeasible(
            "BatchMismatch",
            "spec.planning.groups",
            f"found {sum(map(sum, own))} samples over all ranks, with 1 sample for each rank without batchPerRank; "
            f"expected {request.global_batch}, the value of spec.globalBatchSize: change batchPerRank or "
            "spec.globalBatchSize",
        )
    if request.global_batch < sum(counts):
        return Infeasible(
            "BatchTooSmall",
            "spec.globalBatchSize",
            f"found a global batch of {request.global_batch} samples for {sum(counts)} ranks; expected at least one "
            "sample per rank: raise globalBatchSize or use fewer ranks",
        )
    rest, split = even(request.global_batch, sum(counts)), []
    for count in counts:
        split.append(rest[:count])
        rest = rest[count:]
    return split


def _room_nbytes(part: tuple[Pool, FixedChoice], parts: Sequence[tuple[Pool, FixedChoice]], request: Request) -> int:
    """Return the free memory in bytes that the nodes of a group have at least.

    They are the nodes with the most memory among those on which a pod of the group has enough GPUs and CPUs, because
    Kubernetes places pods only where their requests fit. ``parts``: all groups. Those with the same type of device take
    nodes of the same pool.
    """
    pool, choice = part
    count = sum(other.nodes for each, other in parts if each.device == pool.device)
    layout = Layout(choice.ranks_per_node, _cores(pool, choice, request))
    return min(sorted(nodes_with_room(pool, layout, request), reverse=True)[:count])


def _memory_nbytes(part: tuple[Pool, FixedChoice], room_nbytes: int, *, in_store: bool) -> int:
    """Return the main memory in bytes that a pod requests. It is an assumption, because the model is unknown.

    ``room_nbytes``: free memory of each node. ``in_store``: True if the checkpoints are in an object store.
    """
    pool, choice = part
    each = ASSUMED_GPU_NBYTES if pool.is_gpu else ASSUMED_NBYTES
    assumed = AGENT_NBYTES + shm_nbytes(choice.ranks_per_node, pool.is_gpu) + choice.ranks_per_node * each
    if in_store:
        assumed += STORE_CLIENT_NBYTES
    return max(2**29, min(assumed, int(MAX_NODE_SHARE * room_nbytes)))


def _unknown(memory_nbytes: int) -> Prediction:
    """Return a prediction without times: 0 stands for an unknown value."""
    return Prediction(
        step_s=0.0,
        step_p90_s=0.0,
        compute_s=0.0,
        communication_s=0.0,
        total_s=0.0,
        samples_per_s=0.0,
        memory_nbytes=0,
        energy_J=None,
        cost_usd=None,
        bottleneck="unknown",
        basis="catalogue",
        host_memory_nbytes=memory_nbytes,
    )


def _warning(request: Request, memory_nbytes: int) -> str | None:
    found = []
    predicts = request.structure is not None
    if request.memory_per_pod_nbytes is None and memory_nbytes > request.memory_least_nbytes:
        found.append(
            f"each pod requests {gibibytes(memory_nbytes)} of memory, which is an assumption: set spec.resources.memory"
        )
    if request.deadline_s is not None and not predicts:
        unset = ", ".join(f"spec.{name}" for name in request.missing)
        found.append(f"spec.objective.deadline is not checked, because a prediction needs the unset fields {unset}")
    if request.minimize != "Time":
        found.append(
            f"spec.objective.minimize {request.minimize} has no effect without "
            f"{'a global batch size and a number of steps' if predicts else 'a prediction'}"
        )
    return "; ".join(found) or None
