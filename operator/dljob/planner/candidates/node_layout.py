"""Layouts: how many ranks a job runs on a node, and with how many CPUs each of them computes.

On CPU nodes, few ranks with many cores save communication and memory, and many ranks with few cores lose less to code
that more threads do not speed up. The planner compares both (``perf.step.core_scaling`` has the model).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log2

from dljob.calibrate.learned import LearnedPoint
from dljob.cluster.hardware import Hardware
from dljob.perf.step.core_scaling import CORES_SPREAD, CoreUse
from dljob.planner.candidates.pools import Pool, cores_of_rank
from dljob.planner.types import Request

MAX_SIZES = 8
"""Maximum number of different sizes of CPU nodes whose whole CPUs layouts divide among ranks, besides powers of two."""
EXACT_NODES = 8
"""Largest number of nodes on one machine up to which ``shared_layouts`` considers every number of them."""
MEMORY_AMOUNTS = 8
"""Largest number of different amounts of free memory of CPU nodes up to which ``memory_tiers`` considers every one."""
MEMORY_STEPS = 3
"""Number of amounts that it considers if there are more. Each set of nodes makes the search longer."""


@dataclass(frozen=True)
class Layout:
    """The use of a node by a plan: ``ranks`` ranks, each of which computes with ``cores`` CPUs (may be a fraction).

    ``machine_nodes``: number of the plan's nodes that share the cores of one machine (``cluster.machines``).
    """

    ranks: int
    cores: float
    machine_nodes: int = 1

    @property
    def cpus(self) -> float:
        return self.ranks * self.cores


def ranks_per_node_choices(pool: Pool) -> list[int]:
    """Return the numbers of ranks per GPU node to consider: every number of free GPUs of a node, and powers of two."""
    most = pool.free[0]
    return sorted({*set(pool.free), *_powers(most)})


def layouts(pool: Pool, request: Request) -> list[Layout]:
    """Return the layouts to consider on the nodes of a pool, those with the fewest CPUs first.

    GPU nodes: the numbers of ranks in ``ranks_per_node_choices``, which share the requested CPUs of a pod. CPU nodes:
    all available CPUs, or a power of two of them, divided among 1, 2, 4, ... ranks, or one rank for each CPU. If the
    user sets the CPU request of a pod (``request.cpu_per_pod``), only this number is divided. If the
    user sets the threads of a rank (``request.threads_per_rank``), it gets at most as many CPUs, and several ranks on a
    node have at most as many threads as CPUs.
    """
    if pool.is_gpu:
        return [Layout(r, cores_of_rank(pool.cpu, r, request, is_gpu=True)) for r in ranks_per_node_choices(pool)]
    found = {Layout(1, cores_of_rank(pool.cpu, 1, request))}
    for cpus in _totals(pool, request):
        for ranks in {*_powers(cpus), cpus}:
            cores = cores_of_rank(pool.cpu, ranks, request) if request.cpu_per_pod else _threads(cpus // ranks, request)
            if ranks == 1 or not request.threads_per_rank or ranks * cores <= cpus:
                found.add(Layout(ranks, cores))
    whole = [each for each in found if each.ranks == 1 or each.cores >= 1]
    return sorted(whole, key=lambda each: (each.cpus, each.ranks))


def largest_layouts(pool: Pool, request: Request) -> list[Layout]:
    """Return the layouts with the most CPUs for each number of ranks per node, for strategies that are slow to search.

    On GPU nodes, these are all layouts.
    """
    most = {each.ranks: each for each in layouts(pool, request)}
    return list(most.values())


def layouts_within_quota(pool: Pool, request: Request) -> list[Layout]:
    """Return ``largest_layouts``, or all layouts if a quota limits the CPUs of all pods.

    Layouts with fewer CPUs then leave more nodes within the quota. Those with the most CPUs come first.
    """
    if pool.is_gpu or request.cpus_max is None:
        return largest_layouts(pool, request)
    return layouts(pool, request)[::-1]


def with_ranks(pool: Pool, request: Request, ranks: int) -> list[Layout]:
    """Return the layouts with ``ranks`` ranks on each node, which the user has fixed. There is at least one."""
    found = {Layout(ranks, cores_of_rank(pool.cpu, ranks, request, is_gpu=pool.is_gpu))}
    if not pool.is_gpu and not request.cpu_per_pod:
        totals = [cpus for cpus in _totals(pool, request) if cpus >= ranks]
        found |= {Layout(ranks, _threads(cpus // ranks, request)) for cpus in totals}
    return sorted(found, key=lambda each: each.cores)


def _threads(cpus: int, request: Request) -> float:
    """Return with how many of ``cpus`` CPUs a rank computes: all, or as many as the threads that the user sets."""
    return float(min(cpus, request.threads_per_rank or cpus))


def _totals(pool: Pool, request: Request) -> set[int]:
    """Return the numbers of whole CPUs of a CPU node that layouts divide among ranks.

    A layout may need more CPUs than the smallest node has, see ``with_room``.
    """
    limit = min(pool.most_cpu, request.cpu_limit_per_pod or inf)
    if request.cpu_per_pod:
        return {max(1, int(min(request.cpu_per_pod, limit)))}
    if request.cpus_max is not None:
        limit = min(limit, request.cpus_max / max(1, request.nodes_min))
    rooms = {int(min(limit, room)) for room in pool.room_cpu}
    sizes = sorted(rooms, reverse=True)[: MAX_SIZES - 1]
    return {each for each in (*_powers(max(rooms)), *sizes, min(rooms)) if each >= 1}


def nodes_with_room(pool: Pool, layout: Layout, request: Request) -> list[int]:
    """Return the free main memory in bytes of each node of the pool that has room (``with_room``)."""
    return [pool.memory_nbytes[i] for i in with_room(pool, layout, request)]


def with_room(pool: Pool, layout: Layout, request: Request) -> list[int]:
    """Return the indices of the pool's nodes with enough free GPUs or CPUs for this layout.

    All nodes of a pool have enough CPUs if the spec sets the CPU request of pods. If the layout has one rank on CPUs
    with at most one CPU, all nodes that have as much count, even if it is not free. With groups that the user fixes,
    several such ranks also count as fitting, if they need no more CPUs than the smallest node has.
    """
    cpus = layout.cpus
    if pool.is_gpu:
        ranks, least = layout.ranks, 0.0 if request.cpu_per_pod else cpus
        nodes = enumerate(zip(pool.free, pool.room_cpu, strict=True))
        return [i for i, (free, room) in nodes if free >= ranks and room >= least]
    if request.cpu_per_pod:
        return list(range(pool.nodes))
    if layout.cores <= 1 and (layout.ranks == 1 or (bool(request.fixed) and cpus <= pool.cpu)):
        return [i for i, cpu in enumerate(pool.node_cpu) if cpu >= layout.cores]
    return [i for i, room in enumerate(pool.room_cpu) if room >= cpus]


def memory_tiers(pool: Pool, layout: Layout, request: Request, least_nbytes: float = 0.0) -> list[tuple[int, int]]:
    """Return (number of nodes, smallest free memory in bytes) for the sets of nodes that a plan may use.

    Kubernetes may place a pod on any node of a set, so the smallest free memory of its nodes limits the batch. A set of
    fewer nodes can therefore be better. Let M be the largest free memory of the nodes on which a pod with this layout
    fits. The sets have the nodes with at least M / 2, M / 4, … of free memory, up to the set of all these nodes, so
    that a node with more memory than the others takes no set away. Another set has the nodes with at least
    ``least_nbytes``, the memory of a pod. On CPUs, where this memory bounds the batch of a rank, there are more sets
    (``_cpu_tiers``). If the pod fits on no node, return an empty list.
    """
    sizes = sorted(nodes_with_room(pool, layout, request))
    amounts, least = {0.0, float(least_nbytes)}, max(sizes, default=0) / 2
    while sizes and least > sizes[0]:
        amounts.add(least)
        least /= 2
    if not pool.is_gpu:
        amounts |= _cpu_tiers(sizes, request)
    counts = {len(sizes) - bisect_left(sizes, amount) for amount in amounts}
    return [(count, sizes[-count]) for count in sorted(counts) if count]


def _cpu_tiers(sizes: Sequence[int], request: Request) -> set[float]:
    """Return amounts of memory. The CPU nodes with at least one of these amounts are a set of nodes of their own.

    ``sizes``: free memory of the nodes, in rising order. The sets have the nodes with at least as much as one of them,
    for each of up to ``MEMORY_AMOUNTS`` different amounts. If there are more, they have the nodes with at least one of
    ``MEMORY_STEPS`` amounts in equal steps from that of the fewest nodes of a plan down to the smallest. A pod that
    fits on enough nodes thus fits on all nodes of a set.
    """
    amounts: set[float] = {*sizes}
    if len(amounts) > MEMORY_AMOUNTS:
        most = sizes[-min(max(1, request.nodes_min), len(sizes))]
        amounts = {most - i * (most - sizes[0]) / MEMORY_STEPS for i in range(MEMORY_STEPS)}
    return amounts


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``most``."""
    return [1 << i for i in range(most.bit_length())]


def measured_on(
    points: Sequence[LearnedPoint],
    layout: Layout,
    step_s: Callable[[Layout, int], float],
    unknown_cores: float = 1.0,
    node_cpu: float = inf,
) -> tuple[list[tuple[int, float]], float]:
    """Return (measured (batch, seconds) points for a layout on a CPU node, additional spread of predictions from them).

    Points of the same layout are returned as they are. If there are none, return those of the most similar measured
    layout, multiplied by the predicted time with ``layout`` over that with their own layout. The spread is the standard
    deviation of log(measured / predicted) of this factor; 0 for points of the same layout.

    ``step_s``: function from a layout and a batch to the predicted seconds without measurements. ``unknown_cores``:
    number of CPUs of points that do not state it, because a release measured them that gave a node one rank.
    ``node_cpu``: CPUs of a node, which limit those of points, because profiles store a part of a CPU as 1.
    """
    by_layout: dict[Layout, list[LearnedPoint]] = {}
    unknown = Layout(1, min(max(1.0, float(int(unknown_cores))), node_cpu))
    stated = [point for point in points if point.cores is not None]
    for point in stated:
        cores = min(float(point.cores or 1), node_cpu / point.ranks)
        by_layout.setdefault(Layout(point.ranks, cores, point.machine_nodes), []).append(point)
    for point in points:
        if point.cores is None and all(other.cores is None for other in by_layout.get(unknown, ())):
            by_layout.setdefault(unknown, []).append(point)
    if not by_layout:
        return [], 0.0
    nearest = min(by_layout, key=lambda each: (_distance(each, layout), each.cpus, each.ranks))
    factors = {p.batch: step_s(layout, p.batch) / step_s(nearest, p.batch) for p in by_layout[nearest]}
    found = [(p.batch, p.compute_s * (1.0 if nearest == layout else factors[p.batch])) for p in by_layout[nearest]]
    return sorted(found), CORES_SPREAD * _distance(nearest, layout)


def on_machine(pool: Pool, layout: Layout, machine_nodes: int, hardware: Hardware | None = None) -> Layout:
    """Return ``layout`` with ``machine_nodes`` nodes of the plan on one machine, or with 1 if that is not slower."""
    shared, alone = replace(layout, machine_nodes=machine_nodes), replace(layout, machine_nodes=1)
    use, own = (use_of(pool, each, hardware) for each in (shared, alone))
    return alone if (use.cores, use.memory_part) == (own.cores, own.memory_part) else shared


def shared_layouts(pool: Pool, layout: Layout, hardware: Hardware | None = None) -> list[tuple[int, int, Layout]]:
    """Return ``layout`` for plans of every size, as (fewest nodes, most nodes, layout with the nodes on one machine).

    The ranges follow each other and end with all nodes of the pool. There is only one if no nodes share a machine, or
    if the machines have enough cores. Above ``EXACT_NODES`` nodes on one machine, only powers of two are considered, so
    that a plan may count more of them than it has.
    """
    if not pool.machines:
        return [(1, pool.nodes, layout)]
    most = pool.machine_nodes(pool.nodes)
    exact = range(1, min(most, EXACT_NODES) + 1)
    found: list[tuple[int, int, Layout]] = []
    begin = 1
    for k in sorted({*exact, *(power for power in _powers(most) if power > EXACT_NODES), most}):
        end = bisect_right(range(1, pool.nodes + 1), k, key=pool.machine_nodes) if k < most else pool.nodes
        if end < begin:
            continue
        shared = on_machine(pool, layout, k, hardware)
        if found and found[-1][2] == shared:
            begin = found.pop()[0]
        found.append((begin, end, shared))
        begin = end + 1
    return found


def _distance(a: Layout, b: Layout) -> float:
    """Return how many doublings of cores, of ranks or of nodes on one machine lie between two layouts.

    A part of a CPU counts as one CPU.
    """
    on_machine = abs(log2(a.machine_nodes / b.machine_nodes))
    return abs(log2(max(1.0, a.cores) / max(1.0, b.cores))) + abs(log2(a.ranks / b.ranks)) + on_machine


def use_of(pool: Pool, layout: Layout, hardware: Hardware | None = None) -> CoreUse:
    """Return the use of the cores of a CPU node by the ranks of ``layout``.

    Nodes of one machine count like one node with the cores of the machine and the ranks of all these nodes. If the
    ranks together have more cores than the machine, each gets an equal part of it. The same holds for the cores that
    other processes leave to them (``Hardware.left``). ``hardware``: measured constants of this type of node; None:
    assumed constants.
    """
    nodes = layout.machine_nodes
    ranks, machine_cpu = nodes * layout.ranks, pool.machine_cpu(nodes)
    cores = min(layout.cores, machine_cpu / ranks)
    use = CoreUse(cores, ranks, max(min(nodes * pool.cpu_with(layout.cpus), machine_cpu), cores * ranks))
    if hardware is None:
        return use
    serial = use.serial if hardware.serial is None else hardware.serial
    use = replace(use, serial=serial, memory_cores=hardware.memory_cores)
    on_node = hardware.left(max(pool.cpu_with(layout.cpus), layout.cpus)) / layout.ranks
    left = min(on_node, hardware.left(machine_cpu, nodes) / ranks)
    return replace(use, cores=left, threads=cores) if hardware.background_cpu and left < cores else use


def packing_of(pool: Pool, layout: Layout, hardware: Hardware | None = None) -> float:
    """Return the time in which the slowest rank of a machine computes, divided by the mean of all its ranks.

    If the threads of all ranks exceed the cores, some cores have one thread more than others. A kernel rarely moves a
    thread within a step, so the ranks wait for the thread with the smallest part of a core. Three ranks on two cores:
    4/3. ``use_of`` has the mean. On two cores, the slowest of three ranks took 2.0 to 2.2 times what is predicted for
    one alone.
    """
    if use_of(pool, layout, hardware).cores >= layout.cores:
        return 1.0
    cpu = min(pool.machine_cpu(layout.machine_nodes), layout.machine_nodes * pool.cpu_with(layout.cpus))
    for_each = layout.machine_nodes * layout.ranks * ceil(layout.cores) / ceil(cpu)
    return ceil(for_each) / for_each if for_each > 1 else 1.0


def cores_text(pool: Pool, layout: Layout, hardware: Hardware | None = None) -> str:
    """Return a text that says with whom the ranks of a CPU node share its cores, to follow another text; or ''."""
    use, nodes = use_of(pool, layout, hardware), layout.machine_nodes
    taken = use.threads is not None
    left = f"{use.cores * use.ranks:.3g}"
    if nodes > 1:
        others = " that other processes leave (dljob probe)" if taken else ""
        cpu = left if taken else f"{pool.machine_cpu(nodes):.3g}"
        return f"; {nodes} nodes share the {cpu} CPUs of a machine (label dljob.dev/machine){others}"
    return (
        f"; other processes of a node leave {left} of {pool.cpu_with(layout.cpus):.3g} CPUs (dljob probe)"
        if taken
        else ""
    )
