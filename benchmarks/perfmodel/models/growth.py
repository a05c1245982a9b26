"""From one device and one probe on two to more devices, one workload over several batches.

Two devices tell what communication costs: t2 = (t1^g + C^g)^(1/g) with C the all-reduce, partly hidden behind the
backward pass (a soft maximum: g = 1 adds, g = infinity hides all it can). On n devices C grows like a ring's volume,
2 (n-1)/n over its value 1 at n = 2, and with congestion from there on.

C of one batch is often lost in the noise of t1 and t2, but batches of one workload send the same gradients: C(b) is
taken near m b^r over the batches (r: what grows with the step, such as waiting for each other), each batch leaving that
line as far as its own probe insists. The mode of all of it together is found on a grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dljob.perf.fit.fitting import OUTLIER, Floats, agreeing, checked

SOFTNESS = 1.25
"""g. With the figures below fixed on Gavel's k80 and v100 spread over nodes, in the logarithm; p100 was only scored."""
CONGESTION = 0.1
"""By which C grows for every doubling beyond four devices, besides the ring's volume."""
TIME_NOISE, OWN_SPREAD = 0.12, 0.2
"""Of a ratio t2/t1, and of one batch's C about the workload's line."""
TREND, TREND_SPREAD = 0.2, 0.3
"""Prior of r."""


@dataclass(frozen=True)
class Pair:
    """A batch per device, its step time on one device, and on two."""

    batch: float
    one_s: float
    two_s: float

    def __post_init__(self) -> None:
        checked(f"batch {self.batch:g}, {self.one_s:g} s on one, {self.two_s:g} s on two", list(vars(self).values()))


def communication_s(pairs: Sequence[Pair]) -> Floats:
    """Seconds of communication between two devices, for each of a workload's batches.

    A probe that contradicts most others tells nothing: its batch gets the others' line. Raises ValueError when there
    is no probe, or none that can be believed.
    """
    if not pairs:
        raise ValueError("no probe on two devices: expected at least one batch measured on one device and on two")
    batch, one, two = (np.array([getattr(p, name) for p in pairs]) for name in ("batch", "one_s", "two_s"))
    believed = np.array(agreeing([(p.batch, p.two_s) for p in pairs])) & (two > one / OUTLIER)
    if not believed.any():
        raise ValueError(
            f"two devices took {', '.join(f'{p.two_s:g} s ({p.one_s:g} s on one)' for p in pairs)}: expected most to "
            "agree with each other and to take no less than one device; probe again"
        )
    two = np.where(believed, two, one * np.median(two[believed] / one[believed]))
    tried = np.geomspace(1e-3, 3.0, 160)[None, :] * two[:, None]
    implied = (one[:, None] ** SOFTNESS + tried**SOFTNESS) ** (1 / SOFTNESS)
    misses = np.where(believed[:, None], (np.log(two[:, None] / implied) / TIME_NOISE) ** 2, 0.0)
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
    """Step seconds on ``devices`` (2 or more, spread alike), for each of the workload's batches per device."""
    if devices < 2:
        raise ValueError(f"{devices} devices: expected 2 or more")
    one = np.array([p.one_s for p in pairs])
    volume = 2 * (devices - 1) / devices * (1 + CONGESTION * max(0.0, np.log2(devices / 4)))
    return np.asarray((one**SOFTNESS + (communication_s(pairs) * volume) ** SOFTNESS) ** (1 / SOFTNESS))
