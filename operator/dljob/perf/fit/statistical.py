"""Statistical efficiency of a batch size: progress of a step, by the gradient noise scale.

φ is the noise scale in samples: the batch at which the noise in a gradient is as large as the gradient (McCandlish et
al. 2018, section 2.2). A step of B samples makes B / (φ + B) of the progress of a step without noise. For the same
progress (ibid.; Qiao et al. 2021, Pollux, section 3.1):

    EFF(B) = (φ + B0) / (φ + B)         progress of a sample in a batch of B, over that in one of B0
    steps(B) = steps(B0) (φ/B + 1) / (φ/B0 + 1)

φ grows while a model trains. One number can represent a whole training if it is the right mean, which
``dltrain.optim.noise_scale`` computes. The formulas hold if the learning rate is adapted to the batch.
"""

from math import ceil


def efficiency(batch: int, base: int, noise: float) -> float:
    """Return the progress per sample with ``batch``, divided by that with ``base``; above 1 for smaller batches.

    ``noise``: the noise scale, in samples.
    """
    return (noise + base) / (noise + batch)


def step_progress(batch: int, noise: float, samples: int | None = None) -> float:
    """Return the progress of a step divided by that of a step without noise, in (0, 1].

    It is the mean over an epoch of ``samples``, whose last batch may be partial.
    """
    if samples is None or samples <= batch:
        return _of_full(min(batch, samples or batch), noise)
    full, rest = divmod(samples, batch)
    whole = full * _of_full(batch, noise) + (_of_full(rest, noise) if rest else 0.0)
    return whole / (full + bool(rest))


def steps(base_steps: int, base: int, batch: int, noise: float, samples: int | None = None) -> int:
    """Return the steps of ``batch`` with the progress of ``base_steps`` of ``base``; ``samples``: of an epoch."""
    if batch == base:
        return base_steps
    ratio = step_progress(base, noise, samples) / step_progress(batch, noise, samples)
    return max(1, ceil(base_steps * ratio - 1e-9))


def _of_full(batch: int, noise: float) -> float:
    return batch / (noise + batch)
