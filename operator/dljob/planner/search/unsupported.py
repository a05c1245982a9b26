"""Search for better plans that the trainer cannot run yet: sharded gradients or parameters, and hybrids.

The plans are those of ``strategies.zero`` (ZeRO-2, ZeRO-3) and ``strategies.model_split`` with several replicas (data
parallelism combined with pipelines or tensor parallelism), on equal ranks of one type of device. They are never chosen.
The search is small: for each type of device, one or two numbers of ranks per node and at most ``MAX_COUNTS`` numbers of
nodes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from dljob.perf.step import model_split as split
from dljob.perf.workload.workload import Workload, in_precision
from dljob.planner.candidates import precision, recomputation
from dljob.planner.candidates.collectives import NCCL_NAMES
from dljob.planner.candidates.evaluate import Part
from dljob.planner.candidates.node_layout import Layout, largest_layouts
from dljob.planner.candidates.options import Option
from dljob.planner.candidates.pools import Eligible, Pool
from dljob.planner.candidates.strategies import zero
from dljob.planner.candidates.strategies.model_split import SplitCandidate, micro_batch_counts, predict
from dljob.planner.search import objective
from dljob.planner.search import sharded as sharding
from dljob.planner.search.model_split import MICRO_BATCHES_PER_STAGE
from dljob.planner.types import Choice, Prediction, Refusal, Request, Unsupported
from dljob.planner.types.texts import duration, gibibytes

PAYS = 0.05
"""Minimum fraction of the objective by which a plan must beat the chosen one, so that the result mentions it."""
MAX_SHOWN = 2
"""Maximum number of plans in the result. Each is of another kind."""
MAX_COUNTS = 5
"""Maximum number of node counts to try for each type of device: all nodes, and the largest powers of two below."""
STAGES, GROUPS = (2, 4, 8, 16, 32), (2, 4, 8)
"""Numbers of pipeline stages, and of ranks of a tensor-parallel group."""

OptionsOf = Callable[[Pool, Layout, Workload], Sequence[Option]]
"""Function that returns the options to use the nodes of a pool with a layout of ranks and cores for a workload."""
ZeroStage = Literal[2, 3]


class _Found(NamedTuple):
    kind: str
    score: float
    text: str
    prediction: Prediction


def search(
    request: Request, nodes: Eligible, workload: Workload, options_of: OptionsOf, chosen: Choice | None
) -> tuple[Unsupported, ...]:
    """Return the best plans of different kinds that the trainer cannot run yet, the best first.

    ``chosen``: the chosen plan, which they beat by ``PAYS``; None if no plan fits into memory. ``options_of``: function
    from a pool, a layout and a workload to the options to use the pool. Return an empty tuple unless
    ``request.asks_unsupported`` is true and training is synchronous, without a parameter server or another collective
    that NCCL lacks, without groups that the user fixes, and neither with strategy Sharded nor with a script that
    reduces gradients itself.
    """
    equals = request.strategy != "Sharded" and request.synchronization == "Synchronous"
    equals = equals and request.collective in (None, *NCCL_NAMES)
    if not (request.asks_unsupported and equals) or request.fixed or request.reduced_by_script:
        return ()
    devices = None if chosen is None else {group.device for group in chosen.groups}
    best: dict[str, _Found] = {}
    for pool in nodes.pools:
        if devices is not None and pool.device not in devices:
            continue
        for each in _of_pool(request, pool, workload, options_of, chosen):
            if each.kind not in best or each.score < best[each.kind].score:
                best[each.kind] = each
    ranked = sorted(best.values(), key=lambda each: each.score)
    if chosen is not None:
        bar = objective.score(request, chosen.prediction) * (1 - PAYS)
        ranked = [each for each in ranked if each.score < bar]
    return tuple(Unsupported(each.text, _reason(each, request, chosen), each.prediction) for each in ranked[:MAX_SHOWN])


def _reason(found: _Found, request: Request, chosen: Choice | None) -> str:
    p = found.prediction
    step = f"{duration(p.step_s)} per step"
    if chosen is None:
        return f"would fit: {gibibytes(p.memory_nbytes)} per rank, {step}"
    gain = 1 - found.score / objective.score(request, chosen.prediction)
    what = {"Time": "faster", "Energy": "less energy", "Cost": "less expensive", "Carbon": "less carbon"}
    if gain > 1 - objective.LATE**-0.5:  # only this plan meets the deadline
        return f"would meet the deadline: {step}, {gibibytes(p.memory_nbytes)} per rank"
    return (
        f"would be {100 * gain:.0f} % {what[request.minimize]}: {step} instead of "
        f"{duration(chosen.prediction.step_s)}, {gibibytes(p.memory_nbytes)} per rank; {p.bottleneck}"
    )


def _of_pool(
    request: Request, pool: Pool, workload: Workload, options_of: OptionsOf, chosen: Choice | None
) -> Iterator[_Found]:
    for name, _ in precision.searched(request, [pool]):
        if not precision.gets(request, pool, name):
            continue
        for typed in recomputation.variants(request, in_precision(workload, name)):
            model = split.cut_up(typed)
            for part in _parts(request, pool, typed, options_of, chosen):
                yield from _of_part(part, request, typed, model)


def _parts(
    request: Request, pool: Pool, typed: Workload, options_of: OptionsOf, chosen: Choice | None
) -> Iterator[Part]:
    """Yield the groups of nodes of ``pool`` to consider, with one or two numbers of ranks per node.

    The numbers of nodes are all nodes and powers of two, at most ``MAX_COUNTS``. ``typed``: the workload in the
    precision of the search. ``chosen``: the chosen plan, whose number of ranks per node is also considered.
    """
    found = largest_layouts(pool, request)
    used = [group.ranks_per_node for group in chosen.groups if group.device == pool.device] if chosen else []
    if pool.is_gpu:
        most = max(found, key=lambda each: each.ranks * sum(free >= each.ranks for free in pool.free))
        picked = [each for each in found if each is most or each.ranks in used]
    else:
        picked = [each for each in found if each.ranks in (used or [1])]
    for layout in picked:
        options = options_of(pool, layout, typed)
        last = min(max((o.nodes for o in options), default=0), request.nodes_max or pool.nodes)
        while last and pool.is_gpu and not request.allows_gpus(pool.device, last * layout.ranks):
            last -= 1
        counts = sorted({last, *(1 << i for i in range(last.bit_length()))}, reverse=True)[:MAX_COUNTS]
        for nodes in counts:
            fitting = [o for o in options if o.nodes >= nodes >= max(o.min_nodes, request.nodes_min)]
            if fitting and nodes * layout.ranks > 1:
                yield Part(max(fitting, key=lambda o: o.memory_nbytes), nodes)


def _of_part(part: Part, request: Request, typed: Workload, model: split.Model) -> Iterator[_Found]:
    how = f"{f', {typed.precision}' if typed.precision != 'FP32' else ''}"
    how += ", activation checkpointing" if typed.recomputes else ""
    for stage in get_args(ZeroStage):
        if stage == 3 and sharding.can_use(request) and typed.precision == "FP32" and not typed.recomputes:
            continue  # the trainer can run it, if the user requests strategy Sharded
        sharded = zero.candidate(part, stage, request, typed)
        if sharded is not None:
            p = zero.predict(sharded, request, typed)
            yield _Found(f"ZeRO-{stage}", objective.score(request, p), f"{sharded.describe()}{how}", p)
    for candidate in _hybrids(part, request, model):
        found = _fewest_micro_batches(candidate, request, model)
        if found is not None:
            text = f"{found[0].describe()}{how}"
            yield _Found(candidate.strategy, objective.score(request, found[1]), text, found[1])


def _hybrids(part: Part, request: Request, model: split.Model) -> Iterator[SplitCandidate]:
    """Yield the hybrids (data parallelism combined with pipelines or tensor parallelism) on the ranks of ``part``.

    Pipelines have ``MICRO_BATCHES_PER_STAGE`` micro-batches per stage, tensor-parallel groups have one micro-batch.
    """
    units = model.pairs.units if model.pairs is not None else 0
    for size in dict.fromkeys((*STAGES, *GROUPS)):
        replicas, rest = divmod(part.ranks, size)
        if rest or not 2 <= replicas <= request.global_batch:
            continue
        if size in STAGES and size <= len(model.stages):
            yield SplitCandidate(part, "Pipeline", "Torch", MICRO_BATCHES_PER_STAGE * size, replicas)
        if size in GROUPS and size <= min(units, part.option.ranks_per_node):
            yield SplitCandidate(part, "Tensor", "Torch", 1, replicas)


def _fewest_micro_batches(
    candidate: SplitCandidate, request: Request, model: split.Model
) -> tuple[SplitCandidate, Prediction] | None:
    """Return the candidate with at least its own number of micro-batches that fits into memory, and its prediction.

    Return None if none does. Tensor-parallel groups divide batches only if the planner may choose micro-batches.
    """
    batch = -(-request.global_batch // candidate.replicas)
    counts = [k for k in micro_batch_counts(batch, candidate.micro_batches) if k >= min(batch, candidate.micro_batches)]
    if candidate.strategy == "Tensor" and not request.chooses_micro_batches:
        counts = [1]
    for k in counts:
        tried = candidate.divided(k)
        found = predict(tried, request, model)
        if not isinstance(found, Refusal):
            return tried, found
    return None
