"""The planner's entry: pools → options → search → exact candidates → the best one, and why not the others."""

from collections.abc import Mapping, Sequence
from math import ceil

from dljob.cluster import ClusterView
from dljob.perf import memory
from dljob.perf.workload import Workload
from dljob.planner import objective
from dljob.planner.context import AUTO, Option, options, ranks_per_node_choices, workload_of
from dljob.planner.evaluate import Part, evaluate
from dljob.planner.fixed import fixed_parts
from dljob.planner.names import duration, gibibytes, joules, samples
from dljob.planner.pools import Eligible, eligible, wanted
from dljob.planner.screen import Screen
from dljob.planner.search import Search
from dljob.planner.types import Choice, CollectiveName, Decision, Infeasible, Learned, Refusal, Request

LOOKED_AT = 10
"""Rows of a search that are evaluated exactly: so many best ones, and so many best of their kind."""
MOST_REFUSALS = 20
DIFFERENT = 0.15
"""Candidates shown differ in their devices, or by this part in their number of ranks."""

Constants = Mapping[tuple[str, str], Learned]
"""Learned constants by (model or program, device)."""


def plan(request: Request, view: ClusterView, learned: Constants) -> Decision | Infeasible:
    """The best plan for the request on this cluster, or why there is none.

    ``learned``: measured constants by (``request.profile``, device); what is missing comes from the catalogue.
    """
    try:
        workload = workload_of(request)
    except ValueError as error:
        return Infeasible("BadWorkload", "spec.model", str(error))
    if (wrong := _no_such_device(request, view)) is not None:
        return wrong
    nodes = eligible(request, view)
    if request.fixed:
        parts = fixed_parts(request, nodes, workload, learned)
        if isinstance(parts, Infeasible):
            return parts
        found = [evaluate(parts, name, request, workload) for name in collectives(request, parts)]
        refusals: list[Refusal] = list(nodes.refusals)
    else:
        if (short := _too_few(request, nodes)) is not None:
            return short
        found, refusals = _candidates(request, nodes, workload, learned)
    choices = [c for c in found if isinstance(c, Choice)]
    refusals += [c for c in found if isinstance(c, Refusal)]
    if not choices:
        return _nothing_fits(request, tuple(refusals))
    chosen = objective.best(request, choices)
    shown = _shown(request, chosen, choices)
    refusals += _slower(request, chosen, choices, shown)
    unique = tuple(dict.fromkeys(refusals))
    return Decision(chosen, shown, unique[:MOST_REFUSALS], _warning(request, chosen, nodes))


def collectives(request: Request, parts: Sequence[Part]) -> tuple[CollectiveName, ...]:
    """What may sum the gradients of these parts: the user's choice, or those worth comparing."""
    if request.collective:
        return (request.collective,)
    names, ranks = AUTO[all(p.option.pool.is_gpu for p in parts)], sum(p.ranks for p in parts)
    if ranks == 1:
        return names[:1]  # nothing to sum
    return names if ranks > 2 else tuple(n for n in names if n != "ParameterServer")  # one worker needs no server


def _candidates(
    request: Request, nodes: Eligible, workload: Workload, learned: Constants
) -> tuple[list[Choice | Refusal], list[Refusal]]:
    """Candidates worth a look, exactly, and what was ruled out. GPUs and CPUs never share a job: NCCL spans neither."""
    found: list[Choice | Refusal] = []
    refusals = list(nodes.refusals)
    for is_gpu in (True, False):
        ways = [
            option
            for pool in nodes.pools
            if pool.is_gpu == is_gpu
            for g in ranks_per_node_choices(pool)
            for option in options(pool, g, workload, request, learned)
        ]
        refusals += _memory_refusals(ways, request, workload)
        ways = [o for o in ways if o.largest_batch >= 1]
        if not ways:
            continue
        search = Search(ways, request, Screen(ways, request, workload))
        search.run()
        for i, row in enumerate(search.best(LOOKED_AT, objective.INDISTINCT)):
            parts = ordered([Part(option, int(n)) for option, n in zip(ways, row, strict=True) if n])
            # All collectives are tried on the best row, to tell how they compare; elsewhere the screen's best one is.
            names = collectives(request, parts) if i == 0 else (search.collective_of(row),)
            found += [evaluate(parts, name, request, workload) for name in names]
    return found, refusals


def ordered(parts: Sequence[Part]) -> list[Part]:
    """Fastest ranks first, so that rank 0 is on a fast node."""
    return sorted(parts, key=lambda p: (p.option.curve.slope_s, p.option.label))


def _no_such_device(request: Request, view: ClusterView) -> Infeasible | None:
    present = ", ".join(view.device_types) or "no nodes at all"
    field, names = (
        ("spec.planning.groups", [f.device for f in request.fixed])
        if request.fixed
        else ("spec.devices", list(request.devices))
    )
    missing = [name for name in names if not any(wanted(device, [name]) for device in view.device_types)]
    if names and ((request.fixed and missing) or len(missing) == len(names)):
        return Infeasible(
            "NoSuchDevice",
            field,
            f"found {', '.join(missing)}, but the cluster has {present}: correct the name, or add such nodes",
            transient=True,
        )
    return None


def _too_few(request: Request, nodes: Eligible) -> Infeasible | None:
    available = sum(pool.nodes for pool in nodes.pools)
    reasons = "; ".join(f"{r.summary}: {r.reason}" for r in nodes.refusals[:5])
    if request.global_batch < request.nodes_min:
        return Infeasible(
            "BatchTooSmall",
            "spec.globalBatchSize",
            f"found {request.global_batch} samples, expected at least one for each of nodes.min = {request.nodes_min} "
            "nodes: raise globalBatchSize or lower nodes.min",
        )
    needed = max(1, request.nodes_min)
    if available >= needed:
        return None
    busy = available + nodes.busy >= needed
    return Infeasible(
        "DeviceBusy" if busy else "TooFewNodes",
        "spec.nodes.min",
        f"found {available} nodes that the job can use, expected at least {needed}: "
        + (
            "wait until others are free, or lower nodes.min"
            if busy
            else "add nodes, lower nodes.min or allow more devices"
        )
        + (f" ({reasons})" if reasons else ""),
        transient=True,
        refusals=nodes.refusals,
    )


def _memory_refusals(ways: list[Option], request: Request, workload: Workload) -> list[Refusal]:
    """A line for each device of which so many do not hold the batch: 'up to 3 x t4: does not fit: 21 GiB of 16'."""
    lines = []
    for label in dict.fromkeys(option.label for option in ways):
        option = max((o for o in ways if o.label == label), key=lambda o: o.largest_batch)
        ranks = max(o.nodes * o.ranks_per_node for o in ways if o.label == label)
        fewest = ceil(request.global_batch / option.largest_batch) if option.largest_batch else ranks + 1
        if fewest <= max(1, request.nodes_min):
            continue
        most = min(fewest - 1, ranks)
        share = ceil(request.global_batch / most) if option.largest_batch else 1
        needed = memory.rank_nbytes(workload, share, option.pool.is_gpu)
        lines.append(
            Refusal(
                f"{'up to ' if most > 1 else ''}{most} x {label}",
                f"does not fit: {samples(share)} a rank need {gibibytes(needed)} of {gibibytes(option.memory_nbytes)}",
            )
        )
    return lines


def _nothing_fits(request: Request, refusals: tuple[Refusal, ...]) -> Infeasible:
    memory_lines = [r for r in refusals if "does not fit" in r.reason]
    lines = "; ".join(f"{r.summary}: {r.reason}" for r in (memory_lines or refusals)[:4])
    if not memory_lines:
        return Infeasible(
            "TooFewNodes",
            "spec.nodes",
            f"no combination of nodes has between {request.nodes_min} and {request.nodes_max or 'any number of'} nodes "
            f"of one kind (GPUs or CPUs) and at most {request.global_batch} ranks: change nodes or devices ({lines})",
            transient=True,
            refusals=refusals,
        )
    return Infeasible(
        "DoesNotFit",
        "spec.globalBatchSize",
        f"a step of {request.global_batch} samples fits on no allowed set of nodes: lower globalBatchSize, allow more "
        f"nodes or devices with more memory ({lines})",
        refusals=refusals,
    )


def _kind(choice: Choice) -> tuple[str, ...]:
    return tuple(sorted(g.device for g in choice.groups))


def _shown(request: Request, chosen: Choice, choices: list[Choice]) -> tuple[Choice, ...]:
    """The chosen one, then the best ones that are different, then the next best, up to the number asked for."""
    ranked = sorted(choices, key=lambda c: objective.score(request, c.prediction))
    shown = [chosen]
    for choice in ranked:
        ranks = objective.size(choice)
        alike = (
            abs(ranks - objective.size(c)) <= DIFFERENT * objective.size(c) and _kind(choice) == _kind(c) for c in shown
        )
        if len(shown) < request.candidates_kept and not any(alike):
            shown.append(choice)
    for choice in ranked:
        if len(shown) < request.candidates_kept and choice not in shown:
            shown.append(choice)
    return (chosen, *sorted(shown[1:], key=lambda c: objective.score(request, c.prediction)))


def _slower(request: Request, chosen: Choice, choices: list[Choice], shown: tuple[Choice, ...]) -> list[Refusal]:
    """A line for each kind of candidate that lost without being shown: other devices, other collectives."""
    lines: dict[tuple[object, ...], Refusal] = {}
    told = {(_kind(c), c.collective) for c in shown}
    for choice in sorted(choices, key=lambda c: objective.score(request, c.prediction)):
        kind = (_kind(choice), choice.collective)
        if kind in told or kind in lines:
            continue
        p, q = choice.prediction, chosen.prediction
        what = {
            "Time": f"slower: {duration(p.step_s)} a step against {duration(q.step_s)}",
            "Energy": f"more energy: {joules(p.energy_J or 0)} against {joules(q.energy_J or 0)}",
            "Cost": f"dearer: ${p.cost_usd or 0:.3g} against ${q.cost_usd or 0:.3g}",
        }[request.minimize]
        if not objective.meets(request, p.total_p90_s) and objective.meets(request, q.total_p90_s):
            what = f"misses the deadline: {duration(p.total_p90_s)} (p90)"
        lines[kind] = Refusal(choice.summary, f"{what}; {p.bottleneck}")
    return list(lines.values())


def _warning(request: Request, chosen: Choice, nodes: Eligible) -> str | None:
    warnings = []
    p90_s = chosen.prediction.total_p90_s + objective.STARTUP_S
    if request.deadline_s is not None and not objective.meets(request, chosen.prediction.total_p90_s):
        warnings.append(
            f"no plan meets the deadline of {duration(request.deadline_s)}: the fastest one takes "
            f"{duration(chosen.prediction.total_s)}, with start-up and at the 90th percentile {duration(p90_s)}, "
            f"{duration(p90_s - request.deadline_s)} too long"
        )
    for pool in nodes.pools:
        if any(g.device == pool.device for g in chosen.groups):
            if pool.unequal:
                warnings.append(
                    f"nodes of device {pool.device} have unlike CPUs: planned as the weakest, {pool.cpu:.3g} CPUs; "
                    "label kinds of nodes with dljob.dev/device to use each at its speed"
                )
            if pool.assumed:
                warnings.append(
                    f"device {pool.device} is not in the catalogue: predicted as a T4 until a run has measured it"
                )
    return "; ".join(warnings) or None
