"""Objective of the search: time, energy, cost or carbon, optionally with a deadline."""

from math import log2

import numpy as np
from numpy.typing import NDArray

from dljob.planner.search.screen import Screened
from dljob.planner.types import Choice, Prediction, Request

STARTUP_S = 20.0
"""Assumed seconds from ``kubectl apply`` to the first step, without fetching data. They count towards a deadline."""
INDISTINCT = 0.02
"""Maximum relative difference at which two plans tie. If the objective is Time, the plan with fewer devices wins the
tie. Otherwise, the faster plan wins."""
RECOMPUTING_PAYS = 0.05
"""Minimum fraction of the objective by which a plan with activation checkpointing must beat the best plan without it.

Both predictions have most of their errors in common, but the time to recompute is an estimate until a run measures it.
The planner requires the same gain to choose another batch size (``batch.MIN_GAIN``)."""
CORES_PAY = 0.1
"""Minimum fraction by which twice as many CPUs of the same nodes must shorten a step, if the objective is Time.

Predictions are often wrong by this fraction, and other jobs can use the CPUs. The number of nodes is not compared in
this way, because a node without the job may stand idle."""
LATE = 1e30
"""Factor on the p90 seconds of plans that miss the deadline, with interruptions, which is then their score.

These plans come last, the least late one first."""


def start_s(request: Request) -> float:
    """Return the seconds of the job's start that count towards its deadline.

    They are those of earlier runs, but at least ``STARTUP_S``, because starts that were fast once can be slower.
    """
    return max(STARTUP_S, request.measured_start_s or 0.0)


def meets(request: Request, total_p90_s: float) -> bool:
    """Return True if the predicted p90 time plus the start meets the deadline, or if there is no deadline."""
    return request.deadline_s is None or total_p90_s + start_s(request) <= request.deadline_s


def meets_all(request: Request, step_p90_s: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return for each p90 time of a step whether a training without interruptions meets the deadline (``meets``)."""
    found: NDArray[np.bool_] = step_p90_s * request.total_steps + start_s(request) <= (request.deadline_s or np.inf)
    return found


def by_p90(request: Request) -> bool:
    """Return True if plans are compared by p90 time: with a deadline, or if multi-device steps were measured."""
    return request.cautious or request.deadline_s is not None


def scores(request: Request, screened: Screened) -> NDArray[np.float64]:
    """Return the score of each candidate in ``screened``; lower is better. Infeasible candidates score infinity.

    The score is the time (seconds), energy (joules), cost (US dollars) or carbon (grams) of one step. If the objective
    is not time, candidates that miss the deadline score above all that meet it (``LATE``).
    """
    time_s = screened.step_p90_s if by_p90(request) else screened.step_s
    wanted = {
        "Time": time_s,
        "Energy": screened.energy_J,
        "Cost": screened.usd,
        "Carbon": screened.carbon_g,
    }[request.minimize]
    if request.deadline_s is None or request.minimize == "Time":
        return np.where(np.isfinite(screened.step_s), wanted, np.inf)
    total_p90_s = screened.step_p90_s * request.total_steps
    late = ~meets_all(request, screened.step_p90_s)
    return np.where(np.isfinite(screened.step_s), np.where(late, LATE * (1 + total_p90_s), wanted), np.inf)


def score(request: Request, prediction: Prediction) -> float:
    """Return the score of a plan with this prediction: what the request minimizes, over the whole training.

    Lower is better. The unit is seconds, joules, US dollars or grams. If the objective is not time, plans that miss the
    deadline score above all plans that meet it (``LATE``).
    """
    if request.minimize != "Time" and not meets(request, prediction.total_p90_s):
        return LATE * (1 + prediction.total_p90_s)
    return wanted(request, prediction)


def wanted(request: Request, prediction: Prediction) -> float:
    """Return what the request minimizes, over the whole training, whether or not the plan meets the deadline.

    The unit is seconds, joules, US dollars or grams.
    """
    if request.minimize == "Time":
        return prediction.total_p90_s if by_p90(request) else prediction.total_s
    found = {"Energy": prediction.energy_J, "Cost": prediction.cost_usd, "Carbon": prediction.carbon_g}
    return found[request.minimize] or 0.0


def size(choice: Choice) -> int:
    """Return the number of ranks of a plan, including parameter servers."""
    return sum(len(g.shares) for g in choice.groups)


def devices(choice: Choice) -> float:
    """Return the number of GPUs or CPUs that a plan computes with."""
    return sum(g.devices for g in choice.groups)


def surely_better(request: Request, parts: Choice, whole: Choice) -> bool:
    """Return True if the model-parallel plan ``parts`` beats the data-parallel plan ``whole`` despite uncertainty.

    If only one of the plans meets the deadline, that plan is better. Otherwise the p90 time of ``parts`` must be below
    the median time of ``whole``. Energy and cost are compared in the same way, because they are proportional to time.
    The reason is that a wrong choice is corrected late: steps of model-parallel runs say nothing about data-parallel
    ones, while data-parallel predictions improve with each run. Model-parallel jobs are also never elastic.
    """
    p, q = parts.prediction, whole.prediction
    meets_it = meets(request, p.total_p90_s)
    if meets_it != meets(request, q.total_p90_s):
        return meets_it
    if request.minimize == "Time" or not meets_it:
        return p.total_p90_s < q.total_s
    return score(request, p) * p.total_p90_s / p.total_s < score(request, q)


def recomputing_pays(request: Request, again: Choice, plain: Choice) -> bool:
    """Return True if the plan ``again`` with activation checkpointing beats ``plain``, the best plan without it.

    Its score must be better by ``RECOMPUTING_PAYS``. If only one of the plans meets the deadline, that plan is better.
    """
    meets_it = meets(request, again.prediction.total_p90_s)
    if meets_it != meets(request, plain.prediction.total_p90_s):
        return meets_it
    return score(request, again.prediction) < score(request, plain.prediction) * (1 - RECOMPUTING_PAYS)


def best(request: Request, choices: list[Choice]) -> Choice:
    """Return the best plan by the request's objective.

    Plans tie if their scores exceed the lowest score by at most the fraction ``INDISTINCT``. A plan that misses the
    deadline does not tie with one that meets it. Of plans that tie, return the one with the fewest GPUs or CPUs if the
    objective is Time, and otherwise the fastest one. If the objective is Time, a plan on CPUs with fewer of them
    replaces it if the others save too little time (``without_idle_cpus``).
    Return a model-parallel plan only if it is better than the best data-parallel plan despite the uncertainty of its
    prediction (``surely_better``), or if there is no data-parallel plan. Return a plan with activation checkpointing
    only if it is better than the best plan without it by ``RECOMPUTING_PAYS``, or if there is no such plan.
    """
    parts, whole = ([c for c in choices if c.splits_model is split] for split in (True, False))
    if not whole:
        return _best(request, parts)
    with_it, plain = ([c for c in whole if c.recomputes is recomputes] for recomputes in (True, False))
    kept = _best(request, plain or with_it)
    if plain and with_it and recomputing_pays(request, again := _best(request, with_it), kept):
        kept = again
    return _best(request, [c for c in parts if surely_better(request, c, kept)] or [kept])


def without_idle_cpus(
    scores: NDArray[np.float64], cpus: NDArray[np.float64], nodes: NDArray[np.int64], start: int
) -> int:
    """Return the index of the CPU plan to use instead of the plan ``start``, whose score ties with the lowest one.

    ``scores``, ``cpus``, ``nodes``: score, number of CPUs and of nodes of each plan. More CPUs must save ``CORES_PAY``
    of the time for each doubling. Let w = score x CPUs^g with g = -log2(1 - CORES_PAY). Twice the CPUs save exactly
    ``CORES_PAY`` if w is the same, so w orders all plans, and of any two plans the one with the smaller w pays.

    The result has the smallest w of the plans with at most the CPUs of ``start`` on as many nodes or more. Fewer nodes
    are no reason to be slower, because the others may stand idle. But if plans on fewer nodes are faster than this
    result, and have a smaller w, the result is the one of them with the smallest w. Of equal plans, the first counts.
    So no plan with at most the CPUs of ``start`` is faster than the result and has a smaller w.
    """
    worth = np.where(cpus <= cpus[start], scores * cpus ** -log2(1 - CORES_PAY), np.inf)
    found = int(np.argmin(np.where(nodes >= nodes[start], worth, np.inf)))
    better = (scores < scores[found]) & (worth < worth[found])
    return int(np.argmin(np.where(better, worth, np.inf))) if better.any() else found


def _smallest_first(choice: Choice) -> tuple[float, int, bool, float, float, str]:
    """Return a sort key that orders plans by number of GPUs or CPUs, ranks, sharded optimizer, cost, and time.

    The key decides between plans whose times tie. Of equally many ranks, plans without a sharded optimizer come first,
    because they survive the loss of ranks.
    """
    p = choice.prediction
    return devices(choice), size(choice), choice.strategy == "Optimizer", p.cost_usd or 0.0, p.total_s, choice.summary


def _in_time(request: Request, choice: Choice, best: Choice) -> bool:
    """Return True if ``choice`` meets the deadline, or if not even ``best``, the plan with the lowest score, does."""
    return meets(request, choice.prediction.total_p90_s) or not meets(request, best.prediction.total_p90_s)


def _best(request: Request, choices: list[Choice]) -> Choice:
    scored = [score(request, c.prediction) for c in choices]
    lowest = min(scored)
    best = choices[scored.index(lowest)]
    in_time = [(c, each) for c, each in zip(choices, scored, strict=True) if _in_time(request, c, best)]
    if request.minimize != "Time":
        tied = [c for c, each in in_time if each <= lowest * (1 + INDISTINCT)]
        return min(tied, key=lambda c: (c.prediction.total_s, size(c), c.summary))
    in_time.sort(key=lambda item: _smallest_first(item[0]))
    if _is_on_cpus(best):
        in_time = [item for item in in_time if _is_on_cpus(item[0])]
    start = next(i for i, (_, each) in enumerate(in_time) if each <= lowest * (1 + INDISTINCT))
    if not _is_on_cpus(best):
        return in_time[start][0]
    cpus = np.array([devices(c) for c, _ in in_time])
    nodes = np.array([sum(g.nodes for g in c.groups) for c, _ in in_time])
    times = np.array([each for _, each in in_time])
    at = without_idle_cpus(times, cpus, nodes, start)
    tied = (cpus == cpus[at]) & (nodes == nodes[at]) & (times <= times[at] * (1 + INDISTINCT))
    return in_time[int(np.argmax(tied))][0]  # the first that ties


def _is_on_cpus(choice: Choice) -> bool:
    return not any(g.is_gpu for g in choice.groups)
