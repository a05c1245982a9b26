"""The learning-rate schedule: linear warm-up, then cosine decay to zero.

Large batches need the warm-up (Goyal et al. 2017, section 2.2). Cosine decay (Loshchilov and Hutter 2016) has no
parameter to choose. The rate depends only on the number of the step, so a resumed run uses the same rates as an
uninterrupted one.
"""

from math import cos, pi

WARM_UP = 0.05
"""Fraction of the steps in which the rate rises. The warm-up has at least one step."""


def rate(base: float, step: int, steps: int) -> float:
    """Return the learning rate at ``step`` (counted from 0) of ``steps``. It is above 0 and at most ``base``."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return base * (step + 1) / warm
    return base * (1 + cos(pi * (step - warm) / (steps - warm))) / 2
