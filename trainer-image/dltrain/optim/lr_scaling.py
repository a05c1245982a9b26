"""Scaling of the learning rate from a base batch size to the job's global batch size.

With S = batch / base batch, the factor is S for Linear (Goyal et al. 2017), √S for SquareRoot (Krizhevsky 2014), and a
measured gain between 1 and S for AdaScale (Johnson et al. 2020), because a larger batch helps only as far as gradients
are noisy. ``learning_rate`` adds the warm-up. Every rank computes the same factor from the same sums.
"""

from math import isfinite, sqrt

from dlcontract import OptimizerRef
from dltrain.optim.noise_scale import estimates


class Scaling:
    """The current factor. AdaScale needs the squared gradient norms of each step."""

    def __init__(self, optimizer: OptimizerRef, batch: int) -> None:
        self._rule = optimizer.scaling
        self._base = optimizer.base_batch or batch
        self._batch = batch
        self._keep = max(0.0, 1 - batch / self._base / 1000)
        """Decay of the running means, as in the paper (section 4)."""
        self._seen = 0.0
        self._noise = self._signal = 0.0

    @property
    def measures(self) -> bool:
        return self._rule == "AdaScale"

    @property
    def factor(self) -> float:
        """Return the factor on the base batch's learning rate. AdaScale uses the cautious √S before measurements."""
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
        """Add a step's squared gradient norms; see ``noise_scale.estimates``."""
        if ranks < 2 or not (isfinite(within) and isfinite(together)):
            return  # one gradient alone does not show its noise
        noise, signal = estimates(within, together, ranks, self._batch)
        self._noise = self._keep * self._noise + noise
        self._signal = self._keep * self._signal + signal
        self._seen = self._keep * self._seen + 1

    def state(self) -> list[float]:
        return [self._seen, self._noise, self._signal]

    def load(self, state: list[float]) -> None:
        self._seen, self._noise, self._signal = state
