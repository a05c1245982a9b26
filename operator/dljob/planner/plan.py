"""Entry point of the planner.

The planner divides the nodes into pools of equal devices and lists the options to use each pool. It searches the
combinations of options approximately, evaluates the most promising ones exactly, and explains the best one.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from dljob.calibrate.learned import Learned
from dljob.cluster import ClusterView
from dljob.perf.resources.memory import STORE_CLIENT_NBYTES
from dljob.perf.step.input_data import Stored
from dljob.perf.workload.workload import Workload, in_precision
from dljob.planner import batch
from dljob.planner.candidates import precision, recomputation
from dljob.planner.candidates.accumulation import accumulated
from dljob.planner.candidates.collectives import HALVES, summing
from dljob.planner.candidates.cost.implausible import without_implausible
from dljob.planner.candidates.cost.interrupted import checkpoint_s
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.fixed import fixed_candidates, fixed_parts
from dljob.planner.candidates.node_layout import Layout, layouts
from dljob.planner.candidates.options import Option, options, sharing_options
from dljob.planner.candidates.pools import KINDS, Eligible, Pool, eligible
from dljob.planner.candidates.request_workload import stored_of, workload_of
from dljob.planner.candidates.shard_space import largest_share
from dljob.planner.explanation.contradictions import (
    nothing_requested,
    too_few_for_server,
    too_large_pods,
    too_low_limit,
    with_cause,
)
from dljob.planner.explanation.cores import more_cores
from dljob.planner.explanation.devices import mixed_devices, not_on_gpus, without_gpus
from dljob.planner.explanation.explain import (
    memory_refusals,
    model_parallel_refusals,
    shown,
    slower,
    warning,
)
from dljob.planner.explanation.infeasible import no_such_device, nothing_fits, script_failed, too_few
from dljob.planner.explanation.power_limits import power_limits
from dljob.planner.explanation.precision import precision_reason
from dljob.planner.explanation.recomputation import recomputation_reason
from dljob.planner.explanation.storage import prices, too_little_storage
from dljob.planner.explanation.volumes import too_few_for_volumes
from dljob.planner.measured_memory import with_measured_memory
from dljob.planner.observed import (
    described,
    is_finite,
    predicted,
    with_absurd_structure,
    with_assumed_memory,
    with_measured_step,
)
from dljob.planner.placement import in_best_domain
from dljob.planner.search import model_split, objective, probing, sharded, strategy_search, unsupported
from dljob.planner.search.enumeration import Search
from dljob.planner.search.pareto import front
from dljob.planner.search.screen import Screen
from dljob.planner.types import Choice, CollectiveName, Decision, Infeasible, PowerLimit, Refusal, Request, Strategy
from dljob.planner.unpredicted import plan_unpredicted

EVALUATED_ROWS = 10
"""Number of best candidates that the planner evaluates exactly after an approximate search. It also evaluates the best
candidate of as many different sets of device types."""
MAX_REFUSALS = 20

Constants = Mapping[tuple[str, str], Learned]
"""(Name of the measured model or training script, device type) → measured constants."""
Found = tuple[list[Part], Choice | Refusal]
Made = dict[tuple[str, bool, Layout, Stored | None, str, bool], list[Option]]


def plan(request: Request, view: ClusterView, learned: Constants) -> Decision | Infeasible:
    """Return the best plan for the request on this cluster, or the reason why no plan is possible.

    ``learned``: measured constants by (``request.key``, device). The catalogue replaces missing constants, and
    implausible ones. If the job's script was observed in an earlier run, its structure replaces a missing model. Pods
    of a training script request at least the memory that those of earlier runs were measured to need.
    """
    if (wrong := nothing_requested(request) or too_low_limit(request)) is not None:
        return wrong
    request = described(request, learned)
    found = with_measured_memory(request, view, learned, lambda asked: _plan_once(asked, view, learned))
    if not request.refused_ranks:
        return found
    free = found if isinstance(found, Decision) else plan(replace(request, refused_ranks=frozenset()), view, learned)
    if isinstance(free, Infeasible):
        return found
    return script_failed(request, free, busy=eligible(request, view).busy > 0) or found


def _plan_once(request: Request, view: ClusterView, learned: Constants) -> Decision | Infeasible:
    """Return the best plan without regard to the measured memory of earlier runs."""
    if request.structure is None:
        return _plan_stated(request, view, learned)
    with suppress(ArithmeticError, AssertionError, LookupError, ValueError):
        found = _plan_observed(request, view, learned)
        if isinstance(found, Infeasible) or is_finite(found.chosen.prediction):
            return found
    # The script itself reports its structure. Figures that no script can have must not keep its jobs from running.
    unknown = replace(request, structure=None, missing=("model", *request.missing))
    return with_absurd_structure(_plan_stated(unknown, view, learned))


def _plan_stated(request: Request, view: ClusterView, learned: Constants) -> Decision | Infeasible:
    """Return the best plan for a request without an observed structure."""
    decision = plan_unpredicted(request, view) if request.missing else _plan_described(request, view, learned)
    return replace(decision, missing=request.missing) if isinstance(decision, Decision) else decision


def _plan_observed(request: Request, view: ClusterView, learned: Constants) -> Decision | Infeasible:
    """Return the best plan for a request with an observed structure."""
    learned = with_measured_step(request, view, learned, _plan_described)
    found = None if request.missing else _plan_described(request, view, learned)
    if isinstance(found, Decision):
        return with_assumed_memory(request, found, view)
    # A wrong structure, which the script itself reports, must not keep its job from running.
    return predicted(request, view, plan_unpredicted(request, view), learned, _plan_described)


def _plan_described(request: Request, view: ClusterView, learned: Constants) -> Decision | Infeasible:
    """Return the best plan for a request whose times can be predicted, or the reason why no plan is possible."""
    learned = without_implausible(request, view, learned)
    keys = request.keys
    request = replace(request, cautious=any(name in keys and known.steps for (name, _), known in learned.items()))
    return in_best_domain(request, view, lambda asked, part: _plan_in(asked, part, learned))


def _plan_in(request: Request, view: ClusterView, learned: Constants) -> Decision | Infeasible:
    """Return the best plan in the request's domain. ``view``: the nodes of this domain."""
    if request.batches is not None:
        made: Made = {}
        return batch.choose(request, request.batches, learned, lambda asked: _plan(asked, view, learned, made))
    return _plan(request, view, learned, {})


def _plan(request: Request, view: ClusterView, learned: Constants, made: Made) -> Decision | Infeasible:
    """Return the best plan with the request's only global batch size, or the reason why no plan is possible.

    ``view``: the nodes that the plan may use. ``made``: cache of options (ways to use a type of device), which all
    batch sizes of the request share.
    """
    try:
        workload = workload_of(request)
        if request.checkpoints_in_store:
            workload = replace(workload, beside_ranks_nbytes=STORE_CLIENT_NBYTES)
    except ValueError as error:
        return Infeasible("BadWorkload", "spec.model", str(error))
    if (wrong := recomputation.impossible(request, workload)) is not None:
        return wrong
    learned = recomputation.with_estimates(request, workload, learned)
    if (wrong := too_large_pods(request, view)) is not None:
        return wrong
    if (wrong := not_on_gpus(request, view) or no_such_device(request, view)) is not None:
        return wrong
    if (wrong := too_few_for_volumes(request, view) or too_little_storage(request, view)) is not None:
        return wrong
    everything = eligible(request, view)
    if (wrong := mixed_devices(request, everything)) is not None:
        return wrong
    nodes = without_gpus(request, everything)
    if isinstance(nodes, Infeasible):
        return nodes
    if (wrong := precision.no_device(request, nodes.pools)) is not None:
        return wrong
    found: list[Found] = []
    refusals: list[Refusal] = list(nodes.refusals)
    typed = [workload]
    if request.strategy in ("Pipeline", "Tensor"):
        groups = fixed_candidates(request, nodes, workload, learned) if request.fixed else []
        if isinstance(groups, Infeasible):
            return groups
        own = [part for parts in groups for part in parts]
        asked = model_split.candidates(request, nodes, workload, learned, own)
        if isinstance(asked, Infeasible):
            return asked
        found, refusals = [([], choice) for choice in asked[0]], asked[1]
    elif request.strategy == "Sharded":
        fixed = fixed_parts(request, nodes, workload, learned) if request.fixed else []
        asked = fixed if isinstance(fixed, Infeasible) else sharded.candidates(request, nodes, workload, learned, fixed)
        if isinstance(asked, Infeasible):
            return asked
        found, refusals = [([], choice) for choice in asked[0]], asked[1]
    elif request.fixed:
        typed = [in_precision(workload, each) for each in precision.of_groups(request, nodes.pools)]
        variants = [each for half in typed for each in recomputation.variants(request, half)]
        for each, strategy in product(variants, strategies(request)):
            groups = fixed_candidates(request, nodes, each, learned, strategy)
            if isinstance(groups, Infeasible):
                return groups
            found += _with_best_cores(request, groups, each)
    else:
        if (short := too_few(request, nodes, view) or too_few_for_server(request, nodes)) is not None:
            return short
        found, refusals = _candidates(request, nodes, workload, learned, made)
    if request.strategy == "Auto":
        whole = [replace(p, option=p.option.single or p.option) for p in found[0][0]] if request.fixed else []
        if whole and typed[0].precision != "FP32":  # model parallelism computes in float32
            again = fixed_parts(request, nodes, workload, learned)
            whole = [] if isinstance(again, Infeasible) else again
        split_up = model_split.search(
            request,
            nodes,
            workload,
            lambda pool, layout: _options(pool, layout, workload, request, learned, made),
            whole,
        )
        found += [([], choice) for choice in split_up[0]]
        refusals += split_up[1]
    choices = [c for _, c in found if isinstance(c, Choice)]
    refusals += [c for _, c in found if isinstance(c, Refusal)]
    kept = _without_worse_precisions(request, choices)
    chosen = objective.best(request, kept) if kept else None
    better = unsupported.search(
        request, nodes, workload, lambda pool, each, typed: _options(pool, each, typed, request, learned, made), chosen
    )
    if chosen is None:
        refusals += sharded.offered(request, nodes, workload, learned)
        wrong = with_cause(request, workload, nodes, nothing_fits(request, tuple(refusals)))
        return replace(wrong, unsupported=better) if wrong.reason == "DoesNotFit" else wrong
    candidates = shown(request, chosen, kept)
    refusals += model_parallel_refusals(request, chosen, kept, candidates)
    refusals += slower(request, chosen, kept, candidates)
    measure = None
    advice: tuple[str | None, tuple[PowerLimit, ...]] = (None, ())
    if parts := next(parts for parts, c in found if c is chosen):
        used = recomputation.of_choice(workload, chosen)
        refusals += more_cores(
            request, chosen, parts, used, lambda pool, each: _options(pool, each, used, request, learned, made)
        )
        refusals += strategy_search.others(request, chosen, parts, used)
        advice = power_limits(request, chosen, parts, used)
        option = parts[0].option.single or parts[0].option
        measure = None if request.fixed or option.micro_batches > 1 else probing.suggested(request, option, used)
    unique = tuple(dict.fromkeys(refusals))
    return Decision(
        chosen,
        candidates,
        unique[:MAX_REFUSALS],
        warning(request, chosen, nodes, learned),
        measure,
        power_advice=advice[0],
        power_limits=advice[1],
        trade_offs=front(chosen, choices, objective.INDISTINCT),
        checkpoint_s=checkpoint_s(workload, in_store=request.checkpoints_in_store),
        precision_reason=precision_reason(request, chosen, choices),
        recomputation_reason=recomputation_reason(request, workload, chosen, choices),
        unsupported=better,
        data_text=prices(request, chosen, next(parts for parts, c in found if c is chosen)),
    )


def strategies(request: Request) -> tuple[Strategy, ...]:
    """Return the data-parallel strategies to consider: Data, or Optimizer (with a sharded optimizer), or both.

    If the user requests Optimizer, return only Optimizer. If the user requests Auto, return both, unless the user fixes
    a collective that cannot be used with a sharded optimizer. Otherwise, return only Data.
    """
    if request.strategy == "Auto":
        return ("Data", "Optimizer") if request.collective in (None, *HALVES) else ("Data",)
    return ("Optimizer",) if request.strategy == "Optimizer" else ("Data",)


def collectives(request: Request, parts: Sequence[Part]) -> tuple[CollectiveName, ...]:
    """Return the all-reduce algorithms to consider for a plan: the user's choice, or all that are useful for its ranks.

    ``parts``: the groups of nodes of the plan, with their ranks.
    """
    if request.collective:
        return (request.collective,)
    names, ranks = summing(parts[0].option), sum(p.ranks for p in parts)
    if ranks == 1:
        return names[:1]  # one rank has no gradients to reduce, so any name will do
    if ranks == 2:  # one worker needs no server, and halving-doubling between two ranks is a ring
        return tuple(n for n in names if n not in ("ParameterServer", "HalvingDoubling"))
    return names


def _candidates(
    request: Request, nodes: Eligible, workload: Workload, learned: Constants, made: Made
) -> tuple[list[Found], list[Refusal]]:
    """Return the most promising data-parallel candidates, evaluated exactly, and the rejected devices with reasons.

    ``nodes``: the nodes that the job may use. ``made``: cache of options (ways to use a type of device). A job never
    mixes GPUs and CPUs, or GPUs of two vendors (``Pool.kind``).
    """
    found: list[Found] = []
    refusals = [*nodes.refusals, *precision.refusals(request, nodes.pools)]
    searches = [
        (able, typed, strategy, typed is variants[-1] and strategy == strategies(request)[-1])
        for kind in KINDS
        for each, able in precision.searched(request, [pool for pool in nodes.pools if pool.kind == kind], learned)
        for variants in [recomputation.variants(request, in_precision(workload, each))]
        for typed, strategy in product(variants, strategies(request))
    ]
    smallest: list[tuple[list[Option], Workload]] = []
    for pools, typed, strategy, needs_least in searches:
        is_gpu = any(pool.is_gpu for pool in pools)
        most = sum(sum(pool.free) if is_gpu else pool.nodes * layouts(pool, request)[-1].ranks for pool in pools)
        ways = [
            _accumulated(option, request)
            for pool in pools
            for g in layouts(pool, request)
            for option in (
                sharing_options(pool, g, typed, request, learned, most)
                if strategy == "Optimizer"
                else _options(pool, g, typed, request, learned, made)
            )
        ]
        if needs_least:  # of memory
            smallest.append((ways, typed))
        ways = [o for o in ways if largest_share(o, request.global_batch, request.storage) >= 1]
        if not ways:
            continue
        search = Search(ways, request, Screen(ways, request, typed))
        search.run()
        rows = search.best(EVALUATED_ROWS, objective.INDISTINCT)
        for i, (row, best) in enumerate(zip(rows, search.collectives_of(rows), strict=True)):
            parts = ordered([Part(option, int(n)) for option, n in zip(ways, row, strict=True) if n])
            # On the best row, evaluate all collectives to show how they compare. On the others, evaluate the best one.
            names = collectives(request, parts) if i == 0 else (best,)
            tried = [(parts, evaluate(parts, name, request, typed)) for name in names]
            found += tried
    return found, refusals + memory_refusals(smallest, request)


def _with_best_cores(request: Request, groups: Sequence[list[Part]], workload: Workload) -> list[Found]:
    """Return the plans with groups that the user fixes, with the numbers of cores for which the best of them is best.

    They differ in the collective. ``groups``: the same groups with different numbers of cores, the most first. If none
    fits into memory, return those with the fewest cores, which need the least.
    """
    tried: list[list[Found]] = []
    for each in groups:
        parts = [replace(part, option=_accumulated(part.option, request)) for part in each]
        tried.append([(parts, evaluate(parts, name, request, workload)) for name in collectives(request, parts)])
    choices = [choice for found in tried for _, choice in found if isinstance(choice, Choice)]
    if not choices:
        return tried[-1]
    best = objective.best(request, choices)
    return next(found for found in tried if any(choice is best for _, choice in found))


def _without_worse_precisions(request: Request, choices: list[Choice]) -> list[Choice]:
    """Return the plans that are in the preferred precision of their devices, and others that beat the best of these.

    Model-parallel plans are always in float32, and not compared. If the user requests a precision, return all plans.
    """
    if request.precision is not None:
        return choices
    usual = [c.splits_model or c.precision == precision.preferred(request, c) for c in choices]
    whole = [c for c, is_usual in zip(choices, usual, strict=True) if is_usual and not c.splits_model]
    if not whole:
        return choices
    bar = objective.score(request, objective.best(request, whole).prediction)
    better = [objective.score(request, choice.prediction) < bar for choice in choices]
    return [choice for choice, *reasons in zip(choices, usual, better, strict=True) if any(reasons)]


def _accumulated(option: Option, request: Request) -> Option:
    asked = None if request.chooses_micro_batches else min(request.micro_batches, request.global_batch)
    return accumulated(option, asked, request.global_batch)


def _options(
    pool: Pool, layout: Layout, workload: Workload, request: Request, learned: Constants, made: Made
) -> list[Option]:
    """Return the options to use a pool with a layout of ranks and cores, from the cache ``made`` if possible.

    Options depend on the global batch size only through the data that the job reads from disk.
    """
    key = (pool.device, pool.is_gpu, layout, stored_of(request), workload.precision, workload.recomputes)
    if key not in made:
        made[key] = options(pool, layout, workload, request, learned)
    return made[key]


def ordered(parts: Sequence[Part]) -> list[Part]:
    """Return the parts (groups of nodes of a plan) with the fastest ranks first, so that rank 0 is on a fast node."""
    return sorted(parts, key=lambda p: (p.option.curve.slope_s, p.option.label))
