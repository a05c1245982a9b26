"""Search for model-parallel plans (strategies Pipeline and Tensor) with equal ranks on one type of device.

With strategy Pipeline, each stage has one rank per replica. With Tensor, the planner chooses the fastest number of
ranks. With Auto, every number of stages that the trainer supports is a candidate beside the data-parallel plans, and
some hybrids (``hybrids``) too. The planner then chooses a model-parallel candidate only if it is better despite the
uncertainty of its prediction (``objective.best``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, log
from typing import Literal, NamedTuple

from dlcontract import SERVERS
from dljob.calibrate.learned import Learned
from dljob.perf.step import model_split as split
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.collectives import AUTO
from dljob.planner.candidates.evaluate import Part
from dljob.planner.candidates.node_layout import Layout, layouts, layouts_within_quota
from dljob.planner.candidates.options import Option, options
from dljob.planner.candidates.pools import Eligible, Pool
from dljob.planner.candidates.strategies.micro_batches import (
    evaluate,
    fewest_micro_batches,
    micro_batch_counts,
    too_large,
)
from dljob.planner.candidates.strategies.model_split import choice, predict
from dljob.planner.candidates.strategies.split_candidate import SplitCandidate
from dljob.planner.search import objective
from dljob.planner.search.enumeration import charged_cpus, grid
from dljob.planner.search.hybrids import MICRO_BATCHES_PER_STAGE, hybrids, node_counts, reducing
from dljob.planner.types import Choice, CollectiveName, Infeasible, Prediction, Refusal, Request

Found = tuple[list[Choice | Refusal], list[Refusal]]
Kind = Literal["Pipeline", "Tensor"]
KINDS: tuple[Kind, ...] = ("Pipeline", "Tensor")
KEPT_PER_STRATEGY = 5
"""Number of best candidates of each strategy that ``search`` returns, besides the best of each device type and size."""
MAX_HYBRID_COUNTS = 5
"""Maximum number of node counts with which ``search`` tries hybrids, for each way to use a type of device."""


def candidates(
    request: Request,
    nodes: Eligible,
    workload: Workload,
    learned: Mapping[tuple[str, str], Learned],
    fixed: Sequence[Part] = (),
) -> Found | Infeasible:
    """Evaluate all model-parallel plans with the strategy that the user requests (Pipeline or Tensor).

    Return (evaluated or rejected candidates, nodes that the job cannot use, with reasons). Return ``Infeasible`` if
    none is possible. ``fixed``: the groups of nodes that the user fixes (``spec.planning.groups``), with each number of
    cores.
    """
    model = split.cut_up(workload)
    if request.strategy == "Tensor" and model.pairs is None:
        text = f"found Tensor with the model {workload.name}; expected one with pairs of linear layers: choose another"
        return Infeasible("BadWorkload", "spec.parallelism.strategy", text)
    if (stages := request.stages or 1) > len(model.stages):
        text = (
            f"found {stages}; expected at most {len(model.stages)}, because the model cannot be split into more "
            "stages: use fewer stages"
        )
        return Infeasible("BadWorkload", "spec.parallelism.stages", text)
    parts = [
        part for part in (fixed or equal_parts(request, nodes, workload, learned)) if _fits(request, part, model.pairs)
    ]
    if not parts:
        own = sum(choice.nodes * choice.ranks_per_node for choice in request.fixed)
        found = own if fixed else sum(sum(pool.free) for pool in nodes.pools)
        most, replicas = model.pairs.units if model.pairs is not None else found, request.replicas or 1
        wanted = f"{request.stages} ranks, one per stage" if request.stages else f"2 to {most} ranks"
        wanted += f", for each of {replicas} replicas" if replicas > 1 else ""
        text = (
            f"found groups with {found} ranks in total; expected {wanted}, in one group: change spec.planning.groups"
            if fixed
            else f"found room for {found} ranks on all types of device; expected {wanted}, on nodes of one device type "
            "within spec.nodes.min and spec.nodes.max: change spec.nodes or spec.parallelism, or wait for nodes"
        )
        return Infeasible(
            "TooFewNodes",
            "spec.planning.groups" if fixed else "spec.parallelism.stages" if request.stages else "spec.nodes",
            text,
            transient=not fixed,
            refusals=nodes.refusals,
        )
    asked = [candidate for part in parts for candidate in _asked(part, request, model)]
    plans = [evaluate(candidate, request, model) for candidate in asked]
    refused = tuple(each for each in plans if isinstance(each, Refusal))
    if request.strategy == "Pipeline" and len(refused) == len(plans):
        return too_large(request, asked, model, refused + nodes.refusals)
    return plans, list(nodes.refusals)


def like(part: Part, request: Request, workload: Workload) -> Choice | Refusal | str:
    """Return the fastest candidate that splits the model over the ranks of ``part`` with the requested strategy.

    ``part``: the nodes and ranks of another plan, which has only this group of nodes. The caller compares the result
    with that plan. Return a ``Refusal`` (candidate and reason) if no candidate fits into memory. Return a text with the
    reason if the model cannot be split in this way.
    """
    model = split.cut_up(workload)
    if request.strategy == "Tensor" and model.pairs is None:
        return "not possible: the model has no pairs of linear layers"
    units = model.pairs.units if model.pairs is not None else 0
    found, why = list[Choice | Refusal](), ""
    for candidate in _asked(part, request, model):
        if candidate.strategy == "Tensor" and candidate.split_over > units:
            why = f"tensor parallelism can split this model over at most {units} ranks, and the plan has {part.ranks}"
            continue
        try:
            found.append(evaluate(candidate, request, model))
        except ValueError as error:
            why = str(error)
    if not found:
        return f"not possible: {why}"
    fitting = [choice for choice in found if isinstance(choice, Choice)]
    return min(fitting, key=lambda choice: choice.prediction.step_s) if fitting else found[0]


def _asked(part: Part, request: Request, model: split.Model) -> list[SplitCandidate]:
    """Return the ways to split the model over the ranks of ``part`` (a group of nodes) with the requested strategy.

    If the request has no number of replicas, also return the hybrids on these ranks.
    """
    replicas = request.replicas or 1
    if request.strategy == "Pipeline":
        name, most = "MPI" if replicas == 1 else reducing(part), -(-request.global_batch // replicas)
        found = [SplitCandidate(part, "Pipeline", name, min(request.micro_batches, most), replicas)]
    else:
        found = [SplitCandidate(part, "Tensor", name, 1, replicas) for name in _collectives(request, part.option)]
    if request.replicas is None:
        found += hybrids("Pipeline" if request.strategy == "Pipeline" else "Tensor", part, request, model)
    return found


def equal_parts(
    request: Request, nodes: Eligible, workload: Workload, learned: Mapping[tuple[str, str], Learned]
) -> list[Part]:
    """Return the groups of nodes to consider. Each has one type of device, and its ranks split the model.

    The number of nodes is within ``spec.nodes.min``, ``spec.nodes.max`` and the quota. If the request fixes the number
    of pipeline stages, the number of nodes follows from it and from the number of replicas.
    """
    found, replicas = [], request.replicas or 1
    for pool in nodes.pools:
        fewer = request.minimize != "Time" and not pool.is_gpu  # cores may need less energy, or cost less
        for each in layouts(pool, request) if fewer else layouts_within_quota(pool, request):
            for option in options(pool, each, workload, request, learned):
                most = min(option.nodes, request.nodes_max or option.nodes)
                parts = [*grid(most), request.nodes_min, (request.bound_ranks or each.ranks) // each.ranks]
                counts = (
                    [request.stages * replicas // each.ranks]
                    if request.stages
                    else sorted({*parts, *(-(-replicas * count // each.ranks) for count in parts)})
                )
                found += [
                    Part(option, n)
                    for n in counts
                    if max(option.min_nodes, request.nodes_min) <= n <= most and _allowed(request, option, n)
                    if request.bound_ranks in (None, n * each.ranks)
                ]
    return found


def _allowed(request: Request, option: Option, nodes: int) -> bool:
    """Return True if the nodes are within the quotas."""
    if option.pool.is_gpu:
        return request.allows_gpus(option.label, nodes * option.ranks_per_node)
    return request.cpus_max is None or nodes * charged_cpus(option, request) <= request.cpus_max


def _fits(request: Request, part: Part, pairs: split.Pairs | None) -> bool:
    over, rest = divmod(part.ranks, request.replicas or 1)
    if request.stages:
        return over == request.stages and not rest
    return pairs is not None and 2 <= over <= pairs.units and not rest


def _collectives(request: Request, option: Option) -> tuple[CollectiveName, ...]:
    """Return the collectives to consider for the all-reduce of activations in tensor parallelism."""
    if request.collective:
        return (request.collective,)
    return tuple(name for name in AUTO[option.pool.is_gpu] if name != "ParameterServer")


# The rest of this module searches for the planner's own choice (strategy Auto).


class _Priced(NamedTuple):
    score: float
    candidate: SplitCandidate
    prediction: Prediction


def search(
    request: Request,
    nodes: Eligible,
    workload: Workload,
    options_of: Callable[[Pool, Layout], Sequence[Option]],
    fixed: Sequence[Part] = (),
) -> tuple[list[Choice], list[Refusal]]:
    """Return (best pipeline and tensor-parallel candidates, rejected strategies and devices with reasons).

    A strategy is rejected if it cannot be used, and a device if no candidate of a strategy fits into its memory.
    ``options_of``: function from a pool and a layout of ranks and cores to options. ``fixed``: the groups of nodes that
    the user fixes (``spec.planning.groups``).
    """
    found: list[Choice] = []
    refusals: list[Refusal] = []
    model = split.cut_up(workload)
    places = list(_places(request, nodes, options_of, fixed))
    if not any(counts[-1] * option.ranks_per_node > 1 for option, counts in places):
        return [], []  # one rank cannot split the model
    for kind in KINDS:
        if (why := _left_out(kind, request, model, fixed)) is not None:
            refusals.append(Refusal(kind, f"not considered: {why}"))
            continue
        priced, lines = [], dict[str, Refusal]()
        turns, places_done = float(MICRO_BATCHES_PER_STAGE), set[tuple[str, int, bool]]()
        for part in sorted(_placed(kind, places, model), key=_by_merit(request.global_batch)):
            option = part.option
            placement = (option.label, part.ranks, part.nodes == 1)
            if placement in places_done:
                continue
            if kind == "Pipeline":
                these = _pipelines(part, request, model, turns)
            else:
                these = [
                    _priced(SplitCandidate(part, kind, name), request, model) for name in _collectives(request, option)
                ]
            fitting = [each for each in these if isinstance(each, _Priced)]
            if fitting:
                priced += fitting
                places_done.add(placement)
                best = min(fitting, key=lambda each: each.score).candidate
                turns = best.micro_batches / part.ranks  # start the search of the next, similar placement here
            else:
                lines[option.label] = next(each for each in reversed(these) if isinstance(each, Refusal))
        priced += _hybrids(kind, places, request, model)
        devices = {each.candidate.part.option.label for each in priced}
        refusals += [line for label, line in lines.items() if label not in devices]
        found += [choice(candidate, request, prediction) for _, candidate, prediction in _worth_showing(priced)]
    return found, refusals


def _left_out(kind: Kind, request: Request, model: split.Model, fixed: Sequence[Part]) -> str | None:
    """Return the reason why the request cannot use the strategy ``kind``, or None if it can."""
    if request.model is None:
        return "the planner splits only built-in models by itself: request Pipeline or Tensor for a training script"
    if request.no_split_reason is not None:
        return request.no_split_reason
    if request.precision not in (None, "FP32"):
        return f"spec.precision is {request.precision}, but model parallelism computes in float32"
    if request.recomputation == "Always":
        return "spec.activationCheckpointing is Always, but model parallelism has no activation checkpointing"
    if request.synchronization != "Synchronous" or request.compressed:
        return "model parallelism supports neither spec.gradientCompression nor asynchronous training"
    if len(fixed) > 1 or any(part.batch_per_rank for part in fixed):
        return (
            "model parallelism needs one device type and the whole batch on every rank, but spec.planning.groups has "
            "several groups or batchPerRank"
        )
    if kind == "Pipeline" and request.collective:
        return (
            f"spec.collective is {request.collective}, but pipeline stages use no collective: a stage exchanges "
            "messages only with its neighbours"
        )
    if kind == "Tensor" and request.collective in (*SERVERS, "DDP"):
        return (
            f"spec.collective is {request.collective}, but Tensor needs a collective in which all ranks reduce "
            "activations"
        )
    if kind == "Tensor" and model.pairs is None:
        return "the model has no pairs of linear layers"
    return None


def _places(
    request: Request, nodes: Eligible, options_of: Callable[[Pool, Layout], Sequence[Option]], fixed: Sequence[Part]
) -> Iterator[tuple[Option, range]]:
    """Yield each option (way to use one type of device) with the range of numbers of nodes that a plan may use of it.

    If the user fixes groups of nodes (``fixed``), yield only their options and numbers of nodes.
    """
    for part in fixed:
        yield part.option, range(part.nodes, part.nodes + 1)
    if fixed:
        return
    for pool in nodes.pools:
        for each in layouts_within_quota(pool, request):
            seen = set[tuple[float, int]]()
            for option in sorted(options_of(pool, each), key=lambda o: -o.nodes):
                if (option.memory_nbytes, option.machine_nodes) in seen:
                    continue  # the same option with fewer nodes
                seen.add((option.memory_nbytes, option.machine_nodes))
                most = min(option.nodes, request.nodes_max or option.nodes)
                while most and not _allowed(request, option, most):
                    most -= 1
                least = max(option.min_nodes, request.nodes_min)
                if most >= least:
                    yield option, range(least, most + 1)


def _placed(kind: Kind, places: Sequence[tuple[Option, range]], model: split.Model) -> Iterator[Part]:
    """Yield groups of nodes with at least 2 ranks, and at most as many ranks as the model can be split among.

    ``places``: the options with the allowed numbers of nodes. A pipeline has at most the model's number of stages,
    tensor parallelism at most one rank for each unit (such as an attention head). For pipelines, yield every number of
    nodes; for tensor parallelism, a grid of numbers.
    """
    most = len(model.stages) if kind == "Pipeline" else model.pairs.units if model.pairs is not None else 0
    for option, counts in places:
        wanted: Sequence[int] = counts[:most]
        if kind == "Tensor":
            last = min(counts[-1], most // option.ranks_per_node)
            wanted = sorted(n for n in {*grid(last), counts[0]} if n in counts) if last else ()
        yield from (Part(option, n) for n in wanted if 2 <= n * option.ranks_per_node <= most)


def _by_merit(batch: int) -> Callable[[Part], tuple[str, int, bool, float, int]]:
    """Return a function that returns the sort key of a group of nodes, so that the search tries better groups first.

    The key is (device, number of ranks, False for one node or True for several, computing time, number of nodes).
    ``batch``: number of samples that the computing time is for. If a group has several nodes, its messages cross the
    same network, whatever the number of ranks per node. Groups with equally many ranks on several nodes therefore
    differ only in computing time. The search needs only the first of them that fits into memory.
    """

    def key(part: Part) -> tuple[str, int, bool, float, int]:
        return part.option.label, part.ranks, part.nodes > 1, part.option.computing.seconds(batch), part.nodes

    return key


def _pipelines(part: Part, request: Request, model: split.Model, turns: float) -> list[_Priced | Refusal]:
    """Return the pipelines on the ranks of ``part`` that a local search over the number of micro-batches evaluated.

    The search starts at about ``turns`` micro-batches per stage and stops at a local minimum. While nothing fits into
    memory, it tries more micro-batches. It compares two neighbours on either side, because a number that does not
    divide the batch can be some per cent worse than both of its neighbours.
    """
    counts = list(micro_batch_counts(request.global_batch, part.ranks))
    at = min(range(len(counts)), key=lambda i: abs(log(counts[i] / (turns * part.ranks))))
    seen: dict[int, _Priced | Refusal] = {}

    def score(i: int) -> float:
        if not 0 <= i < len(counts):
            return inf
        if i not in seen:
            seen[i] = _priced(SplitCandidate(part, "Pipeline", "MPI", counts[i]), request, model)
        found = seen[i]
        return inf if isinstance(found, Refusal) else found.score

    while True:
        here = score(at)
        better = [i for i in (at + 1, at - 1, at + 2, at - 2) if score(i) < here]
        if here == inf and at + 1 < len(counts):
            better = [at + 1]
        if not better:
            return list(seen.values())
        at = better[0]


def _priced(candidate: SplitCandidate, request: Request, model: split.Model) -> _Priced | Refusal:
    found = predict(candidate, request, model)
    return found if isinstance(found, Refusal) else _Priced(objective.score(request, found), candidate, found)


def _hybrids(kind: Kind, places: Sequence[tuple[Option, range]], request: Request, model: split.Model) -> list[_Priced]:
    """Return the hybrids on the most nodes of each option, and on powers of two of them."""
    found = []
    for option, counts in places if request.replicas is None else ():
        for nodes in [n for n in node_counts(counts[-1]) if n in counts][:MAX_HYBRID_COUNTS]:
            for candidate in hybrids(kind, Part(option, nodes), request, model):
                tried, prediction = fewest_micro_batches(candidate, request, model)
                if not isinstance(prediction, Refusal):
                    found.append(_Priced(objective.score(request, prediction), tried, prediction))
    return found


def _worth_showing(priced: list[_Priced]) -> list[_Priced]:
    """Return the best candidates overall, and the best one for each type of device and size.

    The size is the number of ranks, rounded down to a power of two. Return at most one candidate for each combination
    of option (way to use a type of device) and number of nodes.
    """
    places: dict[tuple[int, int], _Priced] = {}
    for each in sorted(priced, key=lambda each: each.score):
        places.setdefault((id(each.candidate.part.option), each.candidate.part.nodes), each)
    ranked = list(places.values())
    sizes: dict[tuple[str, int], _Priced] = {}
    for each in ranked:
        sizes.setdefault((each.candidate.part.option.label, each.candidate.part.ranks.bit_length()), each)
    picked = {id(each): each for each in (*ranked[:KEPT_PER_STRATEGY], *list(sizes.values())[: 2 * KEPT_PER_STRATEGY])}
    return list(picked.values())
