"""Runs on several devices become the constants of their profile: what they teach, bounded, whatever they report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, log

import numpy as np

from dljob.calibrate.compute import ABSURD
from dljob.calibrate.learned import Place, StepPoint
from dljob.calibrate.probes import MAX_PROBES, next_probe
from dljob.calibrate.scaling import Posterior, fit
from dljob.perf.fit.scaling import Constants, Contention, Runs
from dljob.perf.step.step import P90

MAX_PLACES = 64
MAX_RUNS = 20
"""Runs that a point remembers at most: later ones always weigh something."""
_ALONE = 1e6
"""Computing or communication so many times longer than the other is all there is to a step."""


@dataclass(frozen=True)
class Scaling:
    """What steps on several devices taught."""

    constants: Constants
    reference_s: float
    compute_deviation: float
    """Standard deviation of log(measured / predicted) where computing is all there is to a step ..."""
    communication_deviation: float
    """... and where communication is."""

    @property
    def contention(self) -> Contention:
        return Contention(self.constants.sharing, self.constants.crowding)


def remembered(points: Sequence[StepPoint], new: StepPoint, one_s: Callable[[int], float]) -> tuple[StepPoint, ...]:
    """The points after a run more; equal places and batches are averaged in the logarithm, the least seen ones go.

    A time that is none, or less than a hundredth or more than a hundred times what one device needs and what the same
    place needed before, changes nothing.
    """
    known = {(p.place, p.batch): p for p in points}
    old = known.get((new.place, new.batch))
    expected_s = old.step_s if old else one_s(new.batch)
    possible = isfinite(new.step_s) and new.step_s > 0 and new.place.devices > 1 and new.batch >= 1
    if not possible or abs(log(new.step_s / expected_s)) > log(ABSURD):
        return tuple(points)
    if old is not None:
        weight = min(old.observations, MAX_RUNS - 1)
        mean = (weight * log(old.step_s) + log(new.step_s)) / (weight + 1)
        new = replace(new, step_s=exp(mean), observations=weight + 1)
    others = [p for key, p in known.items() if key != (new.place, new.batch)]
    kept = sorted(others, key=lambda p: -p.observations)[: MAX_PLACES - 1]
    order = {(p.place, p.batch): i for i, p in enumerate([*points, new])}
    return tuple(sorted([*kept, new], key=lambda p: order[p.place, p.batch]))


def learn_scaling(points: Sequence[StepPoint], one_s: Callable[[int], float], reference_s: float) -> Scaling | None:
    """The constants; None of no points. ``one_s``: seconds of a batch on one device alone."""
    if not points:
        return None
    posterior = fit(reference_s, _runs(points, one_s), np.array([p.step_s for p in points]))
    at, c = points[-1:], posterior.constants
    return Scaling(
        constants=c,
        reference_s=reference_s,
        compute_deviation=_deviation(posterior, _runs(at, lambda batch: _ALONE * one_s(batch))),
        communication_deviation=_deviation(posterior, _runs(at, lambda batch: one_s(batch) / _ALONE)),
    )


def next_place(
    points: Sequence[StepPoint], one_s: Callable[[int], float], reference_s: float
) -> tuple[Place, int] | None:
    """Where to measure next, and with which batch on each device, after these; None of none or of enough.

    Of places with powers of two of nodes, up to twice those seen, and of devices on each, up to those seen, at the
    batches seen. Three batches are enough to choose from.
    """
    if not points or len(points) >= MAX_PROBES:
        return None
    nodes = _powers(2 * max(p.place.nodes for p in points))
    each = _powers(max(p.place.node_devices for p in points))
    batches = sorted({p.batch for p in points})
    batches = sorted({batches[0], batches[len(batches) // 2], batches[-1]})
    name = points[-1].place.collective
    asked = [StepPoint(Place(n, k, name), b, 1.0) for n in nodes for k in each for b in batches if n * k > 1]
    posterior = fit(reference_s, _runs(points, one_s), np.array([p.step_s for p in points]))
    seen = {(p.place, p.batch) for p in points}
    known = [i for i, p in enumerate(asked) if (p.place, p.batch) in seen]
    at = next_probe(posterior, _runs(asked, one_s), known)
    return None if at is None else (asked[at].place, asked[at].batch)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def _runs(points: Sequence[StepPoint], one_s: Callable[[int], float]) -> Runs:
    columns = [(p.place.nodes, p.place.node_devices, p.place.devices, p.batch, one_s(p.batch)) for p in points]
    return Runs(*np.array(columns, dtype=float).T)


def _deviation(posterior: Posterior, runs: Runs) -> float:
    """Of the logarithm: nine of ten lie below the upper end of the interval of 80 %."""
    found = posterior.predict(runs, 0.8)
    return float(np.log(found.high_s / found.median_s)[0] / P90)
