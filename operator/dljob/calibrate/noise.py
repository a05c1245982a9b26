"""Noise scales of runs become that of a model on its data, as DLProfile objects keep it.

φ belongs to a model, its data and how it is trained, not to a device; a profile of each device that took part keeps it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, isfinite, log

LEAST_STEPS = 50
"""Measured steps without which a run teaches nothing."""
MAX_RUNS = 5
"""Runs that a figure remembers at most: learning rates and lengths of trainings change, and φ with them."""
_LEAST_SAMPLES = 1.0
"""No batch is smaller, so less noise chooses nothing else; and the mean is taken in the logarithm, where a run that saw
none at all, such as one whose ranks had the same samples, must not outweigh the others."""


@dataclass(frozen=True)
class NoiseOf:
    """The gradient noise scale, measured on some data."""

    data: str
    """Which: a built-in set's name, or a digest of a URI."""
    samples: float
    steps: int
    """Measured in all runs behind the figure."""
    runs: int = 1


def after(before: NoiseOf | None, run: NoiseOf) -> NoiseOf | None:
    """What is known after a run more: the mean in the logarithm over the last ones; of other data, the run's alone."""
    if run.steps < LEAST_STEPS or not (isfinite(run.samples) and run.samples >= 0):
        return before
    run = replace(run, samples=max(_LEAST_SAMPLES, run.samples), runs=1)
    if before is None or before.data != run.data:
        return run
    weight = min(before.runs, MAX_RUNS - 1)
    mean = (weight * log(before.samples) + log(run.samples)) / (weight + 1)
    return NoiseOf(run.data, exp(mean), min(2**53, before.steps + run.steps), weight + 1)


def known(profiles: Mapping[str, NoiseOf | None], data: str) -> NoiseOf | None:
    """Of all profiles of a model, by device: what most runs on this data told."""
    found = [noise for _, noise in sorted(profiles.items()) if noise is not None and noise.data == data]
    return max(found, key=lambda noise: (noise.runs, noise.steps), default=None)
