"""Trade-offs: the plans of which no other is better in time, energy or cost and worse in none (Pareto front)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dljob.planner.search.screen import Screened
from dljob.planner.types import Choice, Prediction

MAX_SHOWN = 6
"""Plans shown; of a longer front its ends and those between at even distances."""


def promising(found: Screened, most: int) -> NDArray[np.intp]:
    """Rows on the way from the fastest to the most frugal: each needs less energy or costs less than all faster ones.

    At most ``most`` of them, evenly chosen with both ends; fastest first. A row that is between two others in energy
    and cost alike, while each of them is best in one, is not among them.
    """
    order = np.lexsort((found.usd, found.energy_J, found.step_s))
    order = order[np.isfinite(found.step_s[order])]
    least = [np.minimum.accumulate(values[order]) for values in (found.energy_J, found.usd)]
    better = [np.r_[True, values[1:] < values[:-1]] for values in least]
    return order[_spread(np.flatnonzero(better[0] | better[1]), most)]


def front(chosen: Choice, choices: Sequence[Choice], alike: float) -> tuple[Choice, ...]:
    """The chosen one and those that no other dominates, fastest first; at most ``MOST``.

    What another one equals or beats in everything to within ``alike`` is left out. Energy or cost that is not known of
    all of them does not count.
    """
    listed = sorted({id(c): c for c in choices if c is not chosen}.values(), key=lambda c: _criteria(c.prediction))
    kept = [chosen]
    known = [i for i, values in enumerate(zip(*map(_known, (chosen, *listed)), strict=True)) if all(values)]
    for choice in listed:
        own = _criteria(choice.prediction)
        shown = (_criteria(other.prediction) for other in kept)
        if not any(all(other[i] <= own[i] * (1 + alike) for i in known) for other in shown):
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
    """At most so many of them, at even distances, the first and the last included."""
    if len(indices) <= most:
        return indices
    return indices[np.unique(np.linspace(0, len(indices) - 1, most).round().astype(np.intp))]
