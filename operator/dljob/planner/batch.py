"""Choice of the global batch size, from a range, that needs the least of the objective for the same training progress.

The considered batch sizes are called a ladder, and each of them a rung. Each rung has its own plan and its own number
of steps, which follows from the gradient noise scale (``perf.fit.statistical``). The plans are compared by the
request's objective over the whole training.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, log

from dljob.calibrate.learned import Learned
from dljob.calibrate.noise import known
from dljob.perf.fit import statistical
from dljob.planner.search import objective
from dljob.planner.types import BatchDecision, Batches, BatchOption, Choice, Decision, Infeasible, Request
from dljob.planner.types.texts import samples

MIN_GAIN = 0.05
"""Minimum relative improvement that justifies a batch size further from ``spec.globalBatchSize``.

Smaller improvements are uncertain, because measured noise scales vary between runs."""
AS_MANY_SAMPLES = 1e15
"""Noise scale in samples that is assumed for a running job if none was measured when the job began.

It is so large that all batch sizes need the same number of samples for the same progress."""
MAX_RUNGS = 16
"""Maximum number of global batch sizes to consider."""
MAX_RUNGS_PLANNED_AT_ONCE = 8
"""Maximum number of batch sizes at which all of them are planned. If there are more, every other one is planned first,
then the neighbours of the best one."""
Plan = Callable[[Request], Decision | Infeasible]


def ladder(base: int, low: int, high: int) -> list[int]:
    """Return the global batch sizes to consider from ``low`` to ``high``, in rising order and at most ``MAX_RUNGS``.

    ``base``: the batch size in the spec (``spec.globalBatchSize``).

    The result contains ``low``, ``base``, ``high``, and products of ``base`` with the factors …, 1/2, 3/4, 1, 3/2, 2,
    3, 4, 6, … that are whole numbers. If these are more than ``MAX_RUNGS``, only powers of two remain as factors. If
    they are still too many, the products nearest to ``base`` remain. Multiples of ``base`` divide evenly among ranks if
    ``base`` does.
    """
    halves = {base} | {base * 2**k for k in range(1, 32)} | {base // 2**k for k in range(1, 32) if base % 2**k == 0}
    between = {3 * batch // 2 for batch in halves if batch % 2 == 0}
    ends = {low, base, high}

    def within(batches: set[int]) -> set[int]:
        return {batch for batch in batches if low <= batch <= high}

    fine = within(halves | between) | ends
    if len(fine) <= MAX_RUNGS:
        return sorted(fine)
    coarse = within(halves) | ends
    return sorted(sorted(coarse, key=lambda b: (b not in ends, abs(log(b / base))))[:MAX_RUNGS])


def choose(
    request: Request, batches: Batches, learned: Mapping[tuple[str, str], Learned], plan: Plan
) -> Decision | Infeasible:
    """Return the plan for the best global batch size, and describe the other batch sizes in ``Decision.batch``.

    A running job keeps its batch size. Without a measured noise scale, use the batch size in the spec. ``learned``:
    measured constants by (model or training script, device). ``plan``: function that plans a request with one batch
    size.
    """
    base = request.global_batch
    if batches.running is not None:
        return _kept(request, batches, plan)
    keys = request.keys
    noise = known({key: found.noise for key, found in learned.items() if key[0] in keys}, batches.data)
    if noise is None:
        text = (
            f"stays {base}, because no run has measured the gradient noise scale of this model on this data; a run on "
            "at least two ranks measures the noise scale"
        )
        return _with_batch(
            plan(_at(request, batches, base, 0.0)), BatchDecision(base, base, request.total_steps, None, text)
        )
    scale = float(f"{noise.samples:.4g}")  # as in the status, so that later plans of the job get as many steps
    asked = {b: _at(request, batches, b, scale) for b in ladder(base, batches.low, batches.high)}
    found = _looked_at(base, asked, plan)
    decisions = {batch: answer for batch, answer in found.items() if isinstance(answer, Decision)}
    if not decisions:
        return found[base]
    chosen = pick(base, _scores(asked, found))
    text = f"gradient noise scale {samples(_rounded(scale))}, measured in {_runs(noise.runs)}"
    if chosen == base:
        text = (
            f"stays {base}, because no other batch size improves the objective by more than {100 * MIN_GAIN:.0f} %; "
            f"{text}"
        )
    options = tuple(_option(asked[b], scale, base, found[b]) for b in sorted(found))
    steps = asked[chosen].total_steps
    return _with_batch(decisions[chosen], BatchDecision(base, chosen, steps, scale, text, options))


def _looked_at(base: int, asked: Mapping[int, Request], plan: Plan) -> dict[int, Decision | Infeasible]:
    """Plan the batch sizes to consider, or only some of them. Return the plan of each, or the reason why it has none.

    ``base``: the batch size in the spec. ``asked``: the request for each batch size to consider. If these are more than
    ``MAX_RUNGS_PLANNED_AT_ONCE``, plan every other batch size first, and then the neighbours of the best one. If none
    has a plan, plan the rest. This saves time, because a plan on a large cluster takes a tenth of a second. It loses
    little, because neighbouring batch sizes need similar times for the same progress.
    """
    rungs = sorted(asked)
    first = rungs if len(rungs) <= MAX_RUNGS_PLANNED_AT_ONCE else sorted({base, rungs[-1], *rungs[::2]})
    found = {b: plan(asked[b]) for b in first}
    if scores := _scores(asked, found):
        best = (min(scores, key=lambda b: scores[b]), pick(base, scores))
        beside = {b for at in map(rungs.index, best) for b in rungs[max(0, at - 1) : at + 2]}
    else:
        beside = set(rungs)
    return found | {b: plan(asked[b]) for b in sorted(beside - set(found))}


def pick(base: int, scores: Mapping[int, tuple[bool, float]]) -> int:
    """Return the batch size nearest to ``base`` (the one in the spec) that is worth choosing.

    ``scores``: batch size -> (True if its plan misses the deadline, score); lower is better. A batch size is worth
    choosing if its score is within ``MIN_GAIN`` of the best score. Other batch sizes than ``base`` must also beat
    ``base`` by more than ``MIN_GAIN``, unless ``base`` has no plan or misses a deadline that the best one meets.
    """
    late, best = min(scores.values())
    near_best = {
        b: score for b, (is_late, score) in scores.items() if is_late == late and score <= best * (1 + MIN_GAIN)
    }
    if base in near_best:
        return base
    base_late, base_score = scores.get(base, (True, inf))
    base_limit = base_score if base_late == late else inf
    # The best batch always passes: otherwise ``base`` would be in ``near_best``.
    improving = [b for b, score in near_best.items() if score * (1 + MIN_GAIN) < base_limit]
    return min(improving, key=lambda b: (abs(log(b / base)), b))


def _kept(request: Request, batches: Batches, plan: Plan) -> Decision | Infeasible:
    """Plan a running job with the batch size that it began with, which gives it the same number of steps as before."""
    assert batches.running is not None
    batch, noise = batches.running.batch, batches.running.noise
    asked = _at(request, batches, batch, AS_MANY_SAMPLES if noise is None else noise)
    text = f"stays {batch}, which the job began with"
    return _with_batch(plan(asked), BatchDecision(request.global_batch, batch, asked.total_steps, noise, text))


def _at(request: Request, batches: Batches, batch: int, noise: float) -> Request:
    """Return a copy of the request with ``batch`` as its only global batch size, and with a new number of steps.

    These steps make as much training progress as ``request.total_steps`` steps with the batch size
    ``request.global_batch``. ``noise``: the gradient noise scale in samples.
    """
    steps = statistical.steps(request.total_steps, request.global_batch, batch, noise, batches.epoch_samples)
    return replace(request, global_batch=batch, total_steps=steps, batches=None)


def _scores(asked: Mapping[int, Request], found: Mapping[int, Decision | Infeasible]) -> dict[int, tuple[bool, float]]:
    """Return {batch size: sort key of its plan, lower is better} for all batch sizes that have a plan.

    ``asked``: the request for each batch size. ``found``: the decision for each batch size, or the reason why it has no
    plan. The key is (True if the chosen plan misses the deadline, score).
    """
    return {b: _score(asked[b], answer.chosen) for b, answer in found.items() if isinstance(answer, Decision)}


def _score(request: Request, choice: Choice) -> tuple[bool, float]:
    """Return the sort key (True if the plan misses the deadline, score); lower is better.

    The score of a plan that misses the deadline is the p90 of its training time in seconds. The score of any other plan
    is ``objective.score``: seconds, joules, US dollars or grams of CO2 of the whole training.
    """
    p90_s = choice.prediction.total_p90_s
    late = not objective.meets(request, p90_s)
    return late, p90_s if late else objective.score(request, choice.prediction)


def _option(asked: Request, noise: float, base: int, answer: Decision | Infeasible) -> BatchOption:
    improving = statistical.efficiency(asked.global_batch, base, noise)
    if isinstance(answer, Infeasible):
        return BatchOption(asked.global_batch, asked.total_steps, improving, None, answer.message)
    return BatchOption(asked.global_batch, asked.total_steps, improving, answer.chosen.prediction)


def _with_batch(answer: Decision | Infeasible, choice: BatchDecision) -> Decision | Infeasible:
    return replace(answer, batch=choice) if isinstance(answer, Decision) else answer


def _rounded(noise: float) -> int:
    """Round a gradient noise scale in samples to two significant figures, because it is not measured more precisely."""
    return int(float(f"{max(1.0, noise):.2g}"))


def _runs(count: int) -> str:
    return "one run" if count == 1 else f"{count} runs"
