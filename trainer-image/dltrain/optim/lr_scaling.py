"""By what the learning rate of a base batch is multiplied for the job's batch.

With S = batch / base batch: Linear S (Goyal et al. 2017), SquareRoot √S (Krizhevsky 2014), AdaScale a gain between 1
and S that is measured (Johnson et al. 2020): a larger batch helps as far as the gradient is noise, and no further.
Warm-up is ``lr``'s. Every rank computes the same from the same sums.
"""

from math import isfinite, sqrt

from dlcontract import OptimizerRef
from dltrain.optim.noise_scale import estimates


class Scaling:
    """The factor now; for AdaScale fed with the squares of each step's gradients."""

    def __init__(self, optimizer: OptimizerRef, batch: int) -> None:
        self._rule = optimizer.scaling
        self._base = optimizer.base_batch or batch
        self._batch = batch
        self._keep = max(0.0, 1 - batch / self._base / 1000)
        """Weight of the past in the means, as in the paper (section 4)."""
        self._seen = 0.0
        self._noise = self._signal = 0.0

    @property
    def measures(self) -> bool:
        return self._rule == "AdaScale"

    @property
    def factor(self) -> float:
        """Of the learning rate for the base batch. AdaScale without a measurement yet: the cautious √S."""
        scale = self._batch / self._base
        if self._rule is None:
            return 1.0
        if self._rule == "Linear":
            return scale
        if self._rule == "SquareRoot" or not self._seen:
            return sqrt(scale)
        noise, signal = self._noise / self._seen, max(0.0, self._signal / self._seen)
        rest = noise / self._batch + signal
        gain = (noise / self._base + signal) / rest if rest else scale
        return min(max(gain, min(1.0, scale)), max(1.0, scale))

    def observe(self, within: float, together: float, ranks: int) -> None:
        """Take in a step's gradients, as ``noise.estimates`` has them."""
        if ranks < 2 or not (isfinite(within) and isfinite(together)):
            return  # one gradient tells nothing of its noise
        noise, signal = estimates(within, together, ranks, self._batch)
        self._noise = self._keep * self._noise + noise
        self._signal = self._keep * self._signal + signal
        self._seen = self._keep * self._seen + 1

    def state(self) -> list[float]:
        return [self._seen, self._noise, self._signal]

    def load(self, state: list[float]) -> None:
        self._seen, self._noise, self._signal = state
