"""Search for plans with strategy Sharded (ZeRO-3) on equal ranks of one device type, with ``strategies.zero``.

The user requests the strategy. With other strategies, its best plan is named if no other plan fits into memory.
"""

from collections.abc import Mapping, Sequence
from math import ceil

from dljob.calibrate.learned import Learned
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.accumulation import MAX_MICRO_BATCHES
from dljob.planner.candidates.evaluate import Part, describe
from dljob.planner.candidates.pools import Eligible
from dljob.planner.candidates.strategies import zero
from dljob.planner.candidates.strategies.split_memory import host_room_nbytes
from dljob.planner.search.model_split import Found, equal_parts
from dljob.planner.types import Choice, Group, Infeasible, Refusal, Request
from dljob.planner.types.texts import duration, gibibytes, group_names, samples


def candidates(
    request: Request,
    nodes: Eligible,
    workload: Workload,
    learned: Mapping[tuple[str, str], Learned],
    fixed: Sequence[Part] = (),
) -> Found | Infeasible:
    """Evaluate the plans with strategy Sharded.

    Return (evaluated or rejected candidates, nodes that the job cannot use, with reasons), or ``Infeasible`` if no
    nodes are free. ``fixed``: the groups of nodes that the user fixes (``spec.planning.groups``).
    """
    parts = fixed or equal_parts(request, nodes, workload, learned)
    parts = [part for part in parts if part.ranks <= request.global_batch]
    if not parts:
        found = sum(sum(pool.free) for pool in nodes.pools)
        text = (
            f"found room for {found} ranks on all device types together; expected at least {request.nodes_min} nodes "
            "of one device type, and at most one rank for each sample of globalBatchSize: change spec.nodes, or wait "
            "until nodes are free"
        )
        return Infeasible("TooFewNodes", "spec.nodes", text, transient=True, refusals=nodes.refusals)
    evaluated = [(part, evaluate(part, request, workload)) for part in parts]
    refused = [(part, each) for part, each in evaluated if isinstance(each, Refusal)]
    return [each for _, each in evaluated if isinstance(each, Choice)], [*nodes.refusals, *_largest(refused)]


def _largest(refused: Sequence[tuple[Part, Refusal]]) -> list[Refusal]:
    """Return the refusal of the most ranks of each device type with too little GPU memory or too little main memory.

    Fewer ranks hold more of the training state and more samples each, so the refusals of smaller plans say no more.
    """
    most: dict[tuple[str, bool], tuple[Part, Refusal]] = {}
    for part, refusal in refused:
        kind = part.option.label, "main memory" in refusal.reason
        if kind not in most or part.ranks > most[kind][0].ranks:
            most[kind] = part, refusal
    return [refusal for _, refusal in most.values()]


def evaluate(part: Part, request: Request, workload: Workload) -> Choice | Refusal:
    """Return the plan on the ranks of ``part``, or a ``Refusal`` if a rank or a pod has too little memory."""
    option, summary = part.option, f"{describe([part])}, Sharded"
    found = zero.candidate(part, 3, request, workload)
    if found is None:
        k = MAX_MICRO_BATCHES if request.chooses_micro_batches else request.micro_batches
        share = ceil(ceil(request.global_batch / part.ranks) / k)
        held = int(zero.held_nbytes(workload, 3, part.ranks, share, option.device, request))
        many = f"up to {part.ranks}" if part.ranks > 1 and not request.fixed else f"{part.ranks}"
        return Refusal(
            f"{many} x {option.label}, Sharded",
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
        summary += f", {found.micro_batches} micro-batches"
    each, is_gpu = option.ranks_per_node, option.pool.is_gpu
    base, rest = divmod(request.global_batch, part.ranks)
    shares = tuple(base + (rank < rest) for rank in range(part.ranks))
    name = group_names([option.label])[0]
    group = Group(name, option.label, is_gpu, part.nodes, each, shares, each * option.cores, option.cores)
    return Choice(summary, (group,), "Torch", prediction, "Sharded", found.micro_batches)


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
    """Return True if the trainer could run the job with strategy Sharded, if the user requested it."""
    script = request.model is None and not request.reduced_by_script and not request.fixed
    plain = request.precision == "FP32" and request.synchronization == "Synchronous" and request.batches is None
    return script and plain and request.strategy == "Data" and request.collective in (None, "Torch")
