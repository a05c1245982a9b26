"""Time, power and energy under a device's power and clock limits.

``under_limits`` predicts them from measurements at two power limits, ``under_limit`` from typical values.

A limit above the power that a device demands has no effect. Under a lower limit, the device lowers its clock (DVFS).
The work takes the time t0 at the mean power P0 under the lowest limit, and t1 at P1 under the highest. In between:

- The power P equals the limit until it reaches the demand P1. Demand varies within a step, so the corner at P1 is
  rounded: P is the mean of the curve with the sharp corner and the straight line from P0 to P1.
- The time is t1 (1 + k (1 / f - 1)), where f is the clock divided by the clock at the highest limit, and k is the
  fraction of the time that scales with the clock. The measured t0 determines k. Near the lowest limits, the voltage is
  at its minimum. The power above a static power s (context, memory, leakage) is then proportional to the clock, so
  f = (P - s) / (P1 - s).

A clock limit acts on every job, whatever the job draws. ``under_clock`` has a model of its own for it, because the
model of power limits cannot reproduce measured curves (docs/design/0007-curves-devices-energy.md).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dljob.cluster.catalogue import Device
from dljob.perf.fit.fitting import Floats, checked
from dljob.perf.resources.energy import COMPUTING_PART, HELD_CLOCK, clock_part, dynamic_part

STATIC_PART = 0.7
"""Static power (which does not depend on the clock), divided by the power at the lowest limit.

The value was chosen on the V100 table of Zeus' public measurements, where 0.85 adds half a percentage point of error
and 0.5 adds one and a half. On Zeus' P100 table, the value hardly changes the error (2.7 to 3.2 %)."""
ROUNDING = 0.5

LOWEST_PART = 0.4
"""Lowest power limit of a GPU divided by its highest. The ratio is 0.4 on a V100 (PCIe) and 0.5 on a P100."""
CLOCKED_PART = 0.2
"""Fraction of the computing time that scales with the clock, assumed for a job that was not measured.

In Zeus' public tables, this fraction is 0.16 to 0.23 for models that keep a V100 busy, and 0.08 on a P100."""

CLOCK_PART = 0.8
"""Fraction of a busy GPU's computing time at its maximum clock that scales with the clock.

It was fitted with ``energy.HELD_CLOCK`` on a layer of GPT-3 on an A100 (SXM) and the stages of BERT and GPT-3 XL on
A100 (PCIe), all of Perseus. The error hardly changes along a valley from (0.8, 0.87) to (1.0, 0.84). The smallest
fraction was taken, because measurements at a third of the clock (MI210) show less slowdown."""


@dataclass(frozen=True)
class LimitPoint:
    """Time and mean power of a fixed amount of work under one power limit."""

    limit_W: float
    seconds: float
    power_W: float

    def __post_init__(self) -> None:
        checked(f"limit {self.limit_W:g} W, {self.seconds:g} s, {self.power_W:g} W", list(vars(self).values()))


class Working(NamedTuple):
    """Time and mean power of a fixed amount of work under the limits of a device."""

    seconds: float
    power_W: float


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


def typical(device: Device, demand_W: float | None = None) -> tuple[LimitPoint, LimitPoint]:
    """Return typical points at (lowest limit, highest limit) for a job.

    The work takes one second at the highest limit. There the job draws ``demand_W``, its measured power; None: the
    power of a rank that keeps the device busy (``energy.COMPUTING_PART``). At the lowest limit, it draws at most that
    limit and takes 1 + k (1/f - 1) seconds, where k is ``CLOCKED_PART`` and f is the clock divided by the clock at the
    highest limit.
    """
    demand_W = _demand_W(device) if demand_W is None else demand_W
    limit_W = LOWEST_PART * device.peak_power_W
    power_W = min(limit_W, demand_W)
    static_W = STATIC_PART * power_W
    clock = (power_W - static_W) / (demand_W - static_W)
    slowest = LimitPoint(limit_W, 1 + CLOCKED_PART * (1 / clock - 1), power_W)
    return slowest, LimitPoint(device.peak_power_W, 1.0, demand_W)


def under_limit(device: Device, demand_W: float | None = None) -> LimitPoint:
    """Return the time and the power of a typical job under the device's own limit; it takes 1 s without a limit.

    ``demand_W``: the power that the job was measured to draw without a limit; None: that of a typical job.

    Nothing was published about limits below the usual lowest one. There, the speed is assumed to be proportional to the
    power above idle, so that the job needs more energy than under the usual lowest limit.
    """
    low, high = typical(device, demand_W)
    limit_W = device.power_limit_W or device.peak_power_W
    seconds, power = under_limits(low, high, np.array([limit_W]))
    above_W, low_above_W = (max(each - device.idle_power_W, 0.05 * each) for each in (limit_W, low.limit_W))
    slowdown = max(1.0, low_above_W / above_W) if limit_W < high.power_W else 1.0
    return LimitPoint(limit_W, float(seconds[0]) * slowdown, min(float(power[0]), limit_W))


def under_clock(device: Device, demand_W: float | None = None) -> Working:
    """Return the time and the power of a typical job under the device's clock limit; it takes 1 s without a limit.

    The time is proportional to 1 + k (1/f - 1), where f is the clock divided by the maximum clock
    (``energy.clock_part``) and k is ``CLOCK_PART``. The power above idle follows the clock and its voltage
    (``energy.dynamic_part``). ``demand_W``: as for ``under_limit``.
    """
    demand_W = _demand_W(device) if demand_W is None else demand_W
    seconds = _clock_s(clock_part(device)) / _clock_s(HELD_CLOCK)
    above_W = max(0.0, demand_W - device.idle_power_W)
    return Working(seconds, demand_W - above_W * (1 - dynamic_part(device)))


def _demand_W(device: Device) -> float:  # noqa: N802 - the unit is part of the name
    """Return the power of a rank that keeps the device busy, without a limit."""
    return device.idle_power_W + COMPUTING_PART * (device.peak_power_W - device.idle_power_W)


def _clock_s(clock: float) -> float:
    return 1 + CLOCK_PART * (1 / clock - 1)


def under_both(device: Device, demand_W: float | None = None) -> Working:
    """Return the time and the power of a typical job under both limits of the device; it takes 1 s without limits.

    Whichever limit slows the job down more determines its time, and the one that allows less power its power. So a
    power limit above what the job draws at its clock has no effect. ``demand_W``: as for ``under_limit``.
    """
    clocked = under_clock(device, demand_W)
    if device.power_limit_W is None:
        return clocked
    restricted = under_limit(device, demand_W)
    if device.clock_limit_MHz is None:
        return Working(restricted.seconds, restricted.power_W)
    return Working(max(clocked.seconds, restricted.seconds), min(clocked.power_W, restricted.power_W))


@lru_cache(maxsize=256)
def slowed(device: Device) -> Device:
    """Return ``device`` with the speed that it has under its power and clock limits.

    The framework's overhead on the host stays, as the host has no limit.
    """
    return at_speed(device, 1 / under_both(device).seconds) if has_limit(device) else device


def has_limit(device: Device) -> bool:
    """Return True if the device runs under a power limit, a clock limit or both."""
    return device.power_limit_W is not None or device.clock_limit_MHz is not None


def at_speed(device: Device, factor: float) -> Device:
    """Return ``device`` with arithmetic and memory traffic at ``factor`` times their speed, and without limits.

    Both change by the same factor, because the model knows only what becomes of the time of whole steps.
    """
    return replace(
        device,
        fp32_FLOPs=factor * device.fp32_FLOPs,
        conv_FLOPs=factor * device.conv_FLOPs,
        bf16_FLOPs=factor * device.bf16_FLOPs,
        fp16_FLOPs=factor * device.fp16_FLOPs,
        memory_bandwidth_Bps=factor * device.memory_bandwidth_Bps,
        power_limit_W=None,
        clock_limit_MHz=None,
    )


def limited(device: Device) -> Device:
    """Return ``device`` with the power that a job typically draws under its limits, unless it was measured."""
    if not has_limit(device) or device.computing_power_W is not None:
        return device
    return replace(device, active_power_W=under_both(device).power_W)
