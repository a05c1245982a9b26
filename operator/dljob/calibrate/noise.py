"""Calibration of the gradient noise scale φ of a model on its data.

φ is the batch size at which the noise of the gradient is as large as the gradient, so that larger batches save few
steps. φ depends on the model, its data and its training, but not on the device. After a run, the DLProfiles of all
devices that took part store φ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, isfinite, log

MIN_STEPS = 50
"""Minimum number of steps in which a run must measure the noise scale. Shorter runs are ignored."""
MAX_RUNS = 5
"""Maximum number of runs that count in the mean of the noise scale.

Older runs count less, because the noise scale changes with the learning rate and the length of the training."""
_MIN_SAMPLES = 1.0
"""Lower bound of the noise scale in samples. No batch is smaller than one sample, so a lower value would not change the
choice of the batch size. Without the bound, a run that measured zero (for example with the same samples on all ranks)
would dominate the mean of logarithms."""


@dataclass(frozen=True)
class NoiseOf:
    """The gradient noise scale of a model, measured on one dataset. ``samples``: its value, in samples."""

    data: str
    """The dataset: the name of a built-in dataset, or a digest of a URI."""
    samples: float
    steps: int
    """Number of measured steps in all runs so far."""
    runs: int = 1


def after(before: NoiseOf | None, run: NoiseOf) -> NoiseOf | None:
    """Return the stored noise scale ``before``, updated with that of one more run: a geometric mean over runs.

    At most ``MAX_RUNS`` runs count. If ``before`` is None or of another dataset, return the run's noise scale. If the
    run has measured fewer than ``MIN_STEPS`` steps or its value is invalid, return ``before``, even if it is None.
    """
    if run.steps < MIN_STEPS or not (isfinite(run.samples) and run.samples >= 0):
        return before
    run = replace(run, samples=max(_MIN_SAMPLES, run.samples), runs=1)
    if before is None or before.data != run.data:
        return run
    weight = min(before.runs, MAX_RUNS - 1)
    mean = (weight * log(before.samples) + log(run.samples)) / (weight + 1)
    return NoiseOf(run.data, exp(mean), min(2**53, before.steps + run.steps), weight + 1)


def known(profiles: Mapping[tuple[str, str], NoiseOf | None], data: str) -> NoiseOf | None:
    """Return the gradient noise scale that was measured in the most runs on the dataset ``data``.

    Return None if no profile has one for this dataset. ``profiles``: (model key, device type) → noise scale
    in this profile; None if it was not measured.
    """
    found = [noise for _, noise in sorted(profiles.items()) if noise is not None and noise.data == data]
    return max(found, key=lambda noise: (noise.runs, noise.steps), default=None)
