"""Calibration of the gradient noise scale φ of a model on its data, as DLProfile objects store it.

φ depends on the model, its data and its training, not on the device. The profile of each device that took part stores
it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, isfinite, log

MIN_STEPS = 50
"""Minimum number of measured steps of a run that counts."""
MAX_RUNS = 5
"""Maximum number of runs in the mean: φ changes with the learning rate and the length of training."""
_MIN_SAMPLES = 1.0
"""Lower bound of φ. No batch is smaller, so a lower value would not change the choice. The mean is taken in the
logarithm, so a run that measured zero, such as one whose ranks had the same samples, must not outweigh the others."""


@dataclass(frozen=True)
class NoiseOf:
    """The gradient noise scale, measured on some data."""

    data: str
    """The data: a built-in dataset's name, or a digest of a URI."""
    samples: float
    steps: int
    """Measured steps of all counted runs."""
    runs: int = 1


def after(before: NoiseOf | None, run: NoiseOf) -> NoiseOf | None:
    """Return the noise scale after one more run: the mean logarithm of the last runs, or the run's own on new data."""
    if run.steps < MIN_STEPS or not (isfinite(run.samples) and run.samples >= 0):
        return before
    run = replace(run, samples=max(_MIN_SAMPLES, run.samples), runs=1)
    if before is None or before.data != run.data:
        return run
    weight = min(before.runs, MAX_RUNS - 1)
    mean = (weight * log(before.samples) + log(run.samples)) / (weight + 1)
    return NoiseOf(run.data, exp(mean), min(2**53, before.steps + run.steps), weight + 1)


def known(profiles: Mapping[str, NoiseOf | None], data: str) -> NoiseOf | None:
    """Return the noise scale on ``data`` with the most runs among a model's ``profiles`` by device."""
    found = [noise for _, noise in sorted(profiles.items()) if noise is not None and noise.data == data]
    return max(found, key=lambda noise: (noise.runs, noise.steps), default=None)
