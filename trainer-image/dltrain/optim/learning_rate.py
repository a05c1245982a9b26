"""The learning rate at a step: linear warm-up, then half a cosine down to zero.

Warm-up lets a large batch start (Goyal et al. 2017, section 2.2); the cosine (Loshchilov and Hutter 2016) needs no
knob. A pure function of the step, so that a resumed run goes on exactly.
"""

from math import cos, pi

WARM_UP = 0.05
"""Part of the steps, and at least one."""


def rate(base: float, step: int, steps: int) -> float:
    """Rate at ``step`` (from 0) of ``steps``; never more than ``base``, never 0 within the run."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return base * (step + 1) / warm
    return base * (1 + cos(pi * (step - warm) / (steps - warm))) / 2
