"""Step time of a device as a function of its batch: a nondecreasing, piecewise-linear curve."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import le
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAME = 1 + 1e-9
"""Largest ratio of two batches that differ only by rounding."""
MAX_WHOLE = 2**40
"""Largest result of ``whole_samples``. Beyond it, rounding could hide the time of a single sample."""


@dataclass(frozen=True)
class Curve:
    """A device's step time as a function of its batch. It is linear between knots.

    A knot is a batch in samples (``batches``) with a time in seconds (``times_s``). Batches are at least 0 and
    increasing; times are positive and never decrease. Below the first knot, the time is constant. Beyond the last knot,
    it rises by ``slope_s`` seconds per sample.

    Of knots that differ only by rounding (``SAME``), the first remains, because there is no slope between them. They
    come from curves with the same knots that were computed in different ways.
    """

    batches: tuple[float, ...]
    times_s: tuple[float, ...]
    slope_s: float

    def __post_init__(self) -> None:
        assert len(self.batches) == len(self.times_s) >= 1, "a curve has a time for each batch"
        if any(a * SAME >= b for a, b in zip(self.batches, self.batches[1:], strict=False)):
            assert all(map(le, self.batches, self.batches[1:])), "batches rise"
            self._merge_knots()
        assert all(map(le, self.times_s, self.times_s[1:])), "times never fall"
        assert self.times_s[0] > 0 and self.slope_s > 0, "every sample costs time"

    def _merge_knots(self) -> None:
        kept = [0]
        for i in range(1, len(self.batches)):
            if self.batches[i] > self.batches[kept[-1]] * SAME:
                kept.append(i)
        object.__setattr__(self, "batches", tuple(self.batches[i] for i in kept))
        object.__setattr__(self, "times_s", tuple(self.times_s[i] for i in kept))

    def seconds(self, batch: float) -> float:
        """Return the seconds of a step on ``batch`` samples."""
        i = bisect_right(self.batches, batch) - 1
        if i < 0:
            return self.times_s[0]
        if i == len(self.batches) - 1:
            return self.times_s[i] + self.slope_s * (batch - self.batches[i])
        x0, x1, y0, y1 = self.batches[i], self.batches[i + 1], self.times_s[i], self.times_s[i + 1]
        return y0 + (y1 - y0) * (batch - x0) / (x1 - x0)

    def samples(self, seconds: float) -> float:
        """Return the number of samples, whole or not, that a step processes in ``seconds``; 0 if the time is too short.

        This method is the inverse of the method ``seconds``. See ``whole_samples`` for a whole number of samples.
        """
        i = bisect_right(self.times_s, seconds) - 1
        if i < 0:
            return 0.0
        if i == len(self.batches) - 1:
            return self.batches[i] + (seconds - self.times_s[i]) / self.slope_s
        x0, x1, y0, y1 = self.batches[i], self.batches[i + 1], self.times_s[i], self.times_s[i + 1]
        return x0 + (x1 - x0) * (seconds - y0) / (y1 - y0)

    def whole_samples(self, seconds: float) -> int:
        """Return the largest whole number of samples whose step takes at most ``seconds``; 0 if no batch does.

        The result is exact in spite of floating-point rounding. It is at most ``MAX_WHOLE``.
        """
        batch = int(min(self.samples(seconds), MAX_WHOLE))
        while batch < MAX_WHOLE and self.seconds(batch + 1) <= seconds:
            batch += 1
        while batch > 0 and self.seconds(batch) > seconds:
            batch -= 1
        return batch

    def samples_array(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``samples(t)`` for each time t in the array ``seconds``."""
        last_x, last_y = self.batches[-1], self.times_s[-1]
        inside: NDArray[Any] = np.interp(seconds, self.times_s, self.batches, left=0.0)
        return np.where(seconds >= last_y, last_x + (seconds - last_y) / self.slope_s, inside)

    def seconds_array(self, batches: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``seconds(b)`` for each batch b in the array ``batches``."""
        inside: NDArray[Any] = np.interp(batches, self.batches, self.times_s)
        return inside + self.slope_s * np.maximum(0.0, batches - self.batches[-1])

    def plus(self, per_sample_s: float) -> "Curve":
        """Return this curve plus a line: a step on b samples takes b times ``per_sample_s`` seconds longer.

        This is the time if each sample needs work that does not overlap with the rest of the step.
        """
        if not per_sample_s:
            return self
        ends = self._from_zero()
        times = tuple(t + per_sample_s * b for b, t in ends)
        return Curve(tuple(b for b, _ in ends), times, self.slope_s + per_sample_s)

    def later(self, seconds: float) -> "Curve":
        """Return this curve with ``seconds`` added to all times."""
        return Curve(self.batches, tuple(t + seconds for t in self.times_s), self.slope_s)

    def at_least(self, per_sample_s: float) -> "Curve":
        """Return the larger of this curve and b times ``per_sample_s`` seconds, at every batch of b samples.

        This is the time of a step that ends when two parallel tasks have ended: computing, as in this curve, and other
        work that takes ``per_sample_s`` seconds per sample.
        """
        ends = self._from_zero()
        last_x, last_y = ends[-1]
        over_s = last_y - per_sample_s * last_x
        crossings = [last_x + over_s / (per_sample_s - self.slope_s)] if per_sample_s != self.slope_s else []
        for (x0, y0), (x1, y1) in pairwise(ends):
            slope = (y1 - y0) / (x1 - x0)
            if slope != per_sample_s:
                crossings += [x for x in [x0 + (y0 - per_sample_s * x0) / (per_sample_s - slope)] if x0 < x < x1]
        at = sorted({*(x for x, _ in ends), *(x for x in crossings if x > 0)})
        times = [max(self.seconds(x), per_sample_s * x) for x in at]
        return Curve(tuple(at), tuple(nondecreasing(times, [1.0] * len(times))), max(self.slope_s, per_sample_s))

    def _from_zero(self) -> tuple[tuple[float, float], ...]:
        """Return the knots as (batch, seconds) pairs. If no knot is at batch 0, add one with the first knot's time."""
        first = ((0.0, self.times_s[0]),) if self.batches[0] > 0 else ()
        return (*first, *zip(self.batches, self.times_s, strict=True))

    def scaled(self, factor: float) -> "Curve":
        """Return this curve with all times multiplied by ``factor``."""
        if factor == 1.0:
            return self
        return Curve(self.batches, tuple(factor * t for t in self.times_s), factor * self.slope_s)


def nondecreasing(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the nondecreasing sequence with the least weighted squared distance from ``values``.

    ``weights``: weight of each value's squared distance. The result is as long as ``values``. It removes noise from
    measured times, because true step times never decrease with the batch. The algorithm is pool adjacent violators
    (Barlow et al. 1972).
    """
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (v0, w0, n0), (v1, w1, n1) = blocks[-2:]
            blocks[-2:] = [((v0 * w0 + v1 * w1) / (w0 + w1), w0 + w1, n0 + n1)]
    return [value for value, _, n in blocks for _ in range(n)]
