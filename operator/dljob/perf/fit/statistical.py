"""Statistical efficiency of a batch size: how much a step progresses, given the gradient noise scale.

The noise scale φ is the number of samples at which the noise in a gradient is as large as the gradient (McCandlish et
al. 2018, section 2.2). A step with B samples makes the fraction B / (φ + B) of the progress of a step without noise.
Compared with batch size B0 (ibid.; Qiao et al. 2021, Pollux, section 3.1):

    EFF(B) = (φ + B0) / (φ + B)                     progress per sample, relative to B0
    steps(B) = steps(B0) (φ/B + 1) / (φ/B0 + 1)     steps for the same progress

φ grows while a model trains. ``dltrain.optim.noise_scale`` computes the mean that represents a whole training. The
formulas hold if the learning rate is adapted to the batch.
"""

from math import ceil


def efficiency(batch: int, base: int, noise: float) -> float:
    """Return the training progress per sample with batch size ``batch``, divided by that with batch size ``base``.

    ``noise``: the gradient noise scale, in samples. The result is above 1 if ``batch`` is smaller than ``base``.
    """
    return (noise + base) / (noise + batch)


def step_progress(batch: int, noise: float, samples: int | None = None) -> float:
    """Return the training progress of a step with ``batch`` samples, divided by that of a step without gradient noise.

    The result is in (0, 1]. ``noise``: the gradient noise scale, in samples. ``samples``: samples in an epoch, or None
    if unknown. If it is known, return the mean over the steps of an epoch, whose last batch may be smaller.
    """
    if samples is None or samples <= batch:
        return _of_full(min(batch, samples or batch), noise)
    full, rest = divmod(samples, batch)
    whole = full * _of_full(batch, noise) + (_of_full(rest, noise) if rest else 0.0)
    return whole / (full + bool(rest))


def steps(base_steps: int, base: int, batch: int, noise: float, samples: int | None = None) -> int:
    """Return how many steps of ``batch`` samples train as far as ``base_steps`` steps of ``base`` samples.

    A step with more samples progresses more, because its gradient is less noisy. ``noise``: the gradient noise scale,
    in samples. ``samples``: samples in an epoch, whose last batch may be smaller; None if unknown.
    """
    if batch == base:
        return base_steps
    ratio = step_progress(base, noise, samples) / step_progress(batch, noise, samples)
    return max(1, ceil(base_steps * ratio - 1e-9))


def _of_full(batch: int, noise: float) -> float:
    return batch / (noise + batch)
