"""Plans for ranks that hold parts of the model (strategies Pipeline and Tensor): on one kind of device, all alike.

A pipeline has as many ranks as the user's stages; tensor parallel ranks are as many as are fastest. Users: ``plan``.
"""

from collections.abc import Mapping, Sequence
from math import ceil, exp, hypot

from dljob.calibrate.learned import Learned
from dljob.perf import energy, memory
from dljob.perf import modelsplit as split
from dljob.perf.comm import allreduce_s
from dljob.perf.compute import STEP_OVERHEAD_S, update_s
from dljob.perf.step import P90
from dljob.perf.sync import straggler_factor
from dljob.perf.workload import REAL_NBYTES, Workload
from dljob.planner.context import AUTO, Option, link_of, options, ranks_per_node_choices
from dljob.planner.evaluate import Part, describe
from dljob.planner.names import gibibytes, group_names, rate
from dljob.planner.pools import Eligible
from dljob.planner.search import grid
from dljob.planner.types import Choice, CollectiveName, Group, Infeasible, Prediction, Refusal, Request

Found = tuple[list[Choice | Refusal], list[Refusal]]


def candidates(
    request: Request,
    nodes: Eligible,
    workload: Workload,
    learned: Mapping[tuple[str, str], Learned],
    fixed: Sequence[Part] = (),
) -> Found | Infeasible:
    """Every way to place the ranks, evaluated, and what was ruled out; or why there is none. ``fixed``: the user's."""
    pairs = split.pairs_of(workload)
    if request.strategy == "Tensor" and pairs is None:
        text = (
            f"found {workload.name} with Tensor, expected a model with linear layers in pairs: choose another strategy"
        )
        return Infeasible("BadWorkload", "spec.parallelism.strategy", text)
    try:
        split.stages_of(workload, request.stages or 1, request.micro_batches)
    except ValueError as error:
        return Infeasible("BadWorkload", "spec.parallelism.stages", f"{error}: use fewer stages")
    parts = [part for part in (fixed or _parts(request, nodes, workload, learned)) if _fits(request, part, pairs)]
    if not parts:
        found = sum(part.ranks for part in fixed) if fixed else sum(sum(pool.free) for pool in nodes.pools)
        wanted = f"{request.stages} ranks, one for each stage" if request.stages else "2 ranks or more"
        return Infeasible(
            "TooFewNodes",
            "spec.planning.groups" if fixed else "spec.parallelism.stages" if request.stages else "spec.nodes",
            f"found room for {found} ranks, expected {wanted}, on nodes of one device and within nodes.min and "
            "nodes.max: change nodes or stages, or wait until nodes are free",
            transient=not fixed,
            refusals=nodes.refusals,
        )
    return [evaluate(part, name, request, workload) for part in parts for name in _collectives(request, part)], list(
        nodes.refusals
    )


def like(part: Part, request: Request, workload: Workload) -> Choice | Refusal | str:
    """The best candidate with these very ranks, a line against it, or why the model has no such parts."""
    pairs = split.pairs_of(workload)
    if request.strategy == "Tensor" and pairs is None:
        return "no such parts: the model has no linear layers in pairs"
    if request.strategy == "Tensor" and pairs is not None and part.ranks > pairs.units:
        return f"no such parts: its linear layers have {pairs.units} units to share out"
    try:
        found = [evaluate(part, name, request, workload) for name in _collectives(request, part)]
    except ValueError as error:
        return f"no such parts: {error}"
    fitting = [choice for choice in found if isinstance(choice, Choice)]
    return min(fitting, key=lambda choice: choice.prediction.step_s) if fitting else found[0]


def _parts(
    request: Request, nodes: Eligible, workload: Workload, learned: Mapping[tuple[str, str], Learned]
) -> list[Part]:
    """Ways within ``nodes.min`` and ``nodes.max``."""
    found = []
    for pool in nodes.pools:
        for each in ranks_per_node_choices(pool):
            for option in options(pool, each, workload, request, learned):
                most = min(option.nodes, request.nodes_max or option.nodes)
                counts = [request.stages // each] if request.stages else sorted({*grid(most), request.nodes_min})
                found += [Part(option, n) for n in counts if max(1, request.nodes_min) <= n <= most]
    return found


def _fits(request: Request, part: Part, pairs: split.Pairs | None) -> bool:
    if request.stages:
        return part.ranks == request.stages
    return pairs is not None and 2 <= part.ranks <= pairs.units


def _collectives(request: Request, part: Part) -> tuple[CollectiveName, ...]:
    """A pipeline sends between neighbours, by MPI."""
    if request.strategy == "Pipeline":
        return ("MPI",)
    if request.collective:
        return (request.collective,)
    return tuple(name for name in AUTO[part.option.pool.is_gpu] if name != "ParameterServer")


def evaluate(part: Part, collective: CollectiveName, request: Request, workload: Workload) -> Choice | Refusal:
    """The candidate with its prediction, or a line against it."""
    option, ranks, batch = part.option, part.ranks, request.global_batch
    held = _memory_nbytes(part, request, workload)
    if held > option.memory_nbytes:
        why = f"does not fit: its part of the model needs {gibibytes(held)} of {gibibytes(option.memory_nbytes)}"
        return Refusal(describe([part]), why)
    link, link_spread = link_of([option], part.nodes)
    if request.strategy == "Pipeline":
        busy_s, moving_s = _pipeline_s(part, request, workload)
        idle = 1 - request.micro_batches / (request.micro_batches + ranks - 1)
        text = f"{idle:.0%} of the turns idle: {ranks} stages, {request.micro_batches} micro-batches"
        how = f"Pipeline of {ranks} stages, {request.micro_batches} micro-batches"
    else:
        busy_s, moving_s = _tensor_s(part, collective, request, workload)
        text = f"sums of activations: {collective} over {link.name}, {rate(link.bandwidth_Bps)}"
        how = f"Tensor, {collective}"
    data_s = option.fetching.felt_s(busy_s, batch)
    waiting_s = busy_s * (straggler_factor(ranks) - 1)
    step_s = busy_s + moving_s + data_s + waiting_s
    known, rest = busy_s + data_s, moving_s + waiting_s
    spread = hypot(known * option.compute_spread, rest * link_spread) / step_s
    total_s = step_s * request.total_steps
    longest = max(("computing", busy_s), ("communication and waiting", rest), ("data", data_s), key=lambda p: p[1])
    power_W = energy.rank_watts(option.device, busy_s / step_s) * ranks
    return Choice(
        summary=f"{describe([part])}, {how}",
        groups=(
            Group(
                group_names([option.label])[0], option.label, option.pool.is_gpu, part.nodes, option.ranks_per_node,
                (batch,) * ranks, option.ranks_per_node * (1.0 if option.pool.is_gpu else option.cores),
            ),
        ),
        collective=collective,
        prediction=Prediction(
            step_s=step_s,
            step_p90_s=step_s * exp(P90 * spread),
            compute_s=busy_s,
            communication_s=moving_s,
            total_s=total_s,
            samples_per_s=batch / step_s,
            memory_nbytes=held,
            energy_J=power_W * total_s,
            cost_usd=energy.cost_usd(option.device, total_s, ranks),
            bottleneck=f"{longest[0]} {longest[1] / step_s:.0%}; {text}",
            basis="profile" if option.learned and option.learned.points else "catalogue",
            host_memory_nbytes=_host_nbytes(part, request, workload, held),
            efficiency=min(1.0, option.curve.seconds(batch) / (step_s * ranks)),
            data_s=data_s,
            total_p90_s=total_s * exp(P90 * spread),
        ),
    )  # fmt: skip


def _computing_s(option: Option, samples: int) -> float:
    """The whole model's on so many samples, data at hand."""
    return option.computing.seconds(samples)


def _pipeline_s(part: Part, request: Request, workload: Workload) -> tuple[float, float]:
    """Seconds that the slowest stage computes in a step, and that the step takes longer."""
    option, k, p = part.option, request.micro_batches, part.ranks
    found = split.stages_of(workload, p, k)
    samples = ceil(request.global_batch / k)
    whole_s = _computing_s(option, samples)
    # Once a step, not once a micro-batch.
    once_s = min(update_s(workload, option.device) + STEP_OVERHEAD_S, 0.9 * whole_s)
    slot_s = found.arithmetic * (whole_s - once_s)
    link, _ = link_of([option], part.nodes)
    transfer_s = 2 * (link.latency_s + REAL_NBYTES * samples * found.boundary_elements / link.bandwidth_Bps)
    last_s = STEP_OVERHEAD_S + update_s(workload, option.device) * found.parameters / workload.parameters
    busy_s = k * slot_s + last_s
    return busy_s, split.pipeline_s(slot_s, transfer_s, p, k) - k * slot_s


def _tensor_s(part: Part, collective: CollectiveName, request: Request, workload: Workload) -> tuple[float, float]:
    """Seconds that a rank computes in a step, and that sums of activations take."""
    option, batch = part.option, request.global_batch
    pairs = split.pairs_of(workload)
    assert pairs is not None, "checked before"
    whole_s = _computing_s(option, batch)
    fixed_s = min(_computing_s(option, 0), whole_s)
    busy_s = fixed_s + (whole_s - fixed_s) * split.kept_part(pairs.arithmetic, pairs.units, part.ranks)
    link, _ = link_of([option], part.nodes)
    sums = (allreduce_s(collective, REAL_NBYTES * batch * n, float(part.ranks), link) for n in pairs.summed_elements)
    return busy_s, float(sum(sums))


def _memory_nbytes(part: Part, request: Request, workload: Workload) -> int:
    """Memory that a rank needs where it computes. In main memory the whole state has a place too, as it is read and
    written (``split.state_nbytes``), and the whole model as it is made.
    """
    batch, ranks, is_gpu = request.global_batch, part.ranks, part.option.pool.is_gpu
    if request.strategy == "Pipeline":
        stages = split.stages_of(workload, ranks, request.micro_batches)
        samples = ceil(batch / request.micro_batches)
        held = split.held_nbytes(workload, stages.parameters)
        kept = samples * stages.activations * workload.activation_nbytes
    else:
        pairs = split.pairs_of(workload)
        assert pairs is not None, "checked before"
        share = split.kept_part(pairs.parameters / workload.parameters, pairs.units, ranks)
        held = split.held_nbytes(workload, share * workload.parameters)
        outputs = split.kept_part(pairs.outputs, pairs.units, ranks)
        samples, kept = batch, batch * outputs * workload.activation_nbytes
    kept += memory.PREFETCHED_BATCHES * batch * workload.sample_nbytes
    state = 0.0 if is_gpu else split.state_nbytes(workload)
    return int(state + memory.held_nbytes(held, kept, samples * workload.transient_nbytes, is_gpu))


def _host_nbytes(part: Part, request: Request, workload: Workload, held: int) -> int:
    """Main memory of a pod, all its ranks together."""
    if not part.option.pool.is_gpu:
        return memory.AGENT_NBYTES + part.option.ranks_per_node * held
    share = memory.pod_nbytes(workload, request.global_batch, 1, is_gpu=True) - memory.AGENT_NBYTES
    return memory.AGENT_NBYTES + part.option.ranks_per_node * share
