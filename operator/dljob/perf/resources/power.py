"""Time, power and energy under a device's power limit, from measurements at two limits or from typical values.

A limit above the power that a device demands has no effect. Under a lower limit, the device lowers its clock (DVFS).
The work takes the time t0 at the mean power P0 under the lowest limit, and t1 at P1 under the highest. In between:

- The power P equals the limit until it reaches the demand P1. Demand varies within a step, so the corner at P1 is
  rounded: P is the mean of the curve with the sharp corner and the straight line from P0 to P1.
- The time is t1 (1 + k (1 / f - 1)), where f is the clock divided by the clock at the highest limit, and k is the
  fraction of the time that scales with the clock. The measured t0 determines k. Near the lowest limits, the voltage is
  at its minimum. The power above a static power s (context, memory, leakage) is then proportional to the clock, so
  f = (P - s) / (P1 - s).
"""

from dataclasses import dataclass

import numpy as np

from dljob.cluster.catalogue import Device
from dljob.perf.fit.fitting import Floats, checked
from dljob.perf.resources.energy import COMPUTING_PART

STATIC_PART = 0.7
"""Static power (which does not depend on the clock), divided by the power at the lowest limit.

The value was chosen on the V100 table of Zeus' public measurements, where 0.85 adds half a percentage point of error
and 0.5 adds one and a half. On Zeus' P100 table, the value hardly changes the error (2.7 to 3.2 %)."""
ROUNDING = 0.5

LOWEST_PART = 0.4
"""Lowest power limit of a GPU divided by its highest. The ratio is 0.4 on a V100 (PCIe) and 0.5 on a P100."""
WIDE_FROM_W = 200.0
"""Minimum peak power in watts of devices for which a power limit is advised. Smaller devices have a narrow range of
limits (T4: 60 to 70 W, A10: 100 to 150 W)."""
CLOCKED_PART = 0.2
"""Fraction of the computing time that scales with the clock, assumed for a job that was not measured.

In Zeus' public tables, this fraction is 0.16 to 0.23 for models that keep a V100 busy, and 0.08 on a P100."""


@dataclass(frozen=True)
class LimitPoint:
    """Time and mean power of a fixed amount of work under one power limit."""

    limit_W: float
    seconds: float
    power_W: float

    def __post_init__(self) -> None:
        checked(f"limit {self.limit_W:g} W, {self.seconds:g} s, {self.power_W:g} W", list(vars(self).values()))


def under_limits(low: LimitPoint, high: LimitPoint, limits_W: Floats) -> tuple[Floats, Floats]:
    """Return (seconds, mean watts) of the same work under each limit in ``limits_W``. Their product is the energy in J.

    Limits outside the range from ``low`` to ``high`` are clipped to that range. Raise ValueError if ``low`` is not the
    lower limit.
    """
    if not low.limit_W < high.limit_W:
        raise ValueError(
            f"power limits: found {low.limit_W:g} W and then {high.limit_W:g} W; expected the lower limit first"
        )
    limits = np.clip(checked("limits_W", limits_W), low.limit_W, high.limit_W)
    if low.power_W >= high.power_W:  # the limit has no effect; the difference is noise
        same = np.ones_like(limits)
        return float(np.sqrt(low.seconds * high.seconds)) * same, float(np.sqrt(low.power_W * high.power_W)) * same
    along = (limits - low.limit_W) / (high.limit_W - low.limit_W)
    straight = low.power_W + along * (high.power_W - low.power_W)
    corner = np.minimum(low.power_W * limits / low.limit_W, high.power_W)
    power = ROUNDING * straight + (1 - ROUNDING) * corner
    if low.seconds <= high.seconds:
        return np.full_like(limits, np.sqrt(low.seconds * high.seconds)), power
    static = STATIC_PART * low.power_W
    slowed = (high.power_W - static) / (power - static) - 1.0
    slowest = (high.power_W - static) / (low.power_W - static) - 1.0
    return high.seconds + (low.seconds - high.seconds) * slowed / slowest, power


def best_limit(low: LimitPoint, high: LimitPoint, limits_W: Floats, slowdown: float = np.inf) -> float:
    """Return the power limit (in watts, one of ``limits_W``) under which the work needs the least energy.

    ``low``, ``high``: measurements of the work at two limits. Consider only limits under which the work takes at most
    ``slowdown`` times the shortest time under any of them.
    """
    seconds, power = under_limits(low, high, limits_W)
    energy = np.where(seconds <= slowdown * seconds.min(), seconds * power, np.inf)
    return float(np.asarray(limits_W)[int(np.argmin(energy))])


@dataclass(frozen=True)
class Advice:
    """An advised power limit in watts for each device of a type, and its effect on computing.

    ``seconds_ratio`` and ``energy_ratio``: computing time and energy under this limit, divided by those under the
    device's highest limit.
    """

    limit_W: float
    seconds_ratio: float
    energy_ratio: float


def typical(device: Device) -> tuple[LimitPoint, LimitPoint]:
    """Return typical points at (lowest limit, highest limit) for a job that keeps the device busy.

    The work takes one second at the highest limit. There the job draws the power of a computing rank
    (``energy.COMPUTING_PART``). At the lowest limit, it draws at most that limit and takes 1 + k (1/f - 1) seconds,
    where k is ``CLOCKED_PART`` and f is the clock divided by the clock at the highest limit.
    """
    demand_W = device.idle_power_W + COMPUTING_PART * (device.peak_power_W - device.idle_power_W)
    limit_W = LOWEST_PART * device.peak_power_W
    power_W = min(limit_W, demand_W)
    static_W = STATIC_PART * power_W
    clock = (power_W - static_W) / (demand_W - static_W)
    slowest = LimitPoint(limit_W, 1 + CLOCKED_PART * (1 / clock - 1), power_W)
    return slowest, LimitPoint(device.peak_power_W, 1.0, demand_W)


def advised(device: Device, slowdown: float) -> Advice | None:
    """Return the limit with the least energy for a typical job, together with its effect on computing.

    Under this limit, the job computes for at most ``slowdown`` times as long as under the highest limit. Return None if
    no such limit saves energy, or if the device's peak power is below ``WIDE_FROM_W`` watts. The limits of so small a
    device differ too little.
    """
    if device.peak_power_W < WIDE_FROM_W:
        return None
    low, high = typical(device)
    limits_W = np.linspace(low.limit_W, high.limit_W, 61).round()
    limit_W = best_limit(low, high, limits_W, slowdown)
    seconds, power = under_limits(low, high, np.array([limit_W]))
    found = Advice(limit_W, float(seconds[0]), float(seconds[0] * power[0] / (high.seconds * high.power_W)))
    return found if limit_W < high.limit_W and found.energy_ratio < 1 else None
