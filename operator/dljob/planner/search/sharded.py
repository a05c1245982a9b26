"""Search for plans with strategy Sharded (ZeRO-3) on equal ranks of one device type, with ``strategies.zero``.

The user requests the strategy. With other strategies, its best plan is named if no other plan fits into memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from dljob.calibrate.learned import Learned
from dljob.perf.workload.workload import Workload, in_precision
from dljob.planner.candidates import precision, recomputation
from dljob.planner.candidates.accumulation import MAX_MICRO_BATCHES
from dljob.planner.candidates.evaluate import Part, describe
from dljob.planner.candidates.fixed import fixed_parts
from dljob.planner.candidates.pools import Eligible
from dljob.planner.candidates.strategies import zero
from dljob.planner.candidates.strategies.split_memory import host_room_nbytes
from dljob.planner.search.model_split import Found, equal_parts
from dljob.planner.types import Choice, Group, Infeasible, Refusal, Request
from dljob.planner.types.texts import computed, duration, gibibytes, group_names, samples


def candidates(
    request: Request, nodes: Eligible, workload: Workload, learned: Mapping[tuple[str, str], Learned]
) -> Found | Infeasible:
    """Evaluate the plans with strategy Sharded, in each precision, with and without activation checkpointing.

    Return (evaluated or rejected candidates, nodes that the job cannot use, with reasons), or ``Infeasible`` if no
    nodes are free. ``workload``: in float32 without activation checkpointing.
    """
    found: list[_Evaluated] = []
    for able, typed in _variants(request, nodes, workload, learned):
        parts = fixed_parts(request, able, typed, learned) if request.fixed else None
        if isinstance(parts, Infeasible):
            return parts
        for part in equal_parts(request, able, typed, learned) if parts is None else parts:
            if part.ranks <= request.global_batch:
                found.append(_Evaluated(part, typed, evaluate(part, request, typed)))
    if not found:
        free = sum(sum(pool.free) for pool in nodes.pools)
        text = (
            f"found room for {free} ranks on all device types together; expected at least {request.nodes_min} nodes "
            "of one device type, and at most one rank for each sample of globalBatchSize: change spec.nodes, or wait "
            "until nodes are free"
        )
        return Infeasible("TooFewNodes", "spec.nodes", text, transient=True, refusals=nodes.refusals)
    refusals = [*nodes.refusals, *precision.refusals(request, nodes.pools), *_largest(found)]
    return [each.outcome for each in found if isinstance(each.outcome, Choice)], refusals


class _Evaluated(NamedTuple):
    part: Part
    workload: Workload
    outcome: Choice | Refusal


def _variants(
    request: Request, nodes: Eligible, workload: Workload, learned: Mapping[tuple[str, str], Learned]
) -> Iterator[tuple[Eligible, Workload]]:
    """Yield each workload for which to search plans, with the nodes that can compute in its precision."""
    if request.fixed:
        able = [(each, nodes) for each in precision.of_groups(request, nodes.pools)]
    else:
        searched = precision.searched(request, nodes.pools, learned)
        able = [(each, replace(nodes, pools=tuple(pools))) for each, pools in searched]
    for each, fitting in able:
        for typed in recomputation.variants(request, in_precision(workload, each)):
            yield fitting, typed


def _largest(found: Sequence[_Evaluated]) -> list[Refusal]:
    """Return the refusal of the most ranks of each device type with too little GPU memory or too little main memory.

    Fewer ranks hold more of the training state and more samples each, so the refusals of smaller plans say no more. Nor
    do those of workloads that need more memory: in float32, or without activation checkpointing, if others were tried.
    """

    def frugality(workload: Workload) -> tuple[bool, bool]:
        return workload.recomputes, workload.precision != "FP32"

    least: dict[str, tuple[bool, bool]] = {}
    for part, workload, _ in found:
        label = part.option.label
        least[label] = max(least.get(label, (False, False)), frugality(workload))
    most: dict[tuple[str, bool], tuple[Part, Refusal]] = {}
    for part, workload, refusal in found:
        label = part.option.label
        if isinstance(refusal, Refusal) and frugality(workload) == least[label]:
            kind = label, "main memory" in refusal.reason
            if kind not in most or part.ranks > most[kind][0].ranks:
                most[kind] = part, refusal
    return [refusal for _, refusal in most.values()]


def evaluate(part: Part, request: Request, workload: Workload) -> Choice | Refusal:
    """Return the plan on the ranks of ``part``, or a ``Refusal`` if a rank or a pod has too little memory.

    ``workload``: as the ranks compute it.
    """
    how = computed(workload.precision, recomputes=workload.recomputes)
    option, summary = part.option, f"{describe([part])}, Sharded{how}"
    found = zero.candidate(part, 3, request, workload)
    if found is None:
        k = MAX_MICRO_BATCHES if request.chooses_micro_batches else request.micro_batches
        share = ceil(ceil(request.global_batch / part.ranks) / k)
        held = int(zero.held_nbytes(workload, 3, part.ranks, share, option.device, request))
        many = f"up to {part.ranks}" if part.ranks > 1 and not request.fixed else f"{part.ranks}"
        return Refusal(
            f"{many} x {option.label}, Sharded{how}",
            f"does not fit: a rank with {samples(share)} and its part of the training state needs {gibibytes(held)}, "
            f"but has {gibibytes(option.memory_nbytes)}",
        )
    prediction = zero.predict(found, request, workload)
    room = host_room_nbytes(part, request)
    if prediction.host_memory_nbytes > room:
        return Refusal(
            summary,
            f"does not fit: a pod needs {gibibytes(prediction.host_memory_nbytes)} of main memory, where ranks create "
            f"the model and copy their parts of the state for checkpoints, but can have {gibibytes(room)}",
        )
    if found.micro_batches > 1:
        summary = f"{describe([part])}, Sharded, {found.micro_batches} micro-batches{how}"
    each, is_gpu = option.ranks_per_node, option.pool.is_gpu
    base, rest = divmod(request.global_batch, part.ranks)
    shares = tuple(base + (rank < rest) for rank in range(part.ranks))
    name = group_names([option.label])[0]
    group = Group(name, option.label, is_gpu, part.nodes, each, shares, each * option.cores, option.cores)
    return Choice(
        summary,
        (group,),
        "Torch",
        prediction,
        "Sharded",
        found.micro_batches,
        precision=workload.precision,
        recomputes=workload.recomputes,
    )


def offered(
    request: Request, nodes: Eligible, workload: Workload, learned: Mapping[tuple[str, str], Learned]
) -> list[Refusal]:
    """Return the fastest plan with strategy Sharded of a script with which no other plan fits into memory, if there is.

    Return an empty list if the job cannot use the strategy.
    """
    if not can_use(request):
        return []
    asked = candidates(request, nodes, workload, learned)
    fitting = [] if isinstance(asked, Infeasible) else [each for each in asked[0] if isinstance(each, Choice)]
    if not fitting:
        return []
    best = min(fitting, key=lambda each: each.prediction.step_s)
    p = best.prediction
    why = f"would fit: {gibibytes(p.memory_nbytes)} per rank, {duration(p.step_s)} per step"
    return [Refusal(best.summary, f"not requested (parallelism.strategy Sharded), {why}")]


def can_use(request: Request) -> bool:
    """Return True if the trainer could run a data-parallel job with strategy Sharded, if the user requested it."""
    return can_run(request) and request.strategy == "Data"


def can_run(request: Request) -> bool:
    """Return True if the trainer could run the job's script with strategy Sharded in place of the requested one."""
    script = request.model is None and not request.reduced_by_script and not request.fixed
    plain = request.synchronization == "Synchronous" and request.batches is None
    return script and plain and request.collective in (None, "Torch")
