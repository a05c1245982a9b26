"""Options: the ways to use each type of device, which all candidate plans share, and the slowest link between ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import inf

from dljob.calibrate.learned import Learned, hardware_of
from dljob.calibrate.scaling import Posterior
from dljob.cluster.catalogue import Device
from dljob.cluster.hardware import Hardware
from dljob.perf.fit.curve import Curve
from dljob.perf.fit.measured_ratio import ON_CURVE, MeasuredRatio
from dljob.perf.resources import energy, memory, power
from dljob.perf.resources.memory import PROCESS_NBYTES
from dljob.perf.step import communication, input_data
from dljob.perf.step.backends import Backend
from dljob.perf.step.communication import Link
from dljob.perf.step.step import LINK_SPREAD, OVERLAP_EFFICIENCY
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.cost.links import End, Network, network_of, slowest
from dljob.planner.candidates.cost.loading import loader_cpus
from dljob.planner.candidates.cost.measured import posterior
from dljob.planner.candidates.cost.rank_speed import RankSpeed, rank_speed
from dljob.planner.candidates.node_layout import Layout, memory_tiers, shared_layouts
from dljob.planner.candidates.pools import Pool
from dljob.planner.candidates.request_workload import stored_of
from dljob.planner.types import Request, Strategy

GPU_LATENCY_S = 10e-6
"""Latency between GPUs of one node, including the NCCL call."""

NCCL_PART = 0.8
"""Part of a GPU's data-sheet bandwidth to other GPUs of its node (NVLink, PCIe) that NCCL's all-reduce reaches.

Published measurements of large messages (vTrain, MICRO 2024, artifact): 229 of 300 GB/s on 8 A100, and 134.5 of 150
GB/s on 8 V100. On networks between nodes NCCL reaches nearly all: 192 of 200 GB/s on DGX A100 (issue 812 of
NVIDIA/nccl), so their bandwidth counts as stated."""
MORE = 1.02
"""Minimum factor by which a larger number of ranks must increase a rank's largest batch with a sharded optimizer.

If the gain is smaller, ``sharing_options`` returns no separate option for that number of ranks, because each option
makes the search longer."""


@dataclass(frozen=True)
class Option:
    """A way in which a job can use nodes of one device type, with the predicted speed and memory of each rank.

    ``pool``: the nodes with this type of device. ``ranks_per_node`` ranks run on each node that has room for them. A
    candidate plan chooses one or more options, and the number of nodes for each of them.
    """

    pool: Pool
    ranks_per_node: int
    nodes: int
    """Largest number of nodes of a plan with this option. That many nodes in the pool have room for these ranks."""
    device: Device
    curve: Curve
    """Computing time plus exposed input time in seconds, over a rank's batch."""
    computing: Curve
    """Computing time in seconds, over a rank's batch."""
    fetching: input_data.Fetching
    largest_batch: int
    """Largest local batch in samples that fits in a rank's memory; 0 if the model alone does not fit."""
    memory_nbytes: float
    """Memory in bytes that one rank may use: GPU memory or, on CPUs, main memory."""
    compute_spread: float
    learned: Learned | None
    """Measured constants of the job's model on this type of device; None without a measurement."""
    cores: float
    """Number of CPUs that each rank computes with; it may be a fraction."""
    host_nbytes: float = inf
    """Main memory in bytes that a pod on a GPU node may request; infinite on CPUs, and if the spec sets its request."""
    slowdown: float = 1.0
    """Factor by which the node's other ranks slow down computing; both curves include it."""
    shared_slowdown: float = 1.0
    """Factor by which all other ranks of its machine slow down computing, on its node and others; both curves include
    it."""
    ratio: MeasuredRatio = ON_CURVE
    """Measured computing times / ``computing``, over a micro-batch. Predictions from ``steps`` include it."""
    packing: float = 1.0
    """Factor by which the slowest rank of a machine exceeds the mean (``node_layout.packing_of``)."""
    min_nodes: int = 1
    """Smallest number of nodes of a plan with this option. With fewer nodes, fewer share a machine."""
    machine_nodes: int = 1
    """Number of the plan's nodes that share the cores of one machine, which both curves include."""
    steps: Posterior | None = None
    """Posterior distribution of step times, from multi-device steps that were measured on this type of device; None
    without such measurements."""
    strategy: Strategy = "Data"
    min_ranks: int = 1
    """Minimum number of ranks in a candidate that contains this option, because ``largest_batch`` assumes that so many
    ranks shard the optimizer state."""
    update_s: float = 0.0
    """Seconds within ``curve`` for the optimizer's update; 0 if measurements replace the prediction."""
    update_once_s: float = 0.0
    """Predicted seconds for the optimizer's update, even if measurements replace the prediction of the whole step."""
    micro_batches: int = 1
    """Number of micro-batches of a step (gradient accumulation). Both curves and ``largest_batch`` include them."""
    hardware: Hardware | None = None
    """Measured hardware of this type of device; None without a measurement."""
    single: "Option | None" = None
    """This option with one micro-batch, if the planner chooses the number of micro-batches later; otherwise None."""
    speed_of: Callable[..., RankSpeed] | None = field(default=None, compare=False, repr=False)
    """Function from another workload, or None, and changed fields of the layout to the speed of a rank."""

    @property
    def cpus(self) -> float:
        """Return the number of CPUs that the ranks of a node compute with."""
        return self.ranks_per_node * self.cores

    @cached_property
    def links(self) -> tuple[tuple[Link, float], tuple[Link, float]]:
        """Return the results of ``link_of`` for ranks of this option on one node, and on several nodes."""
        return _link_of(self, 1), _link_of(self, 2)

    @property
    def end(self) -> End:
        """Return the nodes of this option, as one end of links to nodes of other device types."""
        return End(self.pool, self.hardware)

    @property
    def label(self) -> str:
        return self.pool.device

    @property
    def overlapping_s(self) -> float:
        """Return the computing seconds of the largest micro-batch, which bound the communication that computing hides.

        Return infinity if the number of micro-batches is known: the candidate's own computing time is then the bound.
        """
        return inf if self.single is None else self.single.computing.seconds(self.single.largest_batch)

    def largest_of(self, held: Workload) -> int:
        """Return the largest local batch of a rank that holds ``held``, such as a part of the optimizer state."""
        workers = 0 if self.pool.is_gpu else self.processes  # they do not use GPU memory
        largest = memory.largest_batch(held, self.memory_nbytes, self.pool.is_gpu, self.device.growth_factors, workers)
        return min(largest, memory.largest_batch_of_pod(held, self.host_nbytes, self.ranks_per_node, self.processes))

    def needed_nbytes(self, held: Workload, samples: int) -> int:
        """Return the memory in bytes that a rank needs for ``held`` and a local batch of ``samples`` samples."""
        return memory.rank_nbytes(held, samples, self.pool.is_gpu, self.device.growth_factors)

    @property
    def processes(self) -> int:
        """Return the number of data-loading processes of a rank; 0 if a thread or the rank itself loads its data."""
        return self.fetching.workers if self.fetching.processes else 0

    def pod_nbytes(self, held: Workload, samples: int) -> int:
        """Return the main memory in bytes that a pod requests if each rank has a local batch of ``samples`` samples."""
        ranks, is_gpu = self.ranks_per_node, self.pool.is_gpu
        return memory.pod_nbytes(held, samples, ranks, is_gpu, self.processes, self.device.growth_factors)

    def alone_s(self, samples: float) -> float:
        """Return the seconds of a step with ``samples`` samples on a rank that has its machine and disk for itself."""
        return self.fetching.alone.over(self.computing).seconds(samples) / self.shared_slowdown

    def data_s(self, samples: float) -> float:
        """Return the seconds for which a step with ``samples`` samples waits for its input; ``curve`` includes them."""
        return self.curve.seconds(samples) - self.computing.seconds(samples)


def options(
    pool: Pool,
    layout: Layout,
    workload: Workload,
    request: Request,
    learned: Mapping[tuple[str, str], Learned],
    strategy: Strategy = "Data",
    min_ranks: int = 1,
) -> list[Option]:
    """Return the ways to use the nodes of ``pool`` with a layout of ranks and cores, with their predictions.

    One option has all nodes on which a pod with this layout fits. If the free memory of these nodes differs by more
    than a factor of 2, other options exclude those with little (``_tiers``). The list is empty if the pod fits on no
    node. If nodes share the cores of machines, there are such options for each number of nodes that may share one.
    ``learned``: measured constants by (``request.key``, device). ``min_ranks``: number of ranks that shard the
    optimizer state, if ``strategy`` is Optimizer; it determines how large a batch a rank can hold.
    """
    return [
        option
        for fewest, most, shared in shared_layouts(pool, layout, hardware_of(pool.device, learned))
        for option in _with_nodes(fewest, most, pool, shared, workload, request, learned, strategy, min_ranks)
    ]


def _with_nodes(
    fewest: int,
    most: int,
    pool: Pool,
    layout: Layout,
    workload: Workload,
    request: Request,
    learned: Mapping[tuple[str, str], Learned],
    strategy: Strategy,
    min_ranks: int,
) -> list[Option]:
    """Return ``options`` for plans with ``fewest`` to ``most`` nodes; ``layout`` says how many share a machine."""
    known = learned.get((request.key(workload.precision, workload.recomputes), pool.device))
    ranks_per_node, hardware = layout.ranks, hardware_of(pool.device, learned)
    disk_Bps = input_data.DISK_BANDWIDTH_Bps if hardware is None or hardware.disk_Bps is None else hardware.disk_Bps
    speed_of = cache(lambda other, **to: rank_speed(pool, replace(layout, **to), other or workload, request, learned))
    found = speed_of(None)
    device = request.prices.device(found.device, pool.device, layout.cores)
    device = power.limited(request.energy.device(device, pool.device, found.cores))
    if known is not None and known.computing_W is not None:
        measured_W = known.computing_W * (1.0 if pool.is_gpu else found.cores)
        device = replace(device, computing_power_W=energy.believable_watts(device, measured_W))
    if request.domain.price_factor != 1.0:
        device = replace(device, usd_per_h=device.usd_per_h * request.domain.price_factor)
    result = list[Option]()
    held = memory.sharded(workload, min_ranks) if strategy == "Optimizer" else workload
    limit = request.memory_per_pod_nbytes
    least = memory.pod_nbytes(held, 1, ranks_per_node, is_gpu=True) if pool.is_gpu and limit is None else 0
    for nodes, free_nbytes in memory_tiers(pool, layout, request, least):
        if nodes < fewest or any(option.nodes == most for option in result):
            continue  # too few nodes, or enough nodes with more memory
        free, host_nbytes = limit or free_nbytes, float(free_nbytes) if pool.is_gpu and limit is None else inf
        # A pod's memory limit also bounds its page cache. The default limit leaves nothing for the cache.
        beside_ranks = (
            memory.AGENT_NBYTES + workload.beside_ranks_nbytes + memory.shm_nbytes(ranks_per_node, pool.is_gpu)
        )
        cache_nbytes = (limit or 0) - beside_ranks - ranks_per_node * PROCESS_NBYTES
        fetching = partial(
            input_data.fetching,
            workload,
            device,
            stored=stored_of(request),
            cache_nbytes=cache_nbytes,
            ranks_per_node=ranks_per_node,
            by_program=request.model is None,
            measured_s=known.fetch_s if known else None,
            disk_Bps=disk_Bps,
        )
        room = pool.gpu_nbytes or (free - beside_ranks) / ranks_per_node
        largest_batch = memory.largest_batch(held, room, pool.is_gpu, device.growth_factors)
        if pool.is_gpu:
            measured = known is not None and known.fetch_s is not None
            cores = loader_cpus(layout, pool, request, largest_batch, fetching, found.computing, measured=measured)
            input_of = fetching(cores=cores)
        else:
            cores, input_of = layout.cores, fetching(cores=found.cores, threads=layout.cores)
        option = Option(
            pool=pool,
            ranks_per_node=ranks_per_node,
            nodes=min(nodes, most),
            min_nodes=fewest,
            machine_nodes=layout.machine_nodes,
            device=device,
            curve=input_of.over(found.computing),
            computing=found.computing,
            fetching=input_of,
            largest_batch=largest_batch,
            memory_nbytes=room,
            host_nbytes=host_nbytes,
            compute_spread=found.spread,
            learned=known,
            hardware=hardware,
            slowdown=found.slowdown,
            shared_slowdown=found.shared_slowdown,
            packing=found.packing,
            ratio=found.ratio,
            cores=cores,
            strategy=strategy,
            min_ranks=min_ranks,
            update_s=found.update_s,
            update_once_s=found.update_once_s,
            speed_of=speed_of,
        )
        result.append(replace(option, largest_batch=option.largest_of(held)))
    # The steps were measured on a network that did not cross this border, or nobody knows whether it did.
    if known is None or not result or pool.crossing is not None:
        return result
    over = {nodes: link_of(result[:1], [nodes])[0] for nodes in (1, 2)}
    # The all-gather after a sharded update makes steps longer, so use only measured steps with the same strategy.
    similar = [
        s
        for s in known.steps
        if s.place.sharded == (strategy == "Optimizer") and (s.place.uses_network or pool.is_one_machine)
    ]
    one_s = [found.alone_s(s) for s in similar]
    steps = posterior(known.points, similar, one_s, workload.gradient_nbytes, lambda n: over[min(n, 2)], found.repeats)
    return [replace(option, steps=steps) for option in result]


def sharing_options(
    whole: Sequence[Option],
    layout: Layout,
    workload: Workload,
    request: Request,
    learned: Mapping[tuple[str, str], Learned],
    most_ranks: int,
) -> list[Option]:
    """Return the ways to use the nodes of a pool if the ranks shard the optimizer.

    The more ranks shard it, the larger a batch each rank can hold. ``whole``: the ways to use them with strategy Data.
    ``most_ranks``: maximum number of ranks of a plan. Some options suit any number of ranks. Others require at least 2,
    4, 8 or 16 ranks; they are added if they raise a rank's largest batch by more than the factor ``MORE``.
    """
    if any(option.learned is not None and option.learned.steps for option in whole):
        similar = options(whole[0].pool, layout, workload, request, learned, "Optimizer")
    else:
        similar = [replace(option, strategy="Optimizer") for option in whole]
    found = list(similar)
    for least in (2, 4, 8, 16):
        if least > most_ranks or all(o.largest_batch >= request.global_batch for o in found[-1:]):
            break
        held = memory.sharded(workload, least)
        most = {o.nodes: max(f.largest_batch for f in found if f.nodes == o.nodes) for o in similar}
        more = [(o, o.largest_of(held)) for o in similar]
        found += [replace(o, min_ranks=least, largest_batch=n) for o, n in more if n > MORE * most[o.nodes]]
    return found


def link_of(chosen: Sequence[Option], nodes: Sequence[int], backend: Backend | None = None) -> tuple[Link, float]:
    """Return (slowest link between the ranks of a plan with these options, spread of predictions with it).

    The spread is the standard deviation of log(measured / predicted). ``nodes``: the number of nodes of each option.
    ``backend``: communication backend by whose ratios latency and bandwidth are multiplied; None: return them
    unchanged.
    """
    link, spread = chosen[0].links[nodes[0] > 1] if len(chosen) == 1 else _mixed_link(chosen, nodes)
    return (link, spread) if backend is None else backend.over(link, spread, sum(nodes))


def _mixed_link(chosen: Sequence[Option], nodes: Sequence[int]) -> tuple[Link, float]:
    """Return what ``link_of`` does for nodes of several device types, which need not be able to reach each other fast.

    ``cost.links.slowest`` finds the network between them. Within nodes, the slowest link counts.
    """
    links, spreads = zip(*(option.links[1] for option in chosen), strict=True)
    own = [Network(e.latency_s, e.bandwidth_Bps, e.name, spread) for e, spread in zip(links, spreads, strict=True)]
    found = slowest([option.end for option in chosen], nodes, own)
    near_s, near_Bps = max(link.inside_s for link in links), min(link.inside_Bps for link in links)
    reduce_Bps = min(link.reduce_Bps for link in links)
    return Link(found.latency_s, found.bandwidth_Bps, reduce_Bps, found.name, near_s, near_Bps), found.spread


def _link_of(only: Option, nodes: int) -> tuple[Link, float]:
    """Return (slowest link between the ranks of an option on ``nodes`` nodes, spread of predictions with it).

    Within a node, the link is a direct one between devices or shared memory. Between nodes, it is the network of the
    device type (``cost.links.network_of``). The ranks of a node do not divide the bandwidth, because in a ring in rank
    order, every node has one flow in and one flow out. The links between the GPUs of a node have a bandwidth of their
    own.
    """
    near_s = near_latency_s(only.pool.is_gpu)
    if nodes > 1:
        network = network_of(only.pool, only.hardware, only.learned)
        near_Bps = peer_Bps(only) if only.pool.is_gpu and only.ranks_per_node > 1 else None
        near_s = min(near_s, network.latency_s)
        link = Link(network.latency_s, network.bandwidth_Bps, _reduce_Bps(only), network.name, near_s, near_Bps)
        return link, network.spread
    bandwidth_Bps = peer_Bps(only)
    if only.hardware is not None and only.hardware.near is not None and not only.pool.is_gpu:
        near_s, spread = max(near_s, only.hardware.near.latency_s), LINK_SPREAD["probe"]
        return Link(near_s, bandwidth_Bps, _reduce_Bps(only), "measured links within the node"), spread
    return Link(near_s, bandwidth_Bps, _reduce_Bps(only), "links within the node"), LINK_SPREAD["catalogue"]


def message_link_of(chosen: Sequence[Option], nodes: Sequence[int]) -> tuple[Link, float]:
    """Return (link for MPI's messages between ranks, standard deviation of log(measured / predicted) of its times).

    ``nodes``: the number of nodes of each option. MPI sends the messages of pipelines and of asynchronous servers,
    always through main memory, even from GPUs. On one node they do not use the network.
    """
    link, spread = link_of(chosen, nodes)
    if not chosen[0].pool.is_gpu:
        return link, spread
    memory_link = Link(communication.SHARED_MEMORY_LATENCY_S, input_data.HOST_BANDWIDTH_Bps, name="main memory")
    between = memory_link if sum(nodes) == 1 else link
    host_Bps = min(option.device.host_bandwidth_Bps for option in chosen)
    bandwidth_Bps = 1 / (1 / between.bandwidth_Bps + 2 / host_Bps)
    return Link(between.latency_s, bandwidth_Bps, between.reduce_Bps, between.name), spread


def peer_Bps(option: Option) -> float:  # noqa: N802 - the unit is part of the name
    """Return the bandwidth in bytes/s between two ranks on the same node, in one direction, that collectives reach."""
    return option.device.peer_bandwidth_Bps * (NCCL_PART if option.pool.is_gpu else 1.0)


def near_latency_s(is_gpu: bool) -> float:
    """Return the assumed latency in seconds between ranks on the same node: between GPUs, or through shared memory."""
    return GPU_LATENCY_S if is_gpu else communication.SHARED_MEMORY_LATENCY_S


def _reduce_Bps(option: Option) -> float:  # noqa: N802 - the unit is part of the name
    """Return the bytes per second at which a device adds a received buffer to its own.

    On CPUs, it is a third of the memory bandwidth, because adding two buffers reads both and writes a third. On GPUs,
    it is infinite: NCCL's kernels add a part of a buffer while they receive the next one.
    """
    return inf if option.pool.is_gpu else option.device.memory_bandwidth_Bps / 3


def overlap_of(chosen: list[Option]) -> float:
    return min(OVERLAP_EFFICIENCY[o.device.kind] for o in chosen)
