"""Trade-offs: the Pareto front of plans in time, energy and cost."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dljob.planner.search.screen import Screened
from dljob.planner.types import Choice, Prediction

MAX_SHOWN = 6
"""Maximum number of plans to show. A longer front is thinned to evenly spaced plans, including both ends."""


def promising(found: Screened, most: int) -> NDArray[np.intp]:
    """Return the indices of candidates that need less energy or cost less than all faster candidates; fastest first.

    If there are more than ``most``, return at most ``most`` evenly spaced ones, including both ends. The result can
    lack non-dominated candidates: those that one faster candidate beats in energy and another one in cost.
    """
    order = np.lexsort((found.usd, found.energy_J, found.step_s))
    order = order[np.isfinite(found.step_s[order])]
    least = [np.minimum.accumulate(values[order]) for values in (found.energy_J, found.usd)]
    better = [np.r_[True, values[1:] < values[:-1]][: len(order)] for values in least]
    return order[_spread(np.flatnonzero(better[0] | better[1]), most)]


def front(chosen: Choice, choices: Sequence[Choice], tolerance: float) -> tuple[Choice, ...]:
    """Return the Pareto front in time, energy and cost, fastest plan first: at most ``MAX_SHOWN`` plans.

    It has the chosen plan, and the plans that no other plan dominates. Plan A dominates plan B if A is better, equal,
    or worse by at most the relative ``tolerance`` in every criterion. Energy and cost are criteria only if every plan
    has them.
    """
    listed = sorted({id(c): c for c in choices if c is not chosen}.values(), key=lambda c: _criteria(c.prediction))
    kept = [chosen]
    known = [i for i, values in enumerate(zip(*map(_known, (chosen, *listed)), strict=True)) if all(values)]
    for choice in listed:
        own = _criteria(choice.prediction)
        shown = (_criteria(other.prediction) for other in kept)
        if not any(all(other[i] <= own[i] * (1 + tolerance) for i in known) for other in shown):
            kept.append(choice)
    kept.sort(key=lambda c: _criteria(c.prediction))
    if len(kept) > MAX_SHOWN:
        others = np.array([i for i, choice in enumerate(kept) if choice is not chosen])
        kept = [kept[i] for i in sorted({*_spread(others, MAX_SHOWN - 1).tolist(), kept.index(chosen)})]
    return tuple(kept)


def _criteria(p: Prediction) -> tuple[float, float, float]:
    return p.total_s, p.energy_J or 0.0, p.cost_usd or 0.0


def _known(choice: Choice) -> tuple[bool, bool, bool]:
    return True, choice.prediction.energy_J is not None, choice.prediction.cost_usd is not None


def _spread(indices: NDArray[np.intp], most: int) -> NDArray[np.intp]:
    """Return at most ``most`` evenly spaced indices, including the first and the last."""
    if len(indices) <= most:
        return indices
    return indices[np.unique(np.linspace(0, len(indices) - 1, most).round().astype(np.intp))]
