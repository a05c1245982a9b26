"""Reasons why a plan does not use more cores of its CPU nodes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.evaluate import Part, describe, evaluate
from dljob.planner.candidates.node_layout import Layout, layouts
from dljob.planner.candidates.options import Option
from dljob.planner.candidates.pools import Pool
from dljob.planner.explanation.explain import worse
from dljob.planner.search import objective
from dljob.planner.types import Choice, Refusal, Request

OptionsOf = Callable[[Pool, Layout], Sequence[Option]]
"""Function that returns the options to use the nodes of a pool with a layout of ranks and cores."""


def more_cores(
    request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload, options_of: OptionsOf
) -> list[Refusal]:
    """Return for each CPU device type of the chosen plan the reason why its nodes do not use more cores.

    The reason compares the chosen plan with the best plan with more cores on the same nodes. If no layout has more
    cores, the reason says what limits them, such as a quota. There is no reason if plans with more cores do not fit
    into memory, for GPUs, and for groups that the user fixes. ``parts``: the groups of nodes of the chosen plan.
    ``options_of``: function from a pool and a layout to the options to use the pool.
    """
    if request.fixed:
        return []
    lines = []
    for i, part in enumerate(parts):
        if part.option.pool.is_gpu:
            continue
        found = []
        for layout in layouts(part.option.pool, request):
            if layout.cpus <= part.option.cpus:
                continue
            for option in options_of(part.option.pool, layout):
                if option.min_nodes <= part.nodes <= option.nodes:
                    option = replace(option, strategy=part.option.strategy, min_ranks=part.option.min_ranks)
                    tried = [*parts[:i], replace(part, option=option), *parts[i + 1 :]]
                    found.append((tried, evaluate(tried, chosen.collective, request, workload)))
        larger = [(tried, each) for tried, each in found if isinstance(each, Choice)]
        if larger:
            tried, best = min(larger, key=lambda item: objective.score(request, item[1].prediction))
            lines.append(Refusal(describe([tried[i]]), _too_little(request, best, chosen)))
        elif not found:
            lines.append(_limit(request, part))
    return lines


def _too_little(request: Request, more: Choice, chosen: Choice) -> str:
    p, q = objective.score(request, more.prediction), objective.score(request, chosen.prediction)
    if p >= q:
        return f"more cores do not pay: {worse(request, more, chosen)}; {more.prediction.bottleneck}"
    times = objective.devices(more) / objective.devices(chosen)
    return (
        f"more cores pay too little: {100 * (1 - p / q):.0f} % less {request.minimize.lower()} with {times:.3g} times "
        f"the CPUs, and each doubling must save {100 * objective.CORES_PAY:.0f} %; {more.prediction.bottleneck}"
    )


def _limit(request: Request, part: Part) -> Refusal:
    option = part.option
    if request.cpu_per_pod:
        why = "spec.resources.cpu sets the number of CPUs"
    elif request.cpu_limit_per_pod and request.cpu_limit_per_pod < option.cpus + 1:
        why = f"the CPU limit of a pod is {request.cpu_limit_per_pod:.3g}"
    elif request.cpus_max is not None:
        why = f"a quota of the namespace leaves {request.cpus_max:.3g} CPUs"
    elif option.cpus >= option.pool.most_cpu:
        why = f"a node has {option.pool.most_cpu:.3g} CPUs"
    else:
        # A rank gets one CPU, or all CPUs of a smaller node, even if less room is left beside other pods.
        room = max(option.cpus, sorted(option.pool.room_cpu, reverse=True)[part.nodes - 1])
        why = (
            f"plans may use {room:.3g} of {option.pool.cpu_with(room):.3g} CPUs of a node: other pods use the rest, or "
            "it remains for pods that start later"
        )
    return Refusal(f"{part.nodes} x {option.label}, more than {option.cpus:.3g} CPUs each", why)
