"""The gradient noise scale: the batch size up to which larger batches save steps.

Ranks process different samples, so their gradients differ only by noise. Two norms suffice to estimate tr Σ, the
variance of the gradient of one sample, and |G|², the squared norm of the true gradient. φ = tr Σ / |G|² is the batch
size at which the noise of the gradient is as large as the gradient (McCandlish et al. 2018, "simple" noise scale). φ
cannot be measured with one rank.

φ grows while a model trains, often a hundredfold. The planner needs to know how many steps a run would have needed with
another batch size B'. A step with batch size B makes the fraction B / (φ + B) of the progress of a step without noise.
Let φ_t be the value of φ at step t, and h the mean of B / (φ_t + B) over the steps of the run. Then

    steps(B') / steps(B) = (φ/B' + 1) / (φ/B + 1)    where   φ = B (1/h - 1),

exactly, for every B'. Runs with other batch sizes have the same φ. A run therefore reports this harmonic mean, and
not a median. If g is the gradient of a batch and E|g|² the mean of its squared norm, then h = |G|² / E|g|² is between 0
and 1. h is estimated by ratios of means over up to 16 sections of the run, because ratios of single steps would be
biased.
"""

from math import isfinite, sqrt
from typing import Any

from dlcontract import MAX_NOISE

MAX_STRIDE = 10
"""Maximum number of steps from one measurement to the next.

Measuring at every step made the steps of a small model 10 % longer with a quota of 0.2 CPUs for each rank.
"""
MIN_MEASUREMENTS = 60
"""Number of measurements that a run should have. The interval between measurements is shortened in short runs.

The operator requires fewer measurements to store a run's noise scale for later plans, so some may be missing.
"""
MAX_STRETCHES = 16
"""Maximum number of sections of a run, each with its own sums of measurements.

When a further section would begin, each two neighbouring sections are merged, so that memory is bounded."""
MIN_STEPS = 16
"""Minimum number of measured steps for an estimate of the noise scale."""


def stride(steps: int) -> int:
    """Return the interval between measurements, in steps, for a training of ``steps`` steps; 0: unknown."""
    return max(1, min(MAX_STRIDE, steps // MIN_MEASUREMENTS if steps else MAX_STRIDE))


def estimates(within: float, together: float, ranks: int, batch: int) -> tuple[float, float]:
    """Return estimates of (tr Σ, |G|²) from the gradients of one step.

    tr Σ is the variance of the gradient of one sample, and |G|² the squared norm of the true gradient. The estimate of
    |G|² may be negative, because it is a difference. Rank r has b_r of the B = ``batch`` samples and the gradient g_r.
    ``within``: Σ (b_r / B) ‖g_r‖² over ``ranks`` >= 2 ranks with samples; its expectation is |G|² + tr Σ ranks / B.
    ``together``: ‖Σ (b_r / B) g_r‖²; its expectation is |G|² + tr Σ / B.
    """
    noise = max(0.0, within - together) * batch / (ranks - 1)
    return noise, together - noise / batch


class NoiseScale:
    """The gradient noise scale of one run, whose batch size does not change. Checkpoints contain its ``state``."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._length = 1
        """Number of measured steps in a complete section of the run."""
        self._stretches: list[list[float]] = []
        """For each section: [number of measured steps, sum of the estimates of tr Σ, sum of squared gradient norms]."""

    @property
    def steps(self) -> int:
        """Return the number of measured steps."""
        return round(sum(stretch[0] for stretch in self._stretches))

    @property
    def samples(self) -> float | None:
        """Return the noise scale in samples, or None if it is unknown.

        If the noise is too large to measure the true gradient, return a lower bound of the noise scale.
        """
        if self.steps < MIN_STEPS:
            return None
        means = [(n, 1 - noise / (self._batch * square)) for n, noise, square in self._stretches if square > 0]
        total = sum(n for n, _ in means)
        if len(means) < 2 or not total:
            return None
        share = sum(n * h for n, h in means) / total
        error = sqrt(sum(n * (h - share) ** 2 for n, h in means) / total / (len(means) - 1))
        least = max(share, error)
        if not least > 0 or error >= 1:
            return None  # a lower bound of 0 has no information
        found = max(0.0, self._batch * (1 / least - 1))
        return found if found <= MAX_NOISE else None  # a larger value would be invalid in the job's report

    def observe(self, within: float, together: float, ranks: int) -> None:
        """Add the squared gradient norms of a step. Do nothing with one rank, and if a norm is not finite.

        ``within``: weighted mean of the squared norms of the local gradients of the ``ranks`` ranks. ``together``:
        squared norm of the global gradient. ``estimates`` has the formulas.
        """
        if ranks < 2 or not (isfinite(within) and isfinite(together)):
            return
        noise, _ = estimates(within, together, ranks, self._batch)
        if not self._stretches or self._stretches[-1][0] >= self._length:
            if len(self._stretches) == MAX_STRETCHES:
                pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
                self._stretches = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
                self._length *= 2
            self._stretches.append([0.0, 0.0, 0.0])
        last = self._stretches[-1]
        last[0], last[1], last[2] = last[0] + 1, last[1] + noise, last[2] + together

    def state(self) -> list[Any]:
        return [self._length, self._stretches]

    def load(self, state: list[Any]) -> None:
        self._length, self._stretches = state[0], [list(stretch) for stretch in state[1]]
