"""What a step takes, and what a rank holds, where ranks hold parts of the model."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, exp, hypot
from typing import Literal

from dljob.perf.resources import energy, memory
from dljob.perf.step import model_split as split
from dljob.perf.step.communication import SHARED_MEMORY_LATENCY_S, Link, allreduce_s
from dljob.perf.step.compute import STEP_OVERHEAD_S, update_s
from dljob.perf.step.input_data import HOST_BANDWIDTH_Bps
from dljob.perf.step.step import P90
from dljob.perf.step.synchronization import agreement_s, straggler_factor
from dljob.perf.workload.workload import REAL_NBYTES, Workload
from dljob.planner.candidates.evaluate import Part, describe
from dljob.planner.candidates.options import Option, link_of, priced
from dljob.planner.types import Choice, CollectiveName, Group, Prediction, Refusal, Request
from dljob.planner.types.texts import gibibytes, group_names, rate

MAX_MICRO_BATCHES = 4096
"""By the API."""
UNMEASURED_SPREAD = 0.25
"""Standard deviation of log(measured / predicted) that a step in parts has beside that of whole models' figures: no
profile learns from parts, and the formulas below know neither how a CPU's ranks drive messages nor how evenly stages
really compute (docs/design/0016-models-in-parts.md: logarithms of measured ratios have a root mean square of 0.14)."""


@dataclass(frozen=True)
class Way:
    """Ranks, and how they share out the model."""

    part: Part
    strategy: Literal["Pipeline", "Tensor"]
    collective: CollectiveName
    micro_batches: int = 1

    def describe(self) -> str:
        """Such as '3 x cpu, Pipeline of 3 stages, 12 micro-batches'."""
        if self.strategy == "Tensor":
            return f"{describe([self.part])}, Tensor, {self.collective}"
        return f"{describe([self.part])}, Pipeline of {self.part.ranks} stages, {self.micro_batches} micro-batches"


@dataclass(frozen=True)
class _Step:
    """Seconds of a step, by part, without data and waiting."""

    busy_s: float
    """Of the rank that computes longest."""
    mean_s: float
    """Of the ranks' computing, in the mean."""
    moving_s: float
    """Messages that are felt, and idle turns."""
    text: str
    """For people: what it is that moves."""
    spread: float
    """Of what is known of the link."""


def predict(way: Way, request: Request, model: split.Model) -> Prediction | Refusal:
    """Its prediction, or a line against it: the part does not fit. Raises ValueError when there is no such part."""
    part, option = way.part, way.part.option
    ranks, batch = part.ranks, request.global_batch
    held = _memory_nbytes(way, batch, model)
    if held > option.memory_nbytes:
        why = f"does not fit: its part of the model needs {gibibytes(held)} of {gibibytes(option.memory_nbytes)}"
        return Refusal(f"{describe([part])}, {way.strategy}", why)
    host, room = _host_nbytes(part, batch, model.workload, held), _host_room_nbytes(part, request)
    if host > room:
        why = f"does not fit: main memory of a pod, where the whole model is made: {gibibytes(host)} of"
        return Refusal(f"{describe([part])}, {way.strategy}", f"{why} {gibibytes(room)}")
    step = (_pipeline if way.strategy == "Pipeline" else _tensor)(way, batch, model)
    data_s = option.fetching.felt_s(step.busy_s, batch)
    link, _ = link_of([option], part.nodes)
    waiting_s = step.busy_s * (straggler_factor(ranks) - 1) + agreement_s(ranks, link.latency_s)
    known, rest = step.busy_s + data_s, step.moving_s + waiting_s
    step_s = known + rest
    spread = hypot(known * option.compute_spread / step_s, rest * step.spread / step_s, UNMEASURED_SPREAD)
    total_s = step_s * request.total_steps + option.fetching.first_s(batch)
    longest = max(("computing", step.busy_s), ("communication and waiting", rest), ("data", data_s), key=lambda p: p[1])
    power_W = energy.rank_watts(option.device, min(1.0, step.mean_s / step_s)) * ranks
    return Prediction(
        step_s=step_s,
        step_p90_s=step_s * exp(P90 * spread),
        compute_s=step.busy_s,
        communication_s=step.moving_s,
        total_s=total_s,
        samples_per_s=batch / step_s,
        memory_nbytes=held,
        energy_J=power_W * total_s,
        cost_usd=energy.cost_usd(option.device, total_s, ranks),
        bottleneck=f"{longest[0]} {100 * longest[1] / step_s:.0f} %; {step.text}",
        basis="profile" if option.learned and option.learned.points else "catalogue",
        host_memory_nbytes=host,
        efficiency=min(1.0, option.curve.seconds(batch) / (step_s * ranks)),
        data_s=data_s,
        total_p90_s=total_s * exp(P90 * spread),
    )


def choice(way: Way, request: Request, prediction: Prediction) -> Choice:
    """The candidate: every rank sees the whole batch."""
    part, option = way.part, way.part.option
    each = option.ranks_per_node
    group = Group(
        group_names([option.label])[0], option.label, option.pool.is_gpu, part.nodes, each,
        (request.global_batch,) * part.ranks, each * (1.0 if option.pool.is_gpu else option.cores),
    )  # fmt: skip
    return Choice(way.describe(), (group,), way.collective, prediction, way.strategy, way.micro_batches)


def _messages(option: Option, nodes: int) -> tuple[Link, float]:
    """What stages send each other goes through main memory, from GPUs too, and on one node stays there."""
    link, spread = link_of([option], nodes)
    if not option.pool.is_gpu:
        return link, spread
    between = Link(SHARED_MEMORY_LATENCY_S, HOST_BANDWIDTH_Bps, name="main memory") if nodes == 1 else link
    bandwidth_Bps = 1 / (1 / between.bandwidth_Bps + 2 / option.device.host_bandwidth_Bps)
    return Link(between.latency_s, bandwidth_Bps, between.reduce_Bps, between.name), spread


def _pipeline(way: Way, batch: int, model: split.Model) -> _Step:
    workload, option, k, p = model.workload, way.part.option, way.micro_batches, way.part.ranks
    stages = model.cut_into(p)
    samples = ceil(batch / k)
    whole_s = option.computing.seconds(samples)
    # Once a step, not once a micro-batch.
    update = update_s(workload, option.device)
    once_s = min(update + STEP_OVERHEAD_S, 0.9 * whole_s)
    slot_s = stages.arithmetic * (whole_s - once_s)
    link, spread = _messages(option, way.part.nodes)
    transfer_s = 2 * (link.latency_s + REAL_NBYTES * samples * stages.boundary_elements / link.bandwidth_Bps)
    busy_s = k * slot_s + STEP_OVERHEAD_S + update * stages.parameters / workload.parameters
    idle = (p - 1) / (k + p - 1)
    return _Step(
        busy_s=busy_s,
        mean_s=min(busy_s, (k * (whole_s - once_s) + update) / p + STEP_OVERHEAD_S),
        moving_s=split.pipeline_s(slot_s, transfer_s, p, k) - k * slot_s,
        text=f"{100 * idle:.0f} % of the turns idle: {p} stages, {k} micro-batches",
        spread=spread,
    )


def _tensor(way: Way, batch: int, model: split.Model) -> _Step:
    part, option, pairs = way.part, way.part.option, model.pairs
    assert pairs is not None, "checked before"
    whole_s = option.computing.seconds(batch)
    fixed_s = min(option.computing.seconds(0), whole_s)
    busy_s = fixed_s + (whole_s - fixed_s) * split.kept_part(pairs.arithmetic, pairs.units, part.ranks)
    link, spread = link_of([option], part.nodes)
    name = priced(way.collective, option.pool.is_gpu)
    sums = {
        n: float(allreduce_s(name, REAL_NBYTES * batch * n, float(part.ranks), link, nodes=part.nodes))
        for n in set(pairs.summed_elements)
    }
    return _Step(
        busy_s=busy_s,
        mean_s=busy_s,
        moving_s=sum(sums[n] for n in pairs.summed_elements),
        text=f"sums of activations: {way.collective} over {link.name}, {rate(link.bandwidth_Bps)}",
        spread=spread,
    )


def _memory_nbytes(way: Way, batch: int, model: split.Model) -> int:
    """Memory that a rank needs where it computes. In main memory the whole state has a place too, as it is read and
    written (``split.state_nbytes``), and the whole model as it is made.
    """
    workload, ranks, is_gpu = model.workload, way.part.ranks, way.part.option.pool.is_gpu
    if way.strategy == "Pipeline":
        stages = model.cut_into(ranks)
        samples = ceil(batch / way.micro_batches)
        held = split.held_nbytes(workload, stages.parameters)
        kept = samples * stages.activations(way.micro_batches) * workload.activation_nbytes
    else:
        pairs = model.pairs
        assert pairs is not None, "checked before"
        share = split.kept_part(pairs.parameters / workload.parameters, pairs.units, ranks)
        held = split.held_nbytes(workload, share * workload.parameters)
        outputs = split.kept_part(pairs.outputs, pairs.units, ranks)
        samples, kept = batch, batch * outputs * workload.activation_nbytes
    kept += memory.PREFETCHED_BATCHES * batch * workload.sample_nbytes
    state = 0.0 if is_gpu else split.state_nbytes(workload)
    return int(state + memory.held_nbytes(held, kept, samples * workload.transient_nbytes, is_gpu))


def _host_nbytes(part: Part, batch: int, workload: Workload, held: int) -> int:
    """Main memory of a pod, all its ranks together."""
    if not part.option.pool.is_gpu:
        return memory.AGENT_NBYTES + part.option.ranks_per_node * held
    share = memory.pod_nbytes(workload, batch, 1, is_gpu=True) - memory.AGENT_NBYTES
    return memory.AGENT_NBYTES + part.option.ranks_per_node * share


def _host_room_nbytes(part: Part, request: Request) -> int:
    """Main memory that each of the part's nodes can give a pod: those with the most of it are taken."""
    if request.memory_per_pod_nbytes is not None:
        return request.memory_per_pod_nbytes
    return sorted(part.option.pool.memory_nbytes, reverse=True)[part.nodes - 1]


def micro_batch_counts(batch: int, stages: int) -> Iterator[int]:
    """Micro-batches worth a look, rising: about as many as stages, twice, four times, ... down to a sample each.

    Of those of equal size the fewest: ceil(batch / m) of m samples at most.
    """
    last, wanted = 0, stages
    while last < min(batch, MAX_MICRO_BATCHES):
        found = ceil(batch / ceil(batch / min(wanted, batch, MAX_MICRO_BATCHES)))
        if found > last:
            yield found
        elif wanted >= min(batch, MAX_MICRO_BATCHES):
            return
        last, wanted = max(last, found), 2 * wanted
