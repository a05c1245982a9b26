"""Predict the step time on more devices from one device and one probe on two, for one workload over batch sizes.

Two devices determine the cost of communication: t2 = (t1^g + C^g)^(1/g), where C is the all-reduce, which partly
overlaps with the backward pass (a soft maximum: g = 1 adds, g = infinity overlaps as much as possible). On n devices C
grows like the volume of a ring, 2 (n-1)/n relative to 1 at n = 2, plus congestion.

C of one batch size is often lost in the noise of t1 and t2, but all batch sizes of a workload send the same gradients.
So C(b) has a prior around m b^r (r: parts that grow with the step, such as waiting for other ranks), from which each
batch size deviates as far as its own probe requires. A grid search finds the mode of the joint posterior.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dljob.perf.fit.fitting import OUTLIER, Floats, agreeing, checked

SOFTNESS = 1.25
"""g. This and the constants below were fitted to Gavel's k80 and v100 spread over nodes; p100 was only scored."""
CONGESTION = 0.1
"""Relative growth of C per doubling beyond four devices, in addition to the ring's volume."""
TIME_NOISE, OWN_SPREAD = 0.12, 0.2
"""Standard deviations of log(t2/t1), and of log C of one batch size around the workload's line."""
TREND, TREND_SPREAD = 0.2, 0.3
"""Mean and standard deviation of the prior of r."""


@dataclass(frozen=True)
class Pair:
    """A batch size per device, its step time on one device, and on two."""

    batch: float
    one_s: float
    two_s: float

    def __post_init__(self) -> None:
        checked(f"batch {self.batch:g}, {self.one_s:g} s on one, {self.two_s:g} s on two", list(vars(self).values()))


def communication_s(pairs: Sequence[Pair]) -> Floats:
    """Return the seconds of communication between two devices, for each batch size of a workload.

    A probe that contradicts most others is ignored, and its batch size gets the line of the others. Raise ValueError if
    there is no probe or no plausible one.
    """
    if not pairs:
        raise ValueError("no probe on two devices: expected at least one batch measured on one device and on two")
    batch, one, two = (np.array([getattr(p, name) for p in pairs]) for name in ("batch", "one_s", "two_s"))
    plausible = np.array(agreeing([(p.batch, p.two_s) for p in pairs])) & (two > one / OUTLIER)
    if not plausible.any():
        raise ValueError(
            f"two devices took {', '.join(f'{p.two_s:g} s ({p.one_s:g} s on one)' for p in pairs)}: expected most to "
            "agree with each other and to be no faster than one device; probe again"
        )
    two = np.where(plausible, two, one * np.median(two[plausible] / one[plausible]))
    tried = np.geomspace(1e-3, 3.0, 160)[None, :] * two[:, None]
    implied = (one[:, None] ** SOFTNESS + tried**SOFTNESS) ** (1 / SOFTNESS)
    misses = np.where(plausible[:, None], (np.log(two[:, None] / implied) / TIME_NOISE) ** 2, 0.0)
    best, found = np.inf, tried[:, 0]
    middle = np.exp(np.log(batch).mean())
    for trend in np.linspace(0.0, 0.8, 9) if len(pairs) > 1 else [TREND]:
        for scale in np.geomspace(0.01 * two.min(), 3 * two.max(), 80):
            about = np.log(scale) + trend * np.log(batch / middle)
            penalties = misses + ((np.log(tried) - about[:, None]) / OWN_SPREAD) ** 2
            total = float(penalties.min(axis=1).sum()) + ((trend - TREND) / TREND_SPREAD) ** 2
            if total < best:
                best, found = total, tried[np.arange(len(pairs)), penalties.argmin(axis=1)]
    return np.asarray(found)


def on_devices(pairs: Sequence[Pair], devices: int) -> Floats:
    """Return the step seconds on ``devices`` (2 or more, spread in the same way), for each batch size per device."""
    if devices < 2:
        raise ValueError(f"{devices} devices: expected 2 or more")
    one = np.array([p.one_s for p in pairs])
    volume = 2 * (devices - 1) / devices * (1 + CONGESTION * max(0.0, np.log2(devices / 4)))
    return np.asarray((one**SOFTNESS + (communication_s(pairs) * volume) ** SOFTNESS) ** (1 / SOFTNESS))
