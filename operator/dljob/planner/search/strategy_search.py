"""Kinds of candidates beside the chosen plan's, each with its price and why it is none.

Sharing out the update, the model, or less of keeping in step, where that was not asked for.
"""

from collections.abc import Sequence
from dataclasses import replace

from dljob.perf.step.synchronization import staleness
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.evaluate import Part, describe, evaluate
from dljob.planner.candidates.options import HALVES, summing
from dljob.planner.search import model_split, objective
from dljob.planner.types import Choice, Refusal, Request
from dljob.planner.types.texts import duration, gibibytes

MAX_STAGES = 8
"""With more ranks a pipeline or a split of layers is not priced: cutting the model would take longer than the plan."""
BOUND = 3
"""Steps that stale-synchronous ranks are taken to be apart at most: a usual choice (Ho et al. 2013)."""


def others(request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload) -> list[Refusal]:
    """A line for each kind that the chosen plan could have been of; none for one rank, which shares nothing."""
    if objective.size(chosen) < 2:
        return []
    return [
        *_sharded(request, chosen, parts, workload),
        *_in_parts(request, chosen, parts, workload),
        *_synchronization(request, chosen, parts, workload),
    ]


def _sharded(request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload) -> list[Refusal]:
    allowed = request.strategy == "Data" and request.collective in (None, *HALVES)
    if not allowed or not workload.optimizer_slots:
        return []
    sharing = [replace(part, option=replace(part.option, strategy="Optimizer")) for part in parts]
    name = request.collective or summing(sharing[0].option)[0]
    found = evaluate(sharing, name, request, workload)
    if isinstance(found, Refusal):
        return []
    return [_not_asked_for("Optimizer or Auto", found, chosen)]


def _not_asked_for(strategy: str, found: Choice, chosen: Choice) -> Refusal:
    p, q = found.prediction, chosen.prediction
    return Refusal(
        found.summary,
        f"not asked for (parallelism.strategy {strategy}): {duration(p.step_s)} a step against "
        f"{duration(q.step_s)}, {gibibytes(p.memory_nbytes)} a rank against {gibibytes(q.memory_nbytes)}",
    )


def _in_parts(request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload) -> list[Refusal]:
    """The same ranks with parts of the model, where the trainer can cut it: built-in models on one kind of device."""
    ranks = objective.size(chosen)
    if request.model is None or len(parts) > 1 or ranks > MAX_STAGES or request.strategy != "Data":
        return []
    lines = []
    micro_batches = min(model_split.MICRO_BATCHES_PER_STAGE * ranks, request.global_batch)
    pipeline = replace(request, strategy="Pipeline", stages=ranks, micro_batches=micro_batches, collective=None)
    tensor = replace(request, strategy="Tensor", collective=None)
    for asked in (pipeline, tensor):
        found = model_split.like(parts[0], asked, workload)
        if isinstance(found, str):
            lines.append(Refusal(f"{describe(parts)}, {asked.strategy}", found))
        elif isinstance(found, Refusal):
            lines.append(Refusal(f"{found.summary}, {asked.strategy}", found.reason))
        else:
            lines.append(_not_asked_for(f"{asked.strategy} or Auto", found, chosen))
    return lines


def _synchronization(request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload) -> list[Refusal]:
    """The same ranks out of step, one of them the parameter server; for built-in models, as the trainer has it."""
    if request.model is None or request.strategy != "Data" or request.synchronization != "Synchronous":
        return []
    if request.collective not in (None, "ParameterServer"):
        return []
    lines = []
    stale = replace(request, synchronization="StaleSynchronous", staleness_bound=BOUND)
    for asked in (stale, replace(request, synchronization="Asynchronous")):
        found = evaluate(parts, "ParameterServer", asked, workload)
        if isinstance(found, Choice):
            step_s, old = found.prediction.step_s, staleness(objective.size(chosen) - 1)
            lines.append(
                Refusal(
                    found.summary,
                    f"not asked for (parallelism.synchronization {asked.synchronization}): {duration(step_s)} for an "
                    f"update by every worker against {duration(chosen.prediction.step_s)} a step, by gradients "
                    f"{old:.0f} update{'' if round(old) == 1 else 's'} old",
                )
            )
    return lines
