"""Accumulate the residuals of a regression, merge them over ranks, and compute the metrics of all of them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dltrain.analysis.result import MAX_POINTS, MAX_WRONG, Regression, WrongExample
from dltrain.analysis.rounding import rounded

PROBABILITIES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
LARGEST = 1e140
"""Larger values count as infinite, because their squares, or sums of these, would be."""
_GROWTH = 1.02
_SMALLEST = 1e-12
"""Quantiles come from counts of residuals in bins whose ends grow by the factor ``_GROWTH``, from ``_SMALLEST`` on.

The middle of a bin is within 1 % of each residual in it. The counts are sums, so they do not depend on how ranks divide
the samples (Masson et al. 2019, "DDSketch").
"""


class ResidualPart:
    """The residuals that one rank has seen. Moments are merged as in Chan et al. 1979, which is numerically stable."""

    def __init__(self) -> None:
        self.samples = self.invalid = 0
        self.sum = self.absolute = self.squared = 0.0
        """Sums over residuals: their values, absolute values and squares."""
        self.target_mean = self.target_deviation = 0.0
        """Mean of the targets, and sum of their squared deviations from it."""
        self.low, self.high = np.inf, -np.inf
        self.bins: Counter[int] = Counter()
        """Number of residuals by bin. The sign of a bin's number is that of its residuals; 0: about 0."""
        self.points: list[tuple[int, float, float]] = []
        """(hash, target, prediction) of the samples with the lowest hashes: a random sample that no split changes."""
        self.wrong: list[tuple[float, int, float, float]] = []
        """The largest residuals, as (-absolute value, index, target, prediction), in order."""

    def add(self, predictions: NDArray[Any], targets: NDArray[Any], index: NDArray[np.int64]) -> None:
        """Add a batch: arrays of equal shape (n, …). ``index``: number of each sample in the held-out data.

        Raise ValueError if the shapes differ.
        """
        shape = predictions.shape
        if predictions.size != targets.size or shape[:1] != targets.shape[:1]:
            raise ValueError(
                f"predictions: found shape {shape} for targets of shape {targets.shape}; expected equal shapes. "
                "Reshape the predictions"
            )
        predicted, target = (each.astype(np.float64).reshape(-1) for each in (predictions, targets))
        index = np.repeat(index, predicted.size // max(1, len(index)))
        valid = (np.abs(predicted) < LARGEST) & (np.abs(target) < LARGEST)  # False for NaN, too.
        self.invalid += int((~valid).sum())
        predicted, target, index = predicted[valid], target[valid], index[valid]
        if not len(predicted):
            return
        residual = predicted - target
        other = ResidualPart()
        other.samples = len(residual)
        other.sum, other.absolute = float(residual.sum()), float(np.abs(residual).sum())
        other.squared = float(residual @ residual)
        other.target_mean = float(target.mean())
        other.target_deviation = float(((target - other.target_mean) ** 2).sum())
        other.low, other.high = float(residual.min()), float(residual.max())
        size = np.maximum(np.abs(residual), _SMALLEST)
        numbers = np.sign(residual) * (1 + np.ceil(np.log(size / _SMALLEST) / np.log(_GROWTH)))
        numbers[size <= _SMALLEST] = 0
        found, counts = np.unique(numbers.astype(np.int64), return_counts=True)
        other.bins = Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        hashes = _hash(target, predicted)
        lowest = np.argsort(hashes, kind="stable")[:MAX_POINTS]
        other.points = sorted((int(hashes[n]), float(target[n]), float(predicted[n])) for n in lowest)
        worst = np.lexsort((index, -np.abs(residual)))[:MAX_WRONG]
        other.wrong = [(-float(abs(residual[n])), int(index[n]), float(target[n]), float(predicted[n])) for n in worst]
        self.merge(other)

    def state(self) -> dict[str, Any]:
        """Return the content for JSON, from which ``of_state`` makes an equal part."""
        sums = [self.sum, self.absolute, self.squared, self.target_mean, self.target_deviation]
        return {
            "counts": [self.samples, self.invalid],
            "sums": sums,
            "ends": [self.low, self.high] if self.samples else None,
            "bins": list(self.bins.items()),
            "points": self.points,
            "wrong": self.wrong,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], offset: int = 0) -> Self:
        """Return the part from ``state``, a result of the method ``state``. ``offset``: added to sample numbers."""
        part = cls()
        part.samples, part.invalid = state["counts"]
        part.sum, part.absolute, part.squared, part.target_mean, part.target_deviation = state["sums"]
        part.low, part.high = state["ends"] or (np.inf, -np.inf)
        part.bins = Counter(dict(state["bins"]))
        part.points = [(key, target, predicted) for key, target, predicted in state["points"]]
        part.wrong = [(key, index + offset, target, predicted) for key, index, target, predicted in state["wrong"]]
        return part

    def merge(self, other: "ResidualPart") -> None:
        """Add the residuals of another rank."""
        self.invalid += other.invalid
        if not other.samples:
            return
        samples = self.samples + other.samples
        apart = other.target_mean - self.target_mean
        self.target_deviation += other.target_deviation + apart**2 * self.samples * other.samples / samples
        self.target_mean += apart * other.samples / samples
        self.samples = samples
        self.sum += other.sum
        self.absolute += other.absolute
        self.squared += other.squared
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.bins += other.bins
        self.points = sorted([*self.points, *other.points])[:MAX_POINTS]
        self.wrong = sorted([*self.wrong, *other.wrong])[:MAX_WRONG]

    def regression(self) -> Regression:
        """Return the metrics of a regression, such as its root mean squared error."""
        count = max(1, self.samples)
        spread = self.target_deviation > 1e-12 * count * max(self.target_mean**2, 1e-12)
        return Regression(
            bias=rounded(self.sum / count),
            rmse=rounded((self.squared / count) ** 0.5),
            mae=rounded(self.absolute / count),
            r2=rounded(1 - self.squared / self.target_deviation) if spread else None,
            baseline_rmse=rounded((self.target_deviation / count) ** 0.5),
            quantiles=tuple((p, rounded(self._quantile(p))) for p in PROBABILITIES) if self.samples else (),
            points=tuple((rounded(target), rounded(predicted)) for _, target, predicted in sorted(self.points)),
            wrong=tuple(
                WrongExample(index, f"{target:.6g}", f"{predicted:.6g}") for _, index, target, predicted in self.wrong
            ),
        )

    def _quantile(self, probability: float) -> float:
        if probability in (0.0, 1.0):
            return self.high if probability else self.low
        left = probability * (self.samples - 1)
        for number in sorted(self.bins):
            left -= self.bins[number]
            if left < 0:
                break
        size = _SMALLEST * _GROWTH ** (abs(number) - 1) * 2 / (1 + _GROWTH) if number else 0.0
        return float(np.clip(np.sign(number) * size, self.low, self.high))


def _hash(target: NDArray[np.float64], predicted: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return a number below 2**53 for each pair, which looks random and depends on the pair alone."""
    mixed = target.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ predicted.view(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed ^ (mixed >> np.uint64(32))) >> np.uint64(11)
