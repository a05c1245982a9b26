"""What better means: time, energy or cost, under a deadline."""

import numpy as np
from numpy.typing import NDArray

from dljob.planner.search.screen import Screened
from dljob.planner.types import Choice, Prediction, Request

STARTUP_S = 20.0
"""From apply to the first step, at most: counts towards a deadline."""
INDISTINCT = 0.02
"""Predictions that differ by less are the same: then fewer devices win (for time), or less time (for energy, cost)."""
LATE = 1e30
"""Added to the score of what misses the deadline, so that the least late comes first among the late ones."""


def meets(request: Request, total_p90_s: float) -> bool:
    """Whether the deadline, if any, is met with the 90th percentile of the prediction."""
    return request.deadline_s is None or total_p90_s + STARTUP_S <= request.deadline_s


def by_p90(request: Request) -> bool:
    """Whether least time is that of the 90th percentile: under a deadline, and where steps were measured."""
    return request.cautious or request.deadline_s is not None


def scores(request: Request, screened: Screened) -> NDArray[np.float64]:
    """Lower is better; infinite for what is no candidate."""
    time_s = screened.step_p90_s if by_p90(request) else screened.step_s
    wanted = {"Time": time_s, "Energy": screened.energy_J, "Cost": screened.usd}[request.minimize]
    if request.deadline_s is None or request.minimize == "Time":
        return np.where(np.isfinite(screened.step_s), wanted, np.inf)
    late = screened.step_p90_s * request.total_steps + STARTUP_S > request.deadline_s
    return np.where(np.isfinite(screened.step_s), np.where(late, LATE * (1 + screened.step_p90_s), wanted), np.inf)


def score(request: Request, prediction: Prediction) -> float:
    """The same for one prediction, over the whole training."""
    if request.minimize == "Time":
        return prediction.total_p90_s if by_p90(request) else prediction.total_s
    if not meets(request, prediction.total_p90_s):
        return LATE * (1 + prediction.step_p90_s)
    return (prediction.energy_J if request.minimize == "Energy" else prediction.cost_usd) or 0.0


def size(choice: Choice) -> int:
    """Ranks of a choice."""
    return sum(len(g.shares) for g in choice.groups)


def surely_better(request: Request, parts: Choice, whole: Choice) -> bool:
    """Whether a plan with parts of the model is better than one with whole models by more than what is uncertain of it.

    By time: even at its 90th percentile it takes less than the other's median; by energy or cost the same, for both go
    with time. Or it meets the deadline, and the other does not. No profile learns from parts, so that nothing would
    correct the choice of a split that merely seems better, while whole models are measured and planned better each
    time; and a split is never elastic.
    """
    p, q = parts.prediction, whole.prediction
    meets_it = meets(request, p.total_p90_s)
    if meets_it != meets(request, q.total_p90_s):
        return meets_it
    if request.minimize == "Time" or not meets_it:
        return p.total_p90_s < q.total_s
    return score(request, p) * p.total_p90_s / p.total_s < score(request, q)


def best(request: Request, choices: list[Choice]) -> Choice:
    """The best of at least one choice; parts of the model only where they are surely better, or whole ones fit nowhere.

    Among those that the model cannot tell apart, the smaller or the faster.
    """
    parts, whole = ([c for c in choices if c.in_parts is split] for split in (True, False))
    if not whole:
        return _best(request, parts)
    kept = _best(request, whole)
    return _best(request, [c for c in parts if surely_better(request, c, kept)] or [kept])


def _least_to_lose(choice: Choice) -> tuple[int, bool, float, float, str]:
    """Fewest ranks; then whole optimizer state on each, with which a job survives lost ranks; then the cheapest."""
    p = choice.prediction
    return size(choice), choice.strategy == "Optimizer", p.cost_usd or 0.0, p.total_s, choice.summary


def _best(request: Request, choices: list[Choice]) -> Choice:
    lowest = min(score(request, c.prediction) for c in choices)
    alike = [c for c in choices if score(request, c.prediction) <= lowest * (1 + INDISTINCT)]
    if request.minimize == "Time":
        return min(alike, key=_least_to_lose)
    return min(alike, key=lambda c: (c.prediction.total_s, size(c), c.summary))
