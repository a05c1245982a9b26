"""Explanations of the chosen plan: other candidates, reasons for rejecting candidates, and warnings."""

from collections.abc import Mapping, Sequence
from math import ceil

from dljob.calibrate.learned import Learned, hardware_of
from dljob.cluster import catalogue
from dljob.perf.resources import memory
from dljob.perf.step import model_split
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.accumulation import room
from dljob.planner.candidates.options import Option
from dljob.planner.candidates.pools import Eligible
from dljob.planner.candidates.shard_space import too_large
from dljob.planner.explanation.contradictions import contradiction_warnings
from dljob.planner.search import objective
from dljob.planner.types import Choice, Refusal, Request
from dljob.planner.types.request import PRECISIONS
from dljob.planner.types.texts import duration, duration_at_least, grams, joules, of_which, plain, samples, step_times

MAX_RATIO = 100.0
"""Largest ratio of a plan's time to the time until the deadline that texts state. Texts call larger ones 'more than'
this number, because hardly any time is left then."""
DIFFERENT = 0.15
"""Maximum relative difference in the number of GPUs and CPU nodes at which two candidates are similar.

Similar candidates also have the same strategy and types of devices. ``shown`` prefers candidates that are not."""


def memory_refusals(searches: Sequence[tuple[list[Option], Workload]], request: Request) -> list[Refusal]:
    """Return a ``Refusal`` for each type of device that needs more than ``nodes.min`` ranks to hold the global batch.

    The batch must fit into the memory of these ranks together. The summary of the ``Refusal`` is the largest number of
    ranks whose memory is too small, such as 'up to 3 x t4'. ``searches``: for each precision that was searched, the
    options (ways to use the nodes of one type of device) that candidates consist of, and the workload in it. The
    precision that needs the fewest ranks counts.
    """
    lines = []
    for label in dict.fromkeys(option.label for ways, _ in searches for option in ways):
        found = []
        for ways, workload in searches:
            own = [o for o in ways if o.label == label]
            if own:
                option = max(own, key=lambda o: (o.min_ranks == 1, o.memory_nbytes, o.host_nbytes / o.ranks_per_node))
                ranks = max(o.nodes * o.ranks_per_node for o in own)
                found.append((_fewest(option, request, workload, ranks), ranks, option, workload, own))
        fewest, ranks, option, workload, own = min(found, key=lambda each: each[0])
        if fewest <= max(1, request.nodes_min):
            lines += _too_many_on_a_node(own, workload)
            continue
        most = min(fewest - 1, ranks)
        share = 1 if option.single else ceil(request.global_batch / most / option.micro_batches)
        why = too_large(_held(option, workload, most), share, option, f"{samples(share)} per rank")
        lines.append(Refusal(f"{'up to ' if most > 1 else ''}{most} x {label}", why))
    return lines


def _too_many_on_a_node(ways: list[Option], workload: Workload) -> list[Refusal]:
    """Return at most one ``Refusal``: the smallest number of GPUs of a node for whose ranks it lacks main memory."""
    found = [o for o in ways if o.largest_batch < 1 <= o.memory_nbytes - o.needed_nbytes(workload, 1)]
    if not found:
        return []
    option = min(found, key=lambda o: (o.ranks_per_node, o.nodes))
    where = f"{option.ranks_per_node} x {option.label} on {'each of ' if option.nodes > 1 else ''}{option.nodes} node"
    why = too_large(workload, 1, option, "1 sample per rank")
    return [Refusal(f"{where}{'s' if option.nodes > 1 else ''}", why)]


def _held(option: Option, workload: Workload, ranks: int) -> Workload:
    return memory.sharded(workload, ranks) if option.strategy == "Optimizer" else workload


def _fewest(option: Option, request: Request, workload: Workload, ranks: int) -> int:
    """Return the minimum number of ranks on the option's type of device whose memory together holds the global batch.

    ``ranks``: maximum number of ranks. Let n be min(``ranks``, global batch size). Return n + 1 if n ranks cannot hold
    the batch.
    """
    low, high = 1, min(ranks, request.global_batch) + 1
    while low < high:
        middle = (low + high) // 2
        held = _held(option, workload, middle)
        largest = option.largest_of(held)
        if middle * room(option, largest, request.global_batch) >= request.global_batch:
            high = middle
        else:
            low = middle + 1
    return low


def _kind(choice: Choice) -> tuple[str, ...]:
    return (choice.strategy, *["recomputes"] * choice.recomputes, *sorted(g.device for g in choice.groups))


def _extent(choice: Choice) -> int:
    """Return the number of GPUs of a plan plus the number of its CPU nodes."""
    return sum(len(g.shares) if g.is_gpu else g.nodes for g in choice.groups)


def shown(request: Request, chosen: Choice, choices: list[Choice]) -> tuple[Choice, ...]:
    """Return the candidates to show to the user: the chosen one and the best others.

    Return at most ``request.candidates_kept`` candidates. Prefer candidates that differ in devices, strategy or number
    of GPUs and CPU nodes.
    """
    ranked = sorted(choices, key=lambda c: objective.score(request, c.prediction))
    shown = [chosen]
    extents = {_kind(chosen): [_extent(chosen)]}
    for choice in ranked:
        extent, similar = _extent(choice), extents.setdefault(_kind(choice), [])
        if len(shown) < request.candidates_kept and not any(abs(extent - e) <= DIFFERENT * e for e in similar):
            shown.append(choice)
            similar.append(extent)
    for choice in ranked:
        if len(shown) < request.candidates_kept and choice not in shown:
            shown.append(choice)
    return (chosen, *sorted(shown[1:], key=lambda c: objective.score(request, c.prediction)))


def slower(request: Request, chosen: Choice, choices: list[Choice], shown: tuple[Choice, ...]) -> list[Refusal]:
    """Return the best candidate of each combination of devices, strategy and collective that ``shown`` lacks.

    Return each as a ``Refusal``, with the reason why it is worse than the chosen candidate. Skip model-parallel
    candidates if the chosen one is data-parallel: ``model_parallel_refusals`` returns these.
    """
    lines: dict[tuple[object, ...], Refusal] = {}
    shown_kinds = {(_kind(c), c.collective) for c in shown}
    for choice in sorted(choices, key=lambda c: objective.score(request, c.prediction)):
        kind = (_kind(choice), choice.collective)
        if kind in shown_kinds or kind in lines or (choice.splits_model and not chosen.splits_model):
            continue
        lines[kind] = Refusal(choice.summary, f"{worse(request, choice, chosen)}; {choice.prediction.bottleneck}")
    return list(lines.values())


def too_late(request: Request, chosen: Choice, shown: tuple[Choice, ...]) -> list[Refusal]:
    """Return the candidates in ``shown`` that are not chosen only because they may miss the deadline, with this reason.

    They need less energy, cost or carbon than the chosen plan, which meets the deadline.
    """
    if not objective.meets(request, chosen.prediction.total_p90_s):
        return []
    bar = objective.wanted(request, chosen.prediction)
    return [
        Refusal(choice.summary, worse(request, choice, chosen))
        for choice in shown
        if not objective.meets(request, choice.prediction.total_p90_s)
        and objective.wanted(request, choice.prediction) < bar
    ]


def worse(request: Request, choice: Choice, chosen: Choice) -> str:
    """Return a text with the reason why ``choice`` is worse than ``chosen`` under the request's objective.

    A plan with a better score than ``chosen`` saves too little for its devices, its time or its recomputation
    (``objective.best``).
    """
    p, q = choice.prediction, chosen.prediction
    meets_it = objective.meets(request, q.total_p90_s)
    if not objective.meets(request, p.total_p90_s) and meets_it:
        return f"misses the deadline: {_lateness(request, p.total_p90_s)}"
    kind: str = "P90" if request.minimize == "Time" and objective.by_p90(request) else request.minimize
    if request.minimize != "Time" and not meets_it:
        kind = "Late"
    more, saved, values = {
        "Time": ("slower", "time", step_times((p.step_s, q.step_s), (p.total_s, q.total_s))),
        "P90": ("slower", "time", f"{step_times((p.step_p90_s, q.step_p90_s), (p.total_p90_s, q.total_p90_s))} (p90)"),
        "Late": ("later", "time", f"{duration(p.total_p90_s)} (p90) instead of {duration(q.total_p90_s)}"),
        "Energy": ("more energy", "energy", f"{joules(p.energy_J or 0)} instead of {joules(q.energy_J or 0)}"),
        "Cost": ("more expensive", "money", f"${plain(p.cost_usd or 0)} instead of ${plain(q.cost_usd or 0)}"),
        "Carbon": ("more carbon", "carbon", f"{grams(p.carbon_g or 0)} of CO2 instead of {grams(q.carbon_g or 0)}"),
    }[kind]
    if objective.score(request, p) >= objective.score(request, q):
        return f"{more}: {values}"
    return f"saves too little {saved}: {values}{_effort(choice, chosen)}"


def _effort(choice: Choice, chosen: Choice) -> str:
    """Return what ``choice`` takes more of than ``chosen``: devices, time or forward passes; or ''."""
    more, fewer = objective.devices(choice), objective.devices(chosen)
    if more > fewer:
        return f", with {more:.3g} CPUs or GPUs instead of {fewer:.3g}"
    if choice.recomputes and not chosen.recomputes:
        return ", with activation checkpointing"
    p, q = choice.prediction, chosen.prediction
    return f", in {duration(p.total_s)} instead of {duration(q.total_s)}" if p.total_s > q.total_s else ""


def model_parallel_refusals(
    request: Request, chosen: Choice, choices: list[Choice], shown: tuple[Choice, ...]
) -> list[Refusal]:
    """Return the best pipeline and the best tensor-parallel candidate, each with the reason why it was not chosen.

    Return an empty list if the chosen plan is itself model-parallel. Skip a candidate that ``shown`` contains and whose
    score is not better than that of the chosen plan. A candidate with a better score was not chosen because its
    prediction is too uncertain (``objective.surely_better``). Example of a summary and a reason: '3 x cpu, Pipeline of
    3 stages, 12 micro-batches' and '18 % slower: 9.4ms per step instead of 8ms; ...'.
    """
    if chosen.in_parts:
        return []
    lines = []
    for strategy in ("Pipeline", "Tensor"):
        found = [choice for choice in choices if choice.strategy == strategy]
        if not found:
            continue
        best = min(found, key=lambda choice: objective.score(request, choice.prediction))
        p, q = (objective.score(request, c.prediction) for c in (best, chosen))
        if p >= q and best in shown:
            continue
        if p < q:
            p90_s, step_s = best.prediction.step_p90_s, chosen.prediction.step_s
            why = (
                f"predicted {100 * (1 - p / q):.0f} % better, which is within the uncertainty of the prediction: "
                f"{duration(p90_s)} per step (p90), but {duration(step_s)} (median) with the chosen plan"
            )
        else:
            part = f"{100 * (p / q - 1):.0f} % " if p < 10 * q else ""
            why = f"{part}{worse(request, best, chosen)}"
        lines.append(Refusal(best.summary, f"{why}; {best.prediction.bottleneck}"))
    return lines


def warning(
    request: Request, chosen: Choice, nodes: Eligible, learned: Mapping[tuple[str, str], Learned]
) -> str | None:
    """Return a text with what users should know about the plan ``chosen``; None if there is nothing to warn about.

    ``learned``: measured constants by (model or training script, device).
    """
    warnings = contradiction_warnings(request, chosen)
    if not objective.meets(request, chosen.prediction.total_p90_s):
        warnings.append(_missed(request, chosen))
    stated = request.pairs is not None and chosen.strategy == "Tensor"
    if chosen.splits_model and request.parameters is not None and not stated:
        warnings.append(_assumed_layers(chosen))
    warnings += _doubts(request, nodes, learned)
    if chosen.prediction.doubt is not None:
        of = request.key(chosen.precision, chosen.recomputes), chosen.groups[0].device, chosen.prediction.doubt
        warnings.append(_not_used(*of) if request.model is not None else _unexplained(*of))
    for pool in nodes.pools:
        if group := next((g for g in chosen.groups if g.device == pool.device), None):
            if pool.unequal and group.ranks_per_node * group.cores <= pool.cpu:
                warnings.append(
                    f"nodes of device {pool.device} have different numbers of CPUs: the plan assumes the smallest, "
                    f"{pool.cpu:.3g} CPUs; label each type of node with dljob.dev/device to plan it at its own speed"
                )
            if pool.assumed and hardware_of(pool.device, learned) is None:
                what = (
                    "is a part of a GPU: the plan assumes its part of the whole GPU's speed"
                    if catalogue.is_part(pool.device)
                    else "is not in the catalogue: the plan assumes a T4"
                )
                warnings.append(f"device {pool.device} {what} until a run has measured it")
    return "; ".join(warnings) or None


def _assumed_layers(chosen: Choice) -> str:
    """Return the warning that the plan of a split model rests on assumptions about its layers."""
    part, units = model_split.HINTED_PAIRS, model_split.HINTED_UNITS
    assumed = (
        f"{part:.0%} of the model in pairs of linear layers with {units} units each"
        if chosen.strategy == "Tensor"
        else "that the stages have equal parts of the parameters, operations and activations"
    )
    return (
        f"spec.model.hints has no layers: the plan assumes {assumed}. If memory is short, set resources.memory, "
        f"{'model.hints.pairs as python -m dltrain.profile prints it, ' * (chosen.strategy == 'Tensor')}or "
        "model.hints.like for a model whose layers are known"
    )


def _doubts(request: Request, nodes: Eligible, learned: Mapping[tuple[str, str], Learned]) -> list[str]:
    """Return a text for each profile of a job's model or of hardware with measurements that are not believed.

    Those of devices that the plan does not use count, too: a lie may be the reason.
    """
    hardware = [
        f"hardware profile of {pool.device}: {'; '.join(probed.doubts)}. Measure again with dljob probe"
        for pool in nodes.pools
        if (probed := hardware_of(pool.device, learned)) is not None and probed.doubts
    ]
    precisions = PRECISIONS if request.precision is None else (request.precision,)
    again = {"Never": (False,), "Always": (True,), "Auto": (False, True)}[request.recomputation]
    return hardware + [
        _not_used(name, pool.device, "; ".join(known.doubts))
        for pool in nodes.pools
        for name in [request.key(precision, recomputes) for precision in precisions for recomputes in again]
        if (known := learned.get((name, pool.device))) is not None and known.doubts
    ]


def _unexplained(model: str, device: str, doubt: str) -> str:
    return (
        f"profile of {model} on {device}: {doubt} by spec.model.hints. The plan uses the measurement. Correct the "
        "hints, or delete the DLProfile of this model and device if the measurement is wrong"
    )


def _not_used(model: str, device: str, doubts: str) -> str:
    return (
        f"profile of {model} on {device}: {doubts}. The plan does not use these measurements. "
        "Delete the DLProfile of this model and device, so that the next run measures it again"
    )


def _missed(request: Request, chosen: Choice) -> str:
    """Return the warning that not even ``chosen``, the fastest plan, meets the deadline of the request."""
    p = chosen.prediction
    total_s, p90_s = p.total_s, p.total_p90_s
    assert request.deadline_s is not None
    if request.paced:
        return f"no plan meets the deadline: the fastest one takes {_lateness(request, p90_s)}"
    p90_s += objective.start_s(request)
    parts = of_which(total_s, p.fetch_s, p.evaluations_s, p.checkpoints_s)
    return (
        f"spec.objective.deadline: no plan meets the deadline of {duration(request.deadline_s)}: the fastest one "
        f"takes {duration(total_s)} (median{parts}), or {duration(p90_s)} (p90, with start-up), which is "
        f"{duration(p90_s - request.deadline_s)} too long. Raise the deadline to {duration_at_least(p90_s)}, allow "
        "more or faster nodes, or train for fewer steps"
    )


def _lateness(request: Request, total_p90_s: float) -> str:
    """Return a text about a training that misses the deadline: its p90 time, or its ratio to the time that is left.

    ``total_p90_s``: p90 time of the whole training in seconds. The text has the ratio if ``request.paced`` is true:
    the deadline in the request is then computed for a whole training, so users do not know it.
    """
    assert request.deadline_s is not None
    if not request.paced:
        return f"{duration(total_p90_s + objective.start_s(request))} (p90, with start-up)"
    ratio = (total_p90_s + objective.start_s(request)) / request.deadline_s
    times = f"{ratio:.3g} times" if ratio < MAX_RATIO else f"more than {MAX_RATIO:g} times"
    return f"{times} the time that is left for the remaining steps (p90, with start-up)"
