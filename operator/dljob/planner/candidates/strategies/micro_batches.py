"""Numbers of micro-batches into which the batch of a model-parallel candidate is divided."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from dljob.perf.step import model_split as split
from dljob.planner.candidates.accumulation import MAX_MICRO_BATCHES
from dljob.planner.candidates.strategies.model_split import choice, predict
from dljob.planner.candidates.strategies.split_candidate import SplitCandidate
from dljob.planner.candidates.strategies.split_memory import host_room_nbytes, split_memory
from dljob.planner.types import Choice, Infeasible, Prediction, Refusal, Request
from dljob.planner.types.texts import gibibytes


def micro_batch_counts(batch: int, stages: int) -> Iterator[int]:
    """Yield the numbers of micro-batches to consider, in rising order: about 1, 2, 4, ... times the number of stages.

    A number is at most ``batch`` (one sample per micro-batch) and at most ``MAX_MICRO_BATCHES``. The last number is the
    largest one within both limits. If several numbers give micro-batches of the same size m, yield only ceil(batch /
    m), the smallest of them.
    """
    last, wanted = 0, stages
    while last < min(batch, MAX_MICRO_BATCHES):
        found = ceil(batch / ceil(batch / min(wanted, batch, MAX_MICRO_BATCHES)))
        if found > last:
            yield found
        elif wanted >= min(batch, MAX_MICRO_BATCHES):
            return
        last, wanted = max(last, found), 2 * wanted


def fewest_micro_batches(
    candidate: SplitCandidate, request: Request, model: split.Model, *, divides: bool = False
) -> tuple[SplitCandidate, Prediction | Refusal]:
    """Return the candidate with at least its own number of micro-batches that fits into memory, and its prediction.

    If none fits, return the one with the most micro-batches, and the reason. ``divides``: True if tensor-parallel
    groups may divide batches too.
    """
    batch, least = -(-request.global_batch // candidate.replicas), candidate.micro_batches
    counts = [k for k in micro_batch_counts(batch, least) if k >= min(batch, least)]
    if candidate.strategy == "Tensor" and not divides:
        counts = [1]
    # Of a batch above the limit, no larger number may give smaller micro-batches.
    for k in counts or [least]:
        candidate = candidate.divided(k)
        found = predict(candidate, request, model)
        if not isinstance(found, Refusal):
            break
    return candidate, found


def evaluate(candidate: SplitCandidate, request: Request, model: split.Model) -> Choice | Refusal:
    """Return the candidate with its prediction, or a ``Refusal`` with the reason if it does not fit into memory.

    A pipeline gets more micro-batches if it does not fit otherwise, unless the user has requested a number.

    Raise ValueError if the model cannot be split as the candidate demands.
    """
    found = predict(candidate, request, model)
    if isinstance(found, Refusal) and candidate.strategy == "Pipeline" and request.may_divide_further:
        candidate, found = fewest_micro_batches(candidate, request, model)
    return found if isinstance(found, Refusal) else choice(candidate, request, found)


def too_large(
    request: Request, asked: Sequence[SplitCandidate], model: split.Model, refusals: tuple[Refusal, ...]
) -> Infeasible:
    """Return what is wrong if no pipeline of ``asked`` fits into memory, with the field of the spec that is its cause.

    ``refusals``: what was rejected, first the candidates of ``asked``.
    """
    tried = [fewest_micro_batches(candidate, request, model) for candidate in asked]
    most, transient = MAX_MICRO_BATCHES * (request.replicas or 1), False
    if fitting := _fitting(tried):
        field, found = "parallelism.microBatches", f"{request.micro_batches}, {_TOO_LITTLE}"
        enough = min(candidate.micro_batches for candidate in fitting)
        remedy = f"more, such as {enough}: raise microBatches, or remove it, so that the planner chooses the number"
    else:
        refusals = tuple(found for _, found in tried if isinstance(found, Refusal)) + refusals[len(tried) :]
        least = [candidate for candidate, _ in tried] if request.may_divide_further else asked
        lacking = [
            _main_memory(each, request, model)
            for each, (_, found) in zip(least, tried, strict=True)
            if _lacks_main_memory(found) or _exceeds_limit(each, request, model)
        ]
        smaller = replace(request, global_batch=min(request.global_batch, most))
        if lacking:
            free, needed = min(lacking, key=lambda each: each[1] - each[0])
            limit, field = request.memory_per_pod_nbytes is not None, "resources.memory"
            transient = not limit
            found = f"{gibibytes(free)}{'' if limit else ' of free main memory'} for a pod"
            remedy = (
                f"at least {gibibytes(needed)}: {'raise resources.memory' if limit else 'wait until memory is free'}"
            )
            remedy += ", or allow more nodes, so that fewer ranks on each of them are enough, or nodes with more memory"
        elif request.global_batch > most and _fitting(
            [fewest_micro_batches(candidate, smaller, model) for candidate in asked]
        ):
            field, found = "globalBatchSize", f"{request.global_batch}, {_TOO_LITTLE}"
            remedy = f"at most {most}, because a batch has at most {MAX_MICRO_BATCHES} micro-batches: lower it"
        else:
            field = "parallelism.stages"
            found = f"{request.stages}, even with the smallest micro-batches, {_TOO_LITTLE}"
            enough = min((n for each in asked if (n := _enough_stages(each, request, model))), default=0)
            remedy = f"parts that fit: {f'raise stages to at least {enough}, ' if enough else ''}"
            remedy += "choose strategy Sharded, or allow devices with more memory"
    misfits = [each for each in refusals if "does not fit" in each.reason]
    lines = "; ".join(f"{each.summary}: {each.reason}" for each in misfits[:4])
    text = f"found {found}; expected {remedy} ({lines})"
    return Infeasible("DoesNotFit", f"spec.{field}", text, transient=transient, refusals=refusals)


_TOO_LITTLE = "with which no rank has enough memory for its part of the model"
Tried = tuple[SplitCandidate, Prediction | Refusal]


def _fitting(tried: Sequence[Tried]) -> list[SplitCandidate]:
    return [candidate for candidate, found in tried if not isinstance(found, Refusal)]


def _lacks_main_memory(found: Prediction | Refusal) -> bool:
    return isinstance(found, Refusal) and "main memory" in found.reason


def _exceeds_limit(candidate: SplitCandidate, request: Request, model: split.Model) -> bool:
    """Return True if ranks on CPUs have too little memory only because of ``spec.resources.memory``."""
    pool, nodes = candidate.part.option.pool, candidate.part.nodes
    if pool.is_gpu or request.memory_per_pod_nbytes is None:
        return False
    return _main_memory(candidate, request, model)[1] <= pool.falling_memory_nbytes[nodes - 1]


def _main_memory(candidate: SplitCandidate, request: Request, model: split.Model) -> tuple[int, int]:
    """Return the main memory in bytes that a pod of the candidate can have, and that it needs."""
    batch = ceil(request.global_batch / candidate.replicas)
    return host_room_nbytes(candidate.part, request), split_memory(candidate, batch, request, model).pod_nbytes


def _enough_stages(candidate: SplitCandidate, request: Request, model: split.Model) -> int:
    """Return the fewest stages, more than requested, of which each fits into a rank of the candidate; 0 if none do.

    More stages hardly help if one sample's activations are too large: the first stage keeps those of as many
    micro-batches as there are stages.
    """
    option, batch = candidate.part.option, ceil(request.global_batch / candidate.replicas)
    for stages in range((request.stages or 1) + 1, len(model.stages) + 1):
        needed = split.rank_nbytes(
            model.workload,
            "Pipeline",
            stages,
            min(batch, MAX_MICRO_BATCHES),
            candidate.replicas,
            batch,
            option.pool.is_gpu,
            option.device.growth_factors,
            request.checkpoints,
            candidate.collective,
        )
        if needed <= option.memory_nbytes:
            return stages
    return 0
