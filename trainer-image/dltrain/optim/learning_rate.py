"""The learning-rate schedule: linear warm-up, then cosine decay to zero.

Large batches need the warm-up (Goyal et al. 2017, section 2.2). Cosine decay (Loshchilov and Hutter 2016) has no
parameter. The rate is a pure function of the step, so a resumed run continues exactly.
"""

from math import cos, pi

WARM_UP = 0.05
"""Fraction of the steps that warm up; at least one step."""


def rate(base: float, step: int, steps: int) -> float:
    """Return the rate at ``step`` (from 0) of ``steps``. It is at most ``base``, and never 0 within the run."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return base * (step + 1) / warm
    return base * (1 + cos(pi * (step - warm) / (steps - warm))) / 2
