"""Numbers of micro-batches into which the batch of a model-parallel candidate is divided."""

from collections.abc import Iterator, Sequence
from math import ceil

from dljob.perf.step import model_split as split
from dljob.planner.candidates.accumulation import MAX_MICRO_BATCHES
from dljob.planner.candidates.strategies.model_split import choice, predict
from dljob.planner.candidates.strategies.split_candidate import SplitCandidate
from dljob.planner.types import Choice, Infeasible, Prediction, Refusal, Request


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
    batch = -(-request.global_batch // candidate.replicas)
    counts = [k for k in micro_batch_counts(batch, candidate.micro_batches) if k >= min(batch, candidate.micro_batches)]
    if candidate.strategy == "Tensor" and not divides:
        counts = [1]
    for k in counts:
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
    """Return what is wrong if no pipeline of ``asked`` fits into memory: the number of micro-batches, or of stages.

    ``refusals``: what was rejected, first the candidates of ``asked``.
    """
    tried = [fewest_micro_batches(candidate, request, model) for candidate in asked]
    if fitting := [candidate.micro_batches for candidate, found in tried if not isinstance(found, Refusal)]:
        field, found = "microBatches", str(request.micro_batches)
        remedy = f"at least {min(fitting)}: raise microBatches, or remove it, so that the planner chooses the number"
    else:
        field, found, most = "stages", f"{request.stages}, even with the smallest micro-batches", len(model.stages)
        more = f"raise stages (at most {most}), " if request.stages and request.stages < most else ""
        remedy = f"parts that fit: {more}choose strategy Sharded, or allow devices with more memory"
        refusals = tuple(found for _, found in tried if isinstance(found, Refusal)) + refusals[len(tried) :]
    misfits = [each for each in refusals if "does not fit" in each.reason]
    lines = "; ".join(f"{each.summary}: {each.reason}" for each in misfits[:4])
    return Infeasible(
        "DoesNotFit",
        f"spec.parallelism.{field}",
        f"found {found}, with which no rank has enough memory for its part of the model; expected {remedy} ({lines})",
        refusals=refusals,
    )
