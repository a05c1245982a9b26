"""Compare the chosen plan's step time with that of strategies that the user did not request.

These strategies are DDP's larger buckets on GPUs, the sharded optimizer, sharded parameters, model parallelism, and
asynchronous or stale-synchronous training.
"""

from collections.abc import Sequence
from dataclasses import replace

from dljob.perf.step.synchronization import staleness
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.collectives import HALVES, summing
from dljob.planner.candidates.evaluate import Part, describe, evaluate
from dljob.planner.candidates.options import Option
from dljob.planner.search import model_split, objective, sharded
from dljob.planner.search.hybrids import MICRO_BATCHES_PER_STAGE
from dljob.planner.types import Choice, Refusal, Request
from dljob.planner.types.texts import duration, gibibytes, step_times

MAX_STAGES = 8
"""Maximum number of ranks at which the chosen plan is compared with model parallelism. With more ranks, splitting the
model would take longer than planning."""
BOUND = 3
"""Staleness bound in steps of the stale-synchronous plan with which the chosen plan is compared.

It is a usual choice (Ho et al. 2013)."""

PAYS = 0.05
"""Minimum fraction of the objective by which collective DDP must improve the chosen plan, so that a line names it."""


def others(request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload) -> list[Refusal]:
    """Return the other strategies that the chosen plan's ranks could use, each with the reason why it was not chosen.

    ``parts``: the groups of nodes of the chosen plan. Return an empty list if the plan has only one rank.
    """
    if objective.size(chosen) < 2:
        return []
    lines = [
        *_larger_buckets(request, chosen, parts, workload),
        *_sharded(request, chosen, parts, workload),
        *_fully_sharded(request, chosen, parts, workload),
    ]
    if chosen.precision != "FP32" or chosen.recomputes:
        return lines  # the others compute in float32 and keep all activations
    whole = [replace(part, option=part.option.single or part.option) for part in parts]
    return [
        *lines,
        *_in_parts(request, chosen, whole, workload),
        *_synchronization(request, chosen, whole, workload),
    ]


def _larger_buckets(request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload) -> list[Refusal]:
    """Return the chosen plan with collective DDP, if its larger buckets improve the objective by at least ``PAYS``.

    On GPUs, both collectives are NCCL, but each bucket costs the latency of the network. ``Auto`` does not choose DDP,
    because not every script can run with it.
    """
    allowed = request.strategy == "Data" and request.collective is None and request.synchronization == "Synchronous"
    if not allowed or request.reduced_by_script or not all(part.option.pool.is_gpu for part in parts):
        return []
    asked = replace(request, collective="DDP")
    found = evaluate(parts, "DDP", asked, workload)
    if isinstance(found, Refusal):
        return []
    p, q = found.prediction, chosen.prediction
    if objective.score(request, p) > (1 - PAYS) * objective.score(request, q):
        return []
    times = step_times((p.step_s, q.step_s), (p.total_s, q.total_s))
    return [Refusal(found.summary, f"not requested (collective DDP): {times}, with buckets of 25 instead of 4 MiB")]


def _sharded(request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload) -> list[Refusal]:
    allowed = request.strategy == "Data" and request.collective in (None, *HALVES)
    if not allowed or request.reduced_by_script or not workload.optimizer_slots:
        return []
    sharing = [replace(part, option=_sharing(part.option)) for part in parts]
    name = request.collective or summing(sharing[0].option)[0]
    found = evaluate(sharing, name, request, workload)
    if isinstance(found, Refusal):
        return []
    return [_not_asked_for("Optimizer or Auto", found, chosen)]


def _fully_sharded(request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload) -> list[Refusal]:
    if len(parts) > 1 or not sharded.can_use(request):
        return []
    part = replace(parts[0], option=parts[0].option.single or parts[0].option)
    found = sharded.evaluate(part, request, workload)
    return [] if isinstance(found, Refusal) else [_not_asked_for("Sharded", found, chosen)]


def _sharing(option: Option) -> Option:
    single = None if option.single is None else _sharing(option.single)
    return replace(option, strategy="Optimizer", single=single)


def _not_asked_for(strategy: str, found: Choice, chosen: Choice) -> Refusal:
    p, q = found.prediction, chosen.prediction
    return Refusal(
        found.summary,
        f"not requested (parallelism.strategy {strategy}): {duration(p.step_s)} per step instead of "
        f"{duration(q.step_s)}, {gibibytes(p.memory_nbytes)} per rank instead of {gibibytes(q.memory_nbytes)}",
    )


def _in_parts(request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload) -> list[Refusal]:
    """Return the model-parallel plans on the ranks of the chosen plan, each with a reason that compares the two plans.

    ``parts``: the groups of nodes of the chosen plan. Return an empty list if the model is not built in, if the ranks
    have different devices, if there are more than ``MAX_STAGES`` ranks, or if the user requests another strategy than
    Data.
    """
    ranks = objective.size(chosen)
    if request.model is None or len(parts) > 1 or ranks > MAX_STAGES or request.strategy != "Data":
        return []
    lines = []
    micro_batches = min(MICRO_BATCHES_PER_STAGE * ranks, request.global_batch)
    either = replace(request, replicas=None, collective=None)
    pipeline = replace(either, strategy="Pipeline", stages=ranks, micro_batches=micro_batches, may_divide_further=True)
    tensor = replace(either, strategy="Tensor")
    for asked in (pipeline, tensor):
        found = model_split.like(parts[0], asked, workload)
        if isinstance(found, str):
            lines.append(Refusal(f"{describe(parts)}, {asked.strategy}", found))
        elif isinstance(found, Refusal):
            lines.append(found)
        else:
            lines.append(_not_asked_for(f"{asked.strategy} or Auto", found, chosen))
    return lines


def _synchronization(request: Request, chosen: Choice, parts: Sequence[Part], workload: Workload) -> list[Refusal]:
    """Return a stale-synchronous and an asynchronous plan, each with a reason that compares it with the chosen plan.

    Both plans use the ranks of the chosen plan, one of them as parameter server. Return an empty list if the model is
    not built in, because the trainer supports such training only for built-in models, or if the user requests another
    strategy than Data, other than synchronous training, or another collective than ParameterServer.
    """
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
                    f"not requested (parallelism.synchronization {asked.synchronization}): every worker makes one "
                    f"update in {duration(step_s)}, instead of a step in {duration(chosen.prediction.step_s)}; the "
                    f"gradients are {old:.0f} update{'' if round(old) == 1 else 's'} old",
                )
            )
    return lines
