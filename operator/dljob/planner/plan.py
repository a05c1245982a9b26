"""Entry point of the planner.

The planner divides the nodes into pools of equal devices and lists the options to use each pool. It searches the
combinations of options approximately, evaluates the most promising ones exactly, and explains the best one.
"""

from contextlib import suppress
from dataclasses import replace
from itertools import product

from dljob.cluster import ClusterView
from dljob.perf.resources.memory import STORE_CLIENT_NBYTES
from dljob.perf.workload.workload import in_precision
from dljob.planner import batch, data_parallel
from dljob.planner.allowed_nodes import allowed_nodes
from dljob.planner.candidates import precision, recomputation
from dljob.planner.candidates.cost.implausible import without_implausible
from dljob.planner.candidates.cost.interrupted import checkpoint_s
from dljob.planner.candidates.fixed import fixed_candidates, fixed_parts
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.data_parallel import Constants, Found, Made
from dljob.planner.explanation.contradictions import (
    nothing_requested,
    too_few_for_server,
    too_large_pods,
    too_low_limit,
    with_cause,
)
from dljob.planner.explanation.cores import more_cores
from dljob.planner.explanation.explain import (
    model_parallel_refusals,
    shown,
    slower,
    too_late,
    warning,
)
from dljob.planner.explanation.infeasible import nothing_fits, too_few, wrong_ranks
from dljob.planner.explanation.links import links_text
from dljob.planner.explanation.power_limits import power_limits
from dljob.planner.explanation.precision import precision_reason
from dljob.planner.explanation.recomputation import recomputation_reason
from dljob.planner.explanation.storage import prices
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
from dljob.planner.search.pareto import front
from dljob.planner.types import Choice, Decision, Infeasible, PowerLimit, Refusal, Request
from dljob.planner.unpredicted import plan_unpredicted

MAX_REFUSALS = 20


def plan(request: Request, view: ClusterView, learned: Constants) -> Decision | Infeasible:
    """Return the best plan for the request on this cluster, or the reason why no plan is possible.

    ``learned``: measured constants by (``request.key``, device). The catalogue replaces missing constants, and
    implausible ones. If the job's script was observed in an earlier run, its structure replaces a missing model. Pods
    of a training script request at least the memory that those of earlier runs were measured to need.
    """
    if (wrong := nothing_requested(request) or too_low_limit(request)) is not None:
        return wrong
    request = described(_with_measured_start(request, learned), learned)
    found = with_measured_memory(request, view, learned, lambda asked: _plan_once(asked, view, learned))
    if not request.refused_ranks and request.bound_ranks is None:
        return found
    any_number = replace(request, refused_ranks=frozenset(), bound_ranks=None)
    free = found if isinstance(found, Decision) else plan(any_number, view, learned)
    if isinstance(free, Infeasible):
        return found
    return wrong_ranks(request, free, busy=eligible(request, view).busy > 0) or found


def _with_measured_start(request: Request, learned: Constants) -> Request:
    """Return the request with the longest start that earlier runs of its model have shown on any type of device."""
    keys = request.keys
    starts_s = [known.start_s for (name, _), known in learned.items() if name in keys and known.start_s is not None]
    return replace(request, measured_start_s=max(starts_s, default=None))


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
    measured = (known.steps or known.split_steps for (name, _), known in learned.items() if name in keys)
    request = replace(request, cautious=any(measured))
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
    nodes = allowed_nodes(request, view)
    if isinstance(nodes, Infeasible):
        return nodes
    if (wrong := precision.no_device(request, nodes.pools)) is not None:
        return wrong
    found: list[Found] = []
    refusals: list[Refusal] = list(nodes.refusals)
    typed = [workload]
    cause: Infeasible | None = None
    if request.strategy in ("Pipeline", "Tensor"):
        groups = fixed_candidates(request, nodes, workload, learned) if request.fixed else []
        if isinstance(groups, Infeasible):
            return groups
        own = [part for parts in groups for part in parts]
        asked = model_split.candidates(request, nodes, workload, learned, own)
        if isinstance(asked, Infeasible):
            if asked.reason != "DoesNotFit":
                return asked
            cause = asked
            asked = [], list(asked.refusals)
        found, refusals = [([], choice) for choice in asked[0]], asked[1]
    elif request.strategy == "Sharded":
        asked = sharded.candidates(request, nodes, workload, learned)
        if isinstance(asked, Infeasible):
            return asked
        found, refusals = [([], choice) for choice in asked[0]], asked[1]
    elif request.fixed:
        typed = [in_precision(workload, each) for each in precision.of_groups(request, nodes.pools)]
        variants = [each for half in typed for each in recomputation.variants(request, half)]
        for each, strategy in product(variants, data_parallel.strategies(request)):
            groups = fixed_candidates(request, nodes, each, learned, strategy)
            if isinstance(groups, Infeasible):
                return groups
            found += data_parallel.with_best_cores(request, groups, each)
    else:
        if (short := too_few(request, nodes, view) or too_few_for_server(request, nodes)) is not None:
            return short
        found, refusals = data_parallel.candidates(request, nodes, workload, learned, made)
    if request.strategy == "Auto":
        whole = [replace(p, option=p.option.single or p.option) for p in found[0][0]] if request.fixed else []
        if whole and typed[0].precision != "FP32":  # model parallelism computes in float32
            again = fixed_parts(request, nodes, workload, learned)
            whole = [] if isinstance(again, Infeasible) else again
        split_up = model_split.search(
            request,
            nodes,
            workload,
            lambda pool, layout: data_parallel.options_of(pool, layout, workload, request, learned, made),
            whole,
        )
        found += [([], choice) for choice in split_up[0]]
        refusals += split_up[1]
    choices = [c for _, c in found if isinstance(c, Choice) and request.allows_ranks(objective.size(c))]
    refusals += [c for _, c in found if isinstance(c, Refusal)]
    kept = _without_worse_precisions(request, choices)
    chosen = objective.best(request, kept) if kept else None
    better = unsupported.search(
        request,
        nodes,
        workload,
        lambda pool, each, typed: data_parallel.options_of(pool, each, typed, request, learned, made),
        chosen,
    )
    if chosen is None:
        refusals += sharded.offered(request, nodes, workload, learned)
        wrong = cause or with_cause(request, workload, nodes, nothing_fits(request, nodes, tuple(refusals)))
        return replace(wrong, unsupported=better) if wrong.reason == "DoesNotFit" else wrong
    candidates = shown(request, chosen, kept)
    refusals += model_parallel_refusals(request, chosen, kept, candidates)
    refusals += too_late(request, chosen, candidates)
    refusals += slower(request, chosen, kept, candidates)
    measure = links = None
    advice: tuple[str | None, tuple[PowerLimit, ...]] = (None, ())
    if parts := next(parts for parts, c in found if c is chosen):
        used = recomputation.of_choice(workload, chosen)
        refusals += more_cores(
            request,
            chosen,
            parts,
            used,
            lambda pool, each: data_parallel.options_of(pool, each, used, request, learned, made),
        )
        refusals += strategy_search.others(request, chosen, parts, used)
        advice = power_limits(request, chosen, parts, used)
        links = links_text(parts)
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
        links=links,
        trade_offs=front(chosen, choices, objective.INDISTINCT),
        checkpoint_s=checkpoint_s(workload, in_store=request.checkpoints_in_store),
        precision_reason=precision_reason(request, chosen, choices),
        recomputation_reason=recomputation_reason(request, workload, chosen, choices),
        unsupported=better,
        data_text=prices(request, chosen, next(parts for parts, c in found if c is chosen)),
    )


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
