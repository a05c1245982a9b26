"""Calibration from runs on several devices: fit the profile's constants of communication and scaling.

Measured step times are averaged for each placement and batch size, and implausible ones are ignored. ``next_place``
chooses the run that should be measured next.
"""

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
"""Maximum number of runs that count in the mean of a ``StepPoint``, so that later runs keep some weight."""
_ALONE = 1e6
"""Factor by which the communication time is changed to predict a step that only computes, or that only communicates.

Divided by this factor, the communication time is negligible. Multiplied by it, it makes computing negligible.
"""


@dataclass(frozen=True)
class Scaling:
    """Constants of the performance model, fitted to measured steps on several devices.

    ``reference_s``: the typical step time on one device, in seconds. It is the unit of the times in ``constants``.
    """

    constants: Constants
    reference_s: float
    compute_deviation: float
    """Standard deviation of log(measured / predicted) for a step that only computes."""
    communication_deviation: float
    """Standard deviation of log(measured / predicted) for a step that only communicates."""

    @property
    def contention(self) -> Contention:
        return Contention(self.constants.sharing, self.constants.crowding)


def remembered(points: Sequence[StepPoint], new: StepPoint, one_s: Callable[[int], float]) -> tuple[StepPoint, ...]:
    """Return ``points``, the measured steps on several devices, updated with the step ``new`` of one more run.

    Times of equal placements and batches are averaged in the logarithm. If there are more than ``MAX_PLACES`` points,
    those with the fewest observations are dropped. An invalid time is ignored, and so is a time that differs by more
    than a factor ``ABSURD`` from the expected time. The expected time is the earlier time of the same placement and
    batch or, if there is none, ``one_s(batch)``, the step time on one device.
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
    """Fit the constants that predict a step on several devices from a step on one device; None without points.

    ``points``: steps measured on several devices. ``one_s``: function from the batch of a device to the step seconds
    if this device trains alone. ``reference_s``: a typical value of ``one_s``, in seconds. It is the unit of the times
    in the constants, so that they suit short and long steps.
    """
    if not points:
        return None
    posterior = fit(reference_s, _runs(points, one_s), np.array([p.step_s for p in points]))
    at, c = points[-1:], posterior.constants
    return Scaling(
        constants=c,
        reference_s=reference_s,
        compute_deviation=_deviation(posterior, _runs(at, one_s, 1 / _ALONE)),
        communication_deviation=_deviation(posterior, _runs(at, one_s, _ALONE)),
    )


def next_place(
    points: Sequence[StepPoint], one_s: Callable[[int], float], reference_s: float
) -> tuple[Place, int] | None:
    """Return the (placement, batch per device) of the run whose measurement would improve predictions most.

    Return None without points, with at least ``MAX_PROBES`` points, or if all candidates were measured. A candidate is
    a run on at least two devices. Its number of nodes is a power of two, up to twice the largest measured number. Its
    number of devices per node is a power of two, up to the largest measured number. Its batch is the smallest, the
    middle or the largest measured one.

    ``points``: the steps measured so far. ``one_s``: function from a batch to its step seconds on one device.
    ``reference_s``: a typical value of ``one_s``.
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


def _runs(points: Sequence[StepPoint], one_s: Callable[[int], float], communication_ratio: float = 1.0) -> Runs:
    columns = [(p.place.nodes, p.place.node_devices, p.place.devices, p.batch, one_s(p.batch)) for p in points]
    nodes, busiest, devices, batch, alone_s = np.array(columns, dtype=float).T
    ratio = np.full(len(points), communication_ratio)
    return Runs(nodes, busiest, devices, batch, alone_s, communication_ratio=ratio)


def _deviation(posterior: Posterior, runs: Runs) -> float:
    """Return the standard deviation of log(step time) that ``posterior`` predicts for the first run in ``runs``.

    It is derived from the predicted 90th percentile of this run, which is the upper end of the 80 % interval.
    """
    found = posterior.predict(runs, 0.8)
    return float(np.log(found.high_s / found.median_s)[0] / P90)
