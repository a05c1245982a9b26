"""Task: predict the time over the batch size on one device from its smallest, middle and largest batch."""

from collections.abc import Callable, Mapping

import numpy as np
from benchmarks.perfmodel.models.few_points import through
from benchmarks.perfmodel.scoring.compare import compared
from benchmarks.perfmodel.scoring.scoring import Floats, ape
from benchmarks.perfmodel.scoring.table import Options, Table

from dljob.perf.fit.few_points import line

Curves = Mapping[tuple[str, str], Mapping[int, float]]
"""(device, workload) → batch → seconds."""


def probes(batches: list[int]) -> list[int]:
    """Return the smallest, middle and largest of the measured batch sizes."""
    ordered = sorted(batches)
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def model(given: list[tuple[float, float]], queried: Floats) -> Floats:
    return through(given).seconds_array(queried)


def affine(given: list[tuple[float, float]], queried: Floats) -> Floats:
    overhead, slope = line(*(np.array(column) for column in zip(*given, strict=True)))
    return np.asarray(overhead + slope * queried)


def linear(given: list[tuple[float, float]], queried: Floats) -> Floats:
    batches, times = zip(*given, strict=True)
    return np.asarray(np.interp(queried, batches, times))


METHODS: Mapping[str, Callable[[list[tuple[float, float]], Floats], Floats]] = {
    "model": model,
    "affine": affine,
    "piecewise linear": linear,
}


def table(curves: Curves, options: Options, note: str = "", name: str = "") -> Table:
    """Score all curves of at least four batch sizes; each curve is a group."""
    errors: dict[str, dict[str, Floats]] = {label: {} for label in METHODS}
    for (device, workload), curve in curves.items():
        if len(curve) < 4:
            continue
        given = probes(list(curve))
        queried = [b for b in sorted(curve) if b not in given]
        measured = np.array([curve[b] for b in queried])
        for label, method in METHODS.items():
            predicted = method([(float(b), curve[b]) for b in given], np.array(queried, dtype=float))
            errors[label][f"{device} {workload}"] = ape(measured, predicted)
    return compared(f"{name or 'One device'}: batch → time from three batches", errors, options, note)
