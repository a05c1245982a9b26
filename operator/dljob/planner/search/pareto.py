"""Trade-offs: the Pareto front of plans in time, energy and cost."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dljob.planner.search.screen import Screened
from dljob.planner.types import Choice, Prediction

MAX_SHOWN = 6
"""Maximum number of plans shown. Of a longer front, both ends and evenly spaced plans between them are shown."""


def promising(found: Screened, most: int) -> NDArray[np.intp]:
    """Return rows from the fastest to the most frugal, each with less energy or lower cost than all faster ones.

    At most ``most`` rows are returned, evenly chosen with both ends, fastest first. A row between two others in both
    energy and cost is not included, even if neither of the two dominates it.
    """
    order = np.lexsort((found.usd, found.energy_J, found.step_s))
    order = order[np.isfinite(found.step_s[order])]
    least = [np.minimum.accumulate(values[order]) for values in (found.energy_J, found.usd)]
    better = [np.r_[True, values[1:] < values[:-1]] for values in least]
    return order[_spread(np.flatnonzero(better[0] | better[1]), most)]


def front(chosen: Choice, choices: Sequence[Choice], tolerance: float) -> tuple[Choice, ...]:
    """Return the chosen plan and those that no other plan dominates, fastest first; at most ``MAX_SHOWN``.

    A plan is dropped if another one is as good or better in every criterion within ``tolerance`` (relative).
    Energy and cost count only if they are known for all plans.
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
    """Return at most ``most`` of the indices, evenly spaced, with the first and the last."""
    if len(indices) <= most:
        return indices
    return indices[np.unique(np.linspace(0, len(indices) - 1, most).round().astype(np.intp))]
