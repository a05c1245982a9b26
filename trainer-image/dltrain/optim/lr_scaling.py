"""Scaling of the learning rate from a base batch size to the job's global batch size.

Let S be the global batch size divided by the base batch size. The factor is S for the rule Linear (Goyal et al. 2017)
and √S for SquareRoot (Krizhevsky 2014). For AdaScale (Johnson et al. 2020), the factor is between 1 and S and depends
on the measured noise of the gradients, because larger batches help only if gradients are noisy. The module
``learning_rate`` adds the warm-up. ``builtin/rank.py`` and ``asynchronous/worker.py`` multiply the learning rate by the
factor; training scripts read it as ``Trainer.learning_rate_factor``. Every rank computes the same factor, because all
ranks get the same sums.
"""

from math import isfinite, sqrt

from dlcontract import OptimizerRef
from dltrain.optim.noise_scale import estimates


class Scaling:
    """The factor by which the learning rate is multiplied for a batch that is larger than the base batch.

    ``batch``: the global batch size. The base batch size, for which the user chose the learning rate, and the rule are
    in ``optimizer``. For the rule AdaScale, ``observe`` must get the gradient norms of each step.
    """

    def __init__(self, optimizer: OptimizerRef, batch: int) -> None:
        self._rule = optimizer.scaling
        self._base = optimizer.base_batch or batch
        self._batch = batch
        self._keep = max(0.0, 1 - batch / self._base / 1000)
        """Factor on the running sums of earlier steps when a step is added, as in the AdaScale paper (section 4)."""
        self._seen = 0.0
        self._noise = self._signal = 0.0

    @property
    def measures(self) -> bool:
        """Return True if the factor depends on gradient norms, which ``observe`` must then get."""
        return self._rule == "AdaScale"

    @property
    def factor(self) -> float:
        """Return the factor on the learning rate that the user chose for the base batch size.

        Until AdaScale has measurements, it uses √S, where S is the batch size divided by the base batch size.
        """
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
        """Add the squared gradient norms of a step, from which AdaScale estimates how noisy gradients are.

        ``within``: weighted mean of the squared norms of the local gradients of the ``ranks`` ranks. ``together``:
        squared norm of the global gradient. ``noise_scale.estimates`` has the formulas. Do nothing with one rank, and
        if a norm is not finite.
        """
        if ranks < 2 or not (isfinite(within) and isfinite(together)):
            return  # a single gradient does not show how noisy gradients are
        noise, signal = estimates(within, together, ranks, self._batch)
        self._noise = self._keep * self._noise + noise
        self._signal = self._keep * self._signal + signal
        self._seen = self._keep * self._seen + 1

    def state(self) -> list[float]:
        """Return the running sums for a checkpoint. ``load`` restores them."""
        return [self._seen, self._noise, self._signal]

    def load(self, state: list[float]) -> None:
        self._seen, self._noise, self._signal = state
