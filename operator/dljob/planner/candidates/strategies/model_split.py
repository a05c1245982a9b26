"""Predicted step time and memory of model-parallel candidates (pipeline and tensor parallelism).

A candidate may also combine data parallelism with one of the two (a hybrid): d replicas of the model, each split over p
ranks, compute d parts of the batch and all-reduce the gradients of each part of the model over the d ranks that hold it
(Narayanan et al. 2021, arXiv 2104.04473, section 3). A hybrid with one replica is plain model parallelism.
"""

from dataclasses import dataclass, replace
from math import ceil, exp, hypot

from dlcontract import COLLECTIVES, replica_batches
from dljob.calibrate.learned import Place, SplitPoint
from dljob.perf.resources import energy
from dljob.perf.step import model_split as split
from dljob.perf.step.communication import Link, allreduce_s
from dljob.perf.step.compute import active_part, step_overhead_s, update_s
from dljob.perf.step.step import P90, buckets, exposed_s
from dljob.perf.step.synchronization import agreement_s, straggler_factor
from dljob.perf.workload.workload import HALF_NBYTES, REAL_NBYTES, Workload
from dljob.planner.candidates.accumulation import update_part_s
from dljob.planner.candidates.collectives import priced
from dljob.planner.candidates.cost.evaluations import split_evaluations_s
from dljob.planner.candidates.cost.whole_training import whole_training
from dljob.planner.candidates.evaluate import Part, basis_of, describe
from dljob.planner.candidates.options import link_of, message_link_of, overlap_of
from dljob.planner.candidates.strategies.measured_steps import NO_EVIDENCE, Evidence, evidence
from dljob.planner.candidates.strategies.split_candidate import SplitCandidate
from dljob.planner.candidates.strategies.split_memory import host_room_nbytes, split_memory
from dljob.planner.types import Choice, Group, Prediction, Refusal, Request
from dljob.planner.types.texts import gibibytes, group_names, rate

UNMEASURED_SPREAD = 0.25
"""Additional standard deviation of log(measured / predicted) of a model-parallel step.

It is needed until a run of the strategy is measured, because compute times of whole models say little about parts, and
because the formulas of this module ignore the time in which CPUs progress messages. In measurements, log(measured /
predicted) had a root mean square of 0.14 (docs/design/0016-model-parallelism.md)."""


@dataclass(frozen=True)
class SplitStep:
    """Predicted parts of the time of a model-parallel step, in seconds, without input data and waiting."""

    busy_s: float
    """Computing time of the slowest rank."""
    mean_s: float
    """Mean computing time of the ranks, which determines their mean power."""
    moving_s: float
    """Communication that computing does not hide, plus the idle time of pipeline stages (the bubble)."""
    text: str
    """Description of the communication, which becomes a part of ``Prediction.bottleneck``."""
    spread: float
    """Standard deviation of the logarithm of the communication time."""
    in_turn: int = 1
    """Number of ranks that compute a batch one after another if there is only one: the stages of a pipeline."""
    active: float = 1.0
    """Fraction of ``mean_s`` in which the device itself works (``perf.step.compute.active_part``)."""


def predict(candidate: SplitCandidate, request: Request, model: split.Model) -> Prediction | Refusal:
    """Predict a model-parallel plan, or return a ``Refusal`` if a rank or a pod has too little memory.

    The prediction has the step time, memory, energy and cost. ``model``: the workload with its possible splits.

    Raise ValueError if the model cannot be split as the candidate demands.
    """
    part, option = candidate.part, candidate.part.option
    batch = ceil(request.global_batch / candidate.replicas)
    needed = split_memory(candidate, batch, request, model)
    held = needed.rank_nbytes
    if held > option.memory_nbytes and not needed.measured:
        why = (
            f"does not fit: a rank's part of the model needs {gibibytes(held)}, but a rank has "
            f"{gibibytes(option.memory_nbytes)}"
        )
        return Refusal(f"{describe([part])}, {candidate.strategy}", why)
    host, room = needed.pod_nbytes, host_room_nbytes(part, request)
    if host > room:
        purpose = ", where it gathers the whole model for checkpoints" if request.checkpoints else ""
        why = f"does not fit: a pod needs {gibibytes(host)} of main memory{purpose}, but can have {gibibytes(room)}"
        return Refusal(f"{describe([part])}, {candidate.strategy}", why)
    step = _step(candidate, batch, model, request.bucket_nbytes)
    predicted = SplitPoint(
        candidate.strategy,
        Place(part.nodes, option.ranks_per_node),
        request.global_batch,
        step_s_of(part, step),
        candidate.micro_batches,
        candidate.replicas,
    )

    def predicted_s(point: SplitPoint, on: Part) -> float | None:
        if on.ranks % point.replicas:  # Edited by hand.
            return None
        known = replace(candidate, part=on, micro_batches=point.micro_batches, replicas=point.replicas)
        if candidate.strategy == "Tensor":
            used = (name for name in COLLECTIVES if name == point.place.collective)
            known = replace(known, collective=next(used, candidate.collective))
        try:
            return step_s_of(known.part, _step(known, ceil(point.batch / point.replicas), model, request.bucket_nbytes))
        except ValueError:  # The model has changed.
            return None

    found = evidence(part, predicted, predicted_s, is_script=request.model is None)
    return prediction_of(part, step, request, model.workload, batch, held, host, measured=found)


def _step(candidate: SplitCandidate, batch: int, model: split.Model, bucket_nbytes: int) -> SplitStep:
    return (_pipeline if candidate.strategy == "Pipeline" else _tensor)(candidate, batch, model, bucket_nbytes)


def step_s_of(part: Part, step: SplitStep) -> float:
    """Return the predicted seconds of a step on the ranks of ``part``, without input data."""
    link, _ = link_of([part.option], [part.nodes])
    waiting_s = step.busy_s * (straggler_factor(part.ranks) - 1) + agreement_s(part.ranks, link.latency_s)
    return step.busy_s + step.moving_s + waiting_s


def prediction_of(
    part: Part,
    step: SplitStep,
    request: Request,
    workload: Workload,
    batch: int,
    held: int,
    host: int,
    writers: int = 1,
    measured: Evidence = NO_EVIDENCE,
) -> Prediction:
    """Return the prediction of a plan on equal ranks. ``step``: the predicted parts of its step time.

    ``batch``: number of samples whose input each rank prepares in a step. ``held``: bytes of memory that a rank needs
    on its device. ``host``: bytes of main memory that a pod needs. ``writers``: number of ranks that each write a part
    of a checkpoint. ``measured``: what measured runs say about the step.
    """
    option, ranks, factor, found = part.option, part.ranks, 1.0, measured.correction
    if found is not None:
        factor, certain = found.applied(_spread(part, step))
        step = replace(step, busy_s=factor * step.busy_s, mean_s=factor * step.mean_s, moving_s=factor * step.moving_s)
    data_s = option.fetching.exposed_input_s(step.busy_s, batch)
    step_s = step_s_of(part, step) + data_s
    rest = step_s - step.busy_s - data_s
    spread = _spread(part, step, data_s) if found is None else certain
    alone_s = step.in_turn * step.busy_s + step.moving_s
    evaluating_s = split_evaluations_s(request, workload, alone_s, batch, option.cores)
    total_s = step_s * request.total_steps + option.fetching.first_s(batch) + evaluating_s
    longest = max(("computing", step.busy_s), ("communication and waiting", rest), ("data", data_s), key=lambda p: p[1])
    power_W = energy.rank_watts(option.device, min(1.0, step.mean_s / step_s), step.active) * ranks
    made = Prediction(
        step_s=step_s,
        step_p90_s=step_s * exp(P90 * spread),
        compute_s=step.busy_s,
        communication_s=step.moving_s,
        total_s=total_s,
        samples_per_s=request.global_batch / step_s,
        memory_nbytes=held,
        energy_J=power_W * total_s,
        cost_usd=request.prices.with_energy_usd(energy.cost_usd(option.device, total_s, ranks), power_W * total_s),
        carbon_g=request.carbon_g(power_W * total_s, total_s),
        bottleneck=f"{longest[0]} {100 * longest[1] / step_s:.0f} %; {step.text}",
        basis="profile" if found is not None else basis_of([option]),
        host_memory_nbytes=host,
        efficiency=min(1.0, factor * option.alone_s(request.global_batch) / (step_s * ranks)),
        data_s=data_s,
        total_p90_s=total_s * exp(P90 * spread),
        evaluations_s=evaluating_s,
        doubt=measured.doubt,
    )
    return whole_training(made, request, workload, [part.fetching_nodes], 1 / part.nodes, writers)


def _spread(part: Part, step: SplitStep, data_s: float = 0.0) -> float:
    """Return the standard deviation of log(measured / predicted) of a step without measurements of the strategy."""
    step_s = step_s_of(part, step) + data_s
    known_s = step.busy_s + data_s
    rest_s = step_s - known_s
    return hypot(known_s * part.option.compute_spread / step_s, rest_s * step.spread / step_s, UNMEASURED_SPREAD)


def choice(candidate: SplitCandidate, request: Request, prediction: Prediction) -> Choice:
    """Return the candidate as a possible plan with the given prediction.

    The local batch of a rank is the whole batch of its replica.
    """
    part, option = candidate.part, candidate.part.option
    each, batches = option.ranks_per_node, replica_batches(request.global_batch, candidate.replicas)
    shares = tuple(batch for batch in batches for _ in range(candidate.split_over))
    group = Group(
        group_names([option.label])[0], option.label, option.pool.is_gpu, part.nodes, each,
        shares, each * option.cores,
        option.cores,
    )  # fmt: skip
    return Choice(
        candidate.describe(),
        (group,),
        candidate.collective,
        prediction,
        candidate.strategy,
        candidate.micro_batches,
        candidate.replicas,
    )


def _activation_nbytes(workload: Workload) -> int:
    """Return the bytes of a number that ranks send to each other in forward and backward pass."""
    return REAL_NBYTES if workload.precision == "FP32" else HALF_NBYTES


def _pipeline(candidate: SplitCandidate, batch: int, model: split.Model, bucket_nbytes: int) -> SplitStep:
    workload, option, k, p = model.workload, candidate.part.option, candidate.micro_batches, candidate.split_over
    stages = model.cut_into(p)
    samples = ceil(batch / k)
    whole_s = option.computing.seconds(samples)
    # The update and the step's overhead occur once per step, not once per micro-batch.
    update = update_s(workload, option.device)
    overhead_s = step_overhead_s(workload, is_gpu=option.pool.is_gpu)
    once_s = min(update + overhead_s, 0.9 * whole_s)
    slot_s = stages.arithmetic * (whole_s - once_s)
    others_s = whole_s - once_s - slot_s
    sent_nbytes = _activation_nbytes(workload) * samples * stages.boundary_elements
    busy_s = k * slot_s + overhead_s + update * stages.parameters / workload.parameters

    def moving_s(placement: Placement) -> float:
        transfer_s = 2 * (placement.messages.latency_s + sent_nbytes / placement.messages.bandwidth_Bps)
        reducing_s = _reducing_s(candidate, placement, stages.parameters, slot_s, bucket_nbytes)
        return split.pipeline_s(slot_s, transfer_s, p, k, others_s) - k * slot_s + reducing_s

    best = min(placements(candidate), key=moving_s)
    idle = (p - 1) / (k + p - 1)
    return SplitStep(
        busy_s=busy_s,
        mean_s=min(busy_s, (k * (whole_s - once_s) + update) / p + overhead_s),
        moving_s=moving_s(best),
        text=f"pipeline bubble {100 * idle:.0f} %: {p} stages, {k} micro-batches",
        spread=best.spread,
        in_turn=p,
        active=active_part(workload, option.device, samples),
    )


def _tensor(candidate: SplitCandidate, batch: int, model: split.Model, bucket_nbytes: int) -> SplitStep:
    part, option, pairs = candidate.part, candidate.part.option, model.pairs
    assert pairs is not None, "checked before"
    workload, k, t = model.workload, candidate.micro_batches, candidate.split_over
    samples = ceil(batch / k)
    whole_s = option.computing.seconds(samples)
    fixed_s = min(option.computing.seconds(0), whole_s)
    kept = split.kept_part(pairs.arithmetic, pairs.units, t)
    each_s = (whole_s - fixed_s) * kept
    busy_s = fixed_s + each_s + (k - 1) * (each_s + fixed_s - update_part_s(option))
    nodes = part.nodes if candidate.replicas == 1 else ceil(t / option.ranks_per_node)
    link, spread = link_of([option], [nodes])
    name = priced(candidate.collective, option.pool.is_gpu)
    nbytes = _activation_nbytes(workload) * samples
    sums = {n: float(allreduce_s(name, nbytes * n, float(t), link, nodes=nodes)) for n in set(pairs.summed_elements)}
    placement, *_ = placements(candidate)
    held = split.kept_part(pairs.parameters / workload.parameters, pairs.units, t) * workload.parameters
    reducing_s = _reducing_s(candidate, placement, int(held), busy_s / k, bucket_nbytes)
    active = active_part(workload, option.device, samples)
    if option.pool.is_gpu:  # Each rank launches as many kernels as for the whole model, but they do only its part.
        active *= kept * whole_s * k / busy_s
    return SplitStep(
        busy_s=busy_s,
        mean_s=busy_s,
        moving_s=k * sum(sums[n] for n in pairs.summed_elements) + reducing_s,
        text=f"all-reduce of activations: {candidate.collective} over {link.name}, {rate(link.bandwidth_Bps)}",
        spread=spread,
        active=active,
    )


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a replica are, and which links they use.

    ``messages``: link between neighbouring pipeline stages. ``reducing``: link between the ranks that hold the same
    part of the model and reduce its gradients. ``nodes``: number of nodes with such ranks. ``spread``: standard
    deviation of log(measured / predicted) of the communication time.
    """

    messages: Link
    reducing: Link
    nodes: int
    spread: float


def placements(candidate: SplitCandidate) -> list[Placement]:
    """Return the ways to place the ranks of each replica on nodes with g ranks each.

    The first one has the p ranks of a replica beside each other. So on each node, min(p, g) groups of ranks reduce
    gradients and share the node's network. With ``candidate.anywhere``, and if the number of replicas is a multiple of
    g, there is another one, in which all ranks of a node hold the same stage: gradients stay within few nodes, and the
    g messages of a node share its network.
    """
    part, option, p, d = candidate.part, candidate.part.option, candidate.split_over, candidate.replicas
    g = option.ranks_per_node
    if d == 1:
        messages, spread = part.messages
        return [Placement(messages, messages, 1, spread)]
    messages, spread = message_link_of([option], [ceil(p / g)])
    nodes = min(part.nodes, ceil(d / max(1, g // p)))
    found = [Placement(messages, _shared(link_of([option], [nodes])[0], min(p, g) if nodes > 1 else 1), nodes, spread)]
    if candidate.anywhere and d % g == 0 and g > 1 and part.nodes > 1:
        between, spread = part.messages
        found.append(Placement(_shared(between, g), link_of([option], [d // g])[0], d // g, spread))
    return found


def _shared(link: Link, flows: int) -> Link:
    return replace(link, bandwidth_Bps=link.bandwidth_Bps / flows)


def _reducing_s(
    candidate: SplitCandidate, placement: Placement, parameters: int, last_s: float, bucket_nbytes: int
) -> float:
    """Return the seconds by which the all-reduce of gradients over the replicas lengthens a step.

    ``parameters``: number of parameters whose gradients a rank reduces. ``last_s``: computing seconds of the last
    micro-batch, with whose backward pass the all-reduce overlaps.
    """
    if candidate.replicas == 1:
        return 0.0
    option, nbytes, d = candidate.part.option, REAL_NBYTES * parameters, float(candidate.replicas)
    name = priced("Torch" if option.pool.is_gpu else "Ring", option.pool.is_gpu)
    parts = buckets(nbytes, bucket_nbytes)
    total_s = allreduce_s(name, float(nbytes), d, placement.reducing, parts, nodes=placement.nodes)
    return float(exposed_s(total_s, last_s, parts, overlap_of([option])))
