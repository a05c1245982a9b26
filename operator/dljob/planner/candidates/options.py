"""What is the same for all candidates of a request: the workload, and how fast each kind of rank is on it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import hypot

from dljob.calibrate.learned import Learned
from dljob.calibrate.scaling import Posterior
from dljob.cluster import catalogue
from dljob.cluster.catalogue import Device
from dljob.perf.fit.curve import Curve
from dljob.perf.resources import memory
from dljob.perf.resources.memory import PROCESS_NBYTES
from dljob.perf.step import communication, input_data
from dljob.perf.step.communication import Link
from dljob.perf.step.compute import calibrated, catalogue_curve, scatter, update_s
from dljob.perf.step.step import LINK_SPREAD, OVERLAP_EFFICIENCY, SPREAD
from dljob.perf.workload.workload import Workload, builtin, hinted, reference
from dljob.planner.candidates.measured import posterior
from dljob.planner.candidates.pools import Pool, cores_of_rank
from dljob.planner.candidates.transfer import carried
from dljob.planner.types import CollectiveName, Request, Strategy

ASSUMED_SPREAD = 1.5
"""How much wider the interval is for a device that is not in the catalogue."""
GPU_LATENCY_S = 10e-6
"""Between GPUs of one node, a NCCL call included."""

AUTO: dict[bool, tuple[CollectiveName, ...]] = {
    False: ("Ring", "HalvingDoubling", "Butterfly", "Tree", "ParameterServer"),
    True: ("Torch",),
}
"""What the planner chooses from, by whether ranks are on GPUs: there the trainer always sums with NCCL."""


MORE = 1.02
"""Of samples that a rank can hold, what makes another option: each costs the search time."""
HALVES: tuple[CollectiveName, ...] = ("Ring", "Torch")
"""Made of a reduce-scatter and an all-gather, between which ranks can update their parts."""


@dataclass(frozen=True)
class Option:
    """One way to use a pool: so many ranks on each of its nodes that have room for them."""

    pool: Pool
    ranks_per_node: int
    nodes: int
    """How many nodes of the pool can take it."""
    device: Device
    curve: Curve
    """Computing, and what is felt of fetching data, over a rank's batch."""
    computing: Curve
    """The same with data at hand."""
    fetching: input_data.Fetching
    largest_batch: int
    """Samples that fit in a rank's memory."""
    memory_nbytes: float
    """Memory of one rank."""
    compute_spread: float
    learned: Learned | None
    cores: float
    """CPUs that each rank computes with."""
    slowdown: float = 1.0
    """Of computing, by the other ranks of the node; in both curves."""
    steps: Posterior | None = None
    """What was measured of this device on several devices."""
    strategy: Strategy = "Data"
    least_ranks: int = 1
    """Of a candidate with this option: its memory holds where at least so many share out the optimizer's state."""
    update_s: float = 0.0
    """Of ``curve``, updating all parameters; 0 where that is not known."""

    @property
    def label(self) -> str:
        return self.pool.device

    def data_s(self, samples: float) -> float:
        """Of ``curve``, what is felt of fetching so many."""
        return self.curve.seconds(samples) - self.computing.seconds(samples)


def workload_of(request: Request) -> Workload:
    """The request's workload. Raises ValueError when the model is unknown or does not fit the dataset."""
    if request.parameters is not None and request.flops_per_sample is not None:
        return hinted(
            request.parameters,
            request.flops_per_sample,
            float(request.activation_nbytes_per_sample or 0),
            request.sample_nbytes,
            request.optimizer,
            request.momentum,
        )
    if request.like is not None:
        known = reference(request.like, request.optimizer, request.momentum)
        return replace(known, sample_nbytes=float(request.sample_nbytes or known.sample_nbytes))
    if request.model is None:
        raise ValueError("neither a model nor its size: expected spec.model.name or spec.model.hints")
    return builtin(request.model, request.dataset, request.optimizer, request.momentum)


def stored_of(request: Request) -> input_data.Stored | None:
    """What the job reads from files as it trains: programs do, and built-in models where samples are tokens.

    Others hold their data in memory from the start on. None where the spec does not say how large it is.
    """
    in_files = request.model is None or request.model == "gpt-mini"
    if not (in_files and request.dataset_samples and request.sample_nbytes):
        return None
    epochs = request.total_steps * request.global_batch / request.dataset_samples
    return input_data.Stored(request.dataset_samples, request.sample_nbytes, epochs)


def _tiers(pool: Pool, ranks_per_node: int) -> list[tuple[int, int]]:
    """(nodes, their smallest free memory): all nodes that have the devices, and only those with the most memory."""
    sizes = sorted(
        (m for m, free in zip(pool.memory_nbytes, pool.free, strict=True) if not pool.is_gpu or free >= ranks_per_node),
        reverse=True,
    )
    if not sizes:
        return []
    half = sum(m >= sizes[0] / 2 for m in sizes)
    return sorted({(len(sizes), sizes[-1]), (half, sizes[half - 1])})


def ranks_per_node_choices(pool: Pool) -> list[int]:
    """Ranks that a node of the pool may hold: one on CPUs; on GPUs as many as some node has free, and powers of two."""
    if not pool.is_gpu:
        return [1]
    most = pool.free[0]
    return sorted({*set(pool.free), *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})


def options(
    pool: Pool,
    ranks_per_node: int,
    workload: Workload,
    request: Request,
    learned: Mapping[tuple[str, str], Learned],
    strategy: Strategy = "Data",
    least_ranks: int = 1,
) -> list[Option]:
    """The ways to put ``ranks_per_node`` ranks on nodes of the pool: all nodes, or those with much memory."""
    known = learned.get((request.profile or request.model or "", pool.device))
    cores = cores_of_rank(pool.cpu, ranks_per_node, request)
    device = catalogue.gpu_or_assumed(pool.device) if pool.is_gpu else catalogue.cpu(pool.device, cores)
    curve = catalogue_curve(workload, device, cores)
    points = [(p.batch, p.compute_s) for p in known.points] if known else []
    if known is not None and known.compute_spread is not None:
        spread = known.compute_spread
    elif points:
        spread = hypot(SPREAD["profile"], scatter(points))
    else:
        points, spread = carried(request.profile or request.model or "", pool.device, workload, learned)
        if not points:
            spread = SPREAD["catalogue"] * (ASSUMED_SPREAD if device.assumed else 1.0)
    slowdown = known.contention.slowdown(ranks_per_node) if known else 1.0
    alone, result = calibrated(curve, points), []
    held = memory.sharded(workload, least_ranks) if strategy == "Optimizer" else workload
    for nodes, free_nbytes in _tiers(pool, ranks_per_node):
        free = request.memory_per_pod_nbytes or free_nbytes
        # A pod's limit bounds its page cache, too; by default it is what the ranks need, and leaves nothing.
        cache_nbytes = (request.memory_per_pod_nbytes or 0) - memory.AGENT_NBYTES - ranks_per_node * PROCESS_NBYTES
        fetching = input_data.fetching(
            workload,
            device,
            cores,
            stored_of(request),
            cache_nbytes,
            ranks_per_node,
            by_program=request.model is None,
            measured_s=known.fetch_s if known else None,
        )
        computing = alone.scaled(slowdown)
        room = device.memory_nbytes or (free - memory.AGENT_NBYTES) / ranks_per_node
        result.append(
            Option(
                pool=pool,
                ranks_per_node=ranks_per_node,
                nodes=nodes,
                device=device,
                curve=fetching.over(computing),
                computing=computing,
                fetching=fetching,
                largest_batch=memory.largest_batch(held, room, pool.is_gpu),
                memory_nbytes=room,
                compute_spread=spread,
                learned=known,
                slowdown=slowdown,
                cores=cores,
                strategy=strategy,
                least_ranks=least_ranks,
                update_s=0.0 if points else update_s(workload, device),
            )
        )
    if known is None or not result:
        return result
    over = {nodes: link_of(result[:1], nodes)[0] for nodes in (1, 2)}
    # Values that come from owners after the update make steps longer: either strategy tells little of the other.
    alike = [s for s in known.steps if s.place.sharded == (strategy == "Optimizer")]
    steps = posterior(known.points, alike, alone, workload.gradient_nbytes, lambda n: over[min(n, 2)])
    return [replace(option, steps=steps) for option in result]


def sharing_options(
    pool: Pool,
    ranks_per_node: int,
    workload: Workload,
    request: Request,
    learned: Mapping[tuple[str, str], Learned],
    most_ranks: int,
) -> list[Option]:
    """The same where ranks share out the optimizer's state: the more ranks, the larger a batch each can hold.

    Beside those that hold for any number of ranks ones for at least 2, 4, 8 and 16, if they let a rank hold more by
    what memory is known to.
    """
    alike = options(pool, ranks_per_node, workload, request, learned, "Optimizer")
    found = list(alike)
    for least in (2, 4, 8, 16):
        if least > most_ranks or all(o.largest_batch >= request.global_batch for o in found[-1:]):
            break
        held = memory.sharded(workload, least)
        more = [
            replace(o, least_ranks=least, largest_batch=memory.largest_batch(held, o.memory_nbytes, pool.is_gpu))
            for o in alike
        ]
        most = {o.nodes: max(f.largest_batch for f in found if f.nodes == o.nodes) for o in more}
        found += [o for o in more if o.largest_batch > MORE * most[o.nodes]]
    return found


def link_of(chosen: list[Option], nodes: int) -> tuple[Link, float]:
    """The slowest link between the ranks of these options, and the spread of what is known of it.

    Within a node, device to device or shared memory; between nodes what was measured, else what nodes say, else 10
    Gbit Ethernet. In a ring in rank order every node has one flow in and one out, however many ranks it holds.
    """
    near_s = near_latency_s(chosen[0].pool.is_gpu)
    if nodes == 1:
        (only,) = chosen
        bandwidth_Bps = only.device.peer_bandwidth_Bps
        return Link(near_s, bandwidth_Bps, _reduce_Bps(chosen), "the node's own links"), LINK_SPREAD["catalogue"]
    latencies = [o.learned.link_latency_s for o in chosen if o.learned and o.learned.link_latency_s is not None]
    measured = [o.learned.link_bandwidth_Bps for o in chosen if o.learned and o.learned.link_bandwidth_Bps]
    stated = [o.pool.bandwidth_Bps for o in chosen if o.pool.bandwidth_Bps]
    if measured:
        bandwidth_Bps, name = min(measured), "the measured network"
    elif stated:
        bandwidth_Bps, name = min(stated), "the network"
    else:
        bandwidth_Bps, name = communication.ETHERNET_BANDWIDTH_Bps, "an assumed network"
    spread = LINK_SPREAD["profile" if measured and latencies else "catalogue"]
    learned = [o.learned.link_spread for o in chosen if o.learned and o.learned.link_spread is not None]
    spread = max(learned) if measured and len(learned) == len(chosen) else spread
    latency_s = max(latencies, default=communication.TCP_LATENCY_S)
    return Link(latency_s, bandwidth_Bps, _reduce_Bps(chosen), name, min(near_s, latency_s)), spread


def near_latency_s(is_gpu: bool) -> float:
    """Latency between ranks of one node."""
    return GPU_LATENCY_S if is_gpu else communication.SHARED_MEMORY_LATENCY_S


def summing(option: Option) -> tuple[CollectiveName, ...]:
    """What may sum gradients where the user leaves it open; where ranks share out the update, what has two halves."""
    names = AUTO[option.pool.is_gpu]
    return tuple(n for n in names if n in HALVES) if option.strategy == "Optimizer" else names


def priced(collective: CollectiveName, is_gpu: bool) -> communication.Collective:
    """What a collective is on these devices: torch.distributed sums with NCCL on GPUs."""
    return "NCCL" if is_gpu and collective == "Torch" else collective


def _reduce_Bps(chosen: list[Option]) -> float:  # noqa: N802 - the unit is part of the name
    """Adding a buffer reads two and writes one."""
    return min(o.device.memory_bandwidth_Bps for o in chosen) / 3


def overlap_of(chosen: list[Option]) -> float:
    return min(OVERLAP_EFFICIENCY[o.device.kind] for o in chosen)
