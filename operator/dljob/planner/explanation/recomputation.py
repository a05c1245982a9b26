"""Reasons why a plan uses activation checkpointing or does not."""

from collections.abc import Iterable, Sequence

from dljob.perf.workload.workload import Workload, in_precision, recomputing
from dljob.planner.search import objective
from dljob.planner.types import Choice, Request
from dljob.planner.types.texts import duration, gibibytes

_SPLIT = "model parallelism has no activation checkpointing"


def recomputation_reason(request: Request, workload: Workload, chosen: Choice, choices: Iterable[Choice]) -> str | None:
    """Return why a plan uses activation checkpointing or does not; None for a job that does not ask for it.

    ``workload``: in float32 without activation checkpointing. ``choices``: all plans that were evaluated.
    """
    if request.recomputation == "Never":
        return None
    if request.no_recomputation_reason is not None:
        return request.no_recomputation_reason
    if workload.checkpointed_nbytes is None:
        return "the planner does not know blocks of the model"
    typed = in_precision(workload, chosen.precision)
    assert typed.checkpointed_nbytes is not None
    keeps = (
        f"a sample keeps {gibibytes(typed.checkpointed_nbytes)} of activations instead of "
        f"{gibibytes(typed.activation_nbytes)}, for {_more(typed):.0f} % more operations"
    )
    if request.recomputation == "Always":
        return f"{'spec.activationCheckpointing is Always' if chosen.recomputes else _SPLIT}; {keeps}"
    listed = list(choices)
    with_it = [c for c in listed if c.recomputes]
    without = [c for c in listed if not c.recomputes and not c.splits_model]
    if chosen.recomputes:
        return f"{_why_used(request, chosen, without)}; {keeps}"
    if chosen.splits_model:
        return _SPLIT
    return _why_not(request, chosen, with_it)


def _more(workload: Workload) -> float:
    return 100 * (recomputing(workload).flops_per_sample / workload.flops_per_sample - 1)


def _why_used(request: Request, chosen: Choice, without: Sequence[Choice]) -> str:
    if not without:
        return "without it, no plan fits into memory"
    best = min(without, key=lambda choice: objective.score(request, choice.prediction))
    if not objective.meets(request, best.prediction.total_p90_s):
        return "without it, no plan meets the deadline"
    p, q = (objective.score(request, choice.prediction) for choice in (chosen, best))
    return f"{100 * (1 - p / q):.0f} % less {request.minimize.lower()} than the best plan without it ({best.summary})"


def _why_not(request: Request, chosen: Choice, with_it: Sequence[Choice]) -> str:
    if not with_it:
        return "it would not need less memory"
    best = min(with_it, key=lambda choice: objective.score(request, choice.prediction))
    p, q = (objective.score(request, choice.prediction) for choice in (best, chosen))
    if p < q:
        pays = 100 * objective.RECOMPUTING_PAYS
        return f"it would save {100 * (1 - p / q):.1f} % {request.minimize.lower()}, and it must save {pays:.0f} %"
    by_p90 = request.minimize == "Time" and objective.by_p90(request)
    slower_s, step_s = (each.prediction.step_p90_s if by_p90 else each.prediction.step_s for each in (best, chosen))
    times = f"{duration(slower_s)} per step instead of {duration(step_s)}{' (p90)' if by_p90 else ''}"
    return f"the plan fits into memory, and the best plan with it is no better: {times}"
