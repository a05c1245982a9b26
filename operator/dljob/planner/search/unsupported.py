"""Search for better plans that the trainer cannot run yet: sharded gradients or parameters, and hybrids.

The plans are those of ``strategies.zero`` (ZeRO-2, ZeRO-3) and ``hybrids`` (data parallelism combined with pipelines or
tensor parallelism) of models that the trainer cannot split, on equal ranks of one type of device. They are never
chosen. The search is small: for each type of device, one or two numbers of ranks per node and at most ``MAX_COUNTS``
numbers of nodes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from dljob.perf.resources import memory
from dljob.perf.step import model_split as split
from dljob.perf.workload.workload import Workload, in_precision
from dljob.planner.candidates import precision, recomputation
from dljob.planner.candidates.collectives import NCCL_NAMES
from dljob.planner.candidates.evaluate import Part
from dljob.planner.candidates.node_layout import Layout, largest_layouts
from dljob.planner.candidates.options import Option
from dljob.planner.candidates.pools import Eligible, Pool
from dljob.planner.candidates.strategies import zero
from dljob.planner.candidates.strategies.micro_batches import fewest_micro_batches
from dljob.planner.search import objective
from dljob.planner.search import sharded as sharding
from dljob.planner.search.hybrids import hybrids, node_counts
from dljob.planner.search.model_split import KINDS
from dljob.planner.types import Choice, Prediction, Refusal, Request, Unsupported
from dljob.planner.types.texts import computed, duration, gibibytes, step_times

PAYS = 0.05
"""Minimum fraction of the objective by which a plan must beat the chosen one, so that the result mentions it."""
MAX_SHOWN = 2
"""Maximum number of plans in the result. Each is of another kind."""
MAX_COUNTS = 5
"""Maximum number of node counts to try for each type of device: all nodes, and the largest powers of two below."""
OptionsOf = Callable[[Pool, Layout, Workload], Sequence[Option]]
"""Function that returns the options to use the nodes of a pool with a layout of ranks and cores for a workload."""
ZeroStage = Literal[2, 3]


class _Found(NamedTuple):
    kind: str
    score: float
    text: str
    prediction: Prediction
    if_asked: str = ""
    """Condition under which the trainer can run it after all; or ''."""


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
    return tuple(
        Unsupported(each.text, _reason(each, request, chosen) + each.if_asked, each.prediction)
        for each in ranked[:MAX_SHOWN]
    )


def _reason(found: _Found, request: Request, chosen: Choice | None) -> str:
    p = found.prediction
    step = f"{duration(p.step_s)} per step"
    if chosen is None:
        return f"would fit: {gibibytes(p.memory_nbytes)} per rank, {step}"
    q = chosen.prediction
    gain = 1 - found.score / objective.score(request, q)
    what = {"Time": "faster", "Energy": "less energy", "Cost": "less expensive", "Carbon": "less carbon"}
    if gain > 1 - objective.LATE**-0.5:  # only this plan meets the deadline
        return f"would meet the deadline: {step}, {gibibytes(p.memory_nbytes)} per rank"
    return (
        f"would be {100 * gain:.0f} % {what[request.minimize]}: "
        f"{step_times((p.step_s, q.step_s), (p.total_s, q.total_s))}, {gibibytes(p.memory_nbytes)} per rank; "
        f"{p.bottleneck}"
    )


def _of_pool(
    request: Request, pool: Pool, workload: Workload, options_of: OptionsOf, chosen: Choice | None
) -> Iterator[_Found]:
    for name, _ in precision.searched(request, [pool], {}):
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
    found = [
        layout
        for layout in largest_layouts(pool, request)
        if not pool.is_gpu or any(_has_room(option, typed, pool.nodes) for option in options_of(pool, layout, typed))
    ]
    used = [group.ranks_per_node for group in chosen.groups if group.device == pool.device] if chosen else []
    if pool.is_gpu and found:
        most = max(found, key=lambda each: each.ranks * sum(free >= each.ranks for free in pool.free))
        picked = [each for each in found if each is most or each.ranks in used]
    else:
        picked = [each for each in found if each.ranks in (used or [1])]
    for layout in picked:
        options = options_of(pool, layout, typed)
        last = min(max((o.nodes for o in options), default=0), request.nodes_max or pool.nodes)
        while last and pool.is_gpu and not request.allows_gpus(pool.device, last * layout.ranks):
            last -= 1
        for nodes in node_counts(last)[:MAX_COUNTS]:
            able = [o for o in options if o.nodes >= nodes >= max(o.min_nodes, request.nodes_min)]
            fitting = [o for o in able if _has_room(o, typed, nodes)]
            if fitting and nodes * layout.ranks > 1:
                yield Part(max(fitting, key=lambda o: o.memory_nbytes), nodes)


def _has_room(option: Option, workload: Workload, nodes: int) -> bool:
    """Return True if the nodes have enough main memory for pods whose ranks copy a part of the state of the model."""
    part = memory.sharded(workload, nodes * option.ranks_per_node)
    return option.pod_nbytes(part, 1) <= option.host_nbytes


def _of_part(part: Part, request: Request, typed: Workload, model: split.Model) -> Iterator[_Found]:
    how = computed(typed.precision, recomputes=typed.recomputes)
    for stage in get_args(ZeroStage):
        if stage == 3 and sharding.can_use(request):
            continue  # the trainer can run it, if the user requests strategy Sharded
        sharded = zero.candidate(part, stage, request, typed)
        if sharded is not None:
            p = zero.predict(sharded, request, typed)
            asked = "; the trainer can, with parallelism.strategy Sharded"
            if_asked = asked if stage == 3 and sharding.can_run(request) else ""
            yield _Found(f"ZeRO-{stage}", objective.score(request, p), f"{sharded.describe()}{how}", p, if_asked)
    runs = typed.precision == "FP32" and not typed.recomputes and request.no_split_reason is None
    kinds = () if runs and request.model is not None else KINDS  # the trainer can split built-in models
    if request.parameters is not None:
        kinds = tuple(kind for kind in kinds if kind == "Pipeline")  # figures alone show no pairs of linear layers
    for candidate in (each for kind in kinds for each in hybrids(kind, part, request, model, anywhere=True)):
        tried, found = fewest_micro_batches(candidate, request, model, divides=request.chooses_micro_batches)
        if not isinstance(found, Refusal):
            text = f"{tried.describe()}{how}"
            by_name = f"; the trainer can, if the script says how its model is cut (strategy {candidate.strategy})"
            if_asked = by_name if runs else ""
            yield _Found(candidate.strategy, objective.score(request, found), text, found, if_asked)
