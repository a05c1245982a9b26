"""Ratios of measured step times of one device to its nondecreasing curve.

A curve never decreases, because splits of a batch need that. Measured times may: libraries choose other algorithms for
other batches. For example, a K80 needs 204 ms for 16 samples of ResNet-18, and 127 ms for 32 (Gavel, OSDI 2020). Steps
on several devices have the same ratios (docs/design/0006).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dljob.perf.fit.curve import Curve
from dljob.perf.fit.fitting import Floats


@dataclass(frozen=True)
class MeasuredRatio:
    """Measured time / time of the curve, as a function of the batch.

    It is given at measured ``batches``, which are increasing, by its logarithm (``logs``). The logarithm is linear
    between them, and constant beyond the first and the last one. Without batches, the ratio is 1.
    """

    batches: tuple[float, ...] = ()
    logs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.batches) == len(self.logs), "a ratio has a logarithm for each batch"
        assert all(a < b for a, b in zip(self.batches, self.batches[1:], strict=False)), "batches rise"

    def at(self, batch: float) -> float:
        """Return the ratio at ``batch`` samples."""
        return float(self.at_all(np.array([batch]))[0])

    def at_all(self, batches: Floats) -> Floats:
        """Return the ratio at each number of samples in ``batches``."""
        if not self.batches:
            return np.ones(len(batches))
        return np.asarray(np.exp(np.interp(batches, self.batches, self.logs)))


ON_CURVE = MeasuredRatio()
"""Ratio of measurements that are all on the curve, or of none."""


def measured_ratio(curve: Curve, points: Sequence[tuple[int, float]]) -> MeasuredRatio:
    """Return the ratios of measured (batch, seconds) points to ``curve``. Times of equal batches are averaged."""
    by_batch: dict[int, list[float]] = {}
    for batch, seconds in points:
        by_batch.setdefault(batch, []).append(seconds)
    means = {batch: sum(times) / len(times) for batch, times in sorted(by_batch.items())}
    logs = [float(np.log(mean_s / curve.seconds(batch))) for batch, mean_s in means.items()]
    if not any(abs(each) > 1e-9 for each in logs):
        return ON_CURVE
    return MeasuredRatio(tuple(map(float, means)), tuple(logs))
