"""Energy settings that an administrator makes in place of assumptions: power, overhead and carbon intensity."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dljob.cluster.catalogue import MIG, Device, gpu_or_assumed
from dljob.cluster.prices import J_PER_KWH, listed

HOUR_S, DAY_S = 3600.0, 86400.0
MOMENT_S = 1.0
"""Seconds that are added to each duration, so that the mean carbon intensity over a duration of 0 is defined."""
WORLD_G_PER_KWH = 473.0
"""Mean carbon intensity of the world's electricity in 2024, in g CO2 equivalent per kWh.

The source is Ember's Global Electricity Review 2025."""
Amount = TypeVar("Amount", float, NDArray[np.float64])


@dataclass(frozen=True)
class CarbonIntensity:
    """Greenhouse gases of the electricity, constant or by hour of the day.

    ``g_per_kwh``: g CO2 equivalent per kWh, as one value or as 24 values for the hours 0 to 23 UTC. ``assumed``: True
    if the administrator has set no value.
    """

    g_per_kwh: tuple[float, ...] = (WORLD_G_PER_KWH,)
    assumed: bool = True

    def __post_init__(self) -> None:
        if len(self.g_per_kwh) not in (1, 24):
            raise ValueError(
                f"g_per_kwh: found {len(self.g_per_kwh)} values; expected 1 value, or 24 values for the hours 0 to 23 "
                "UTC"
            )

    def grams(self, energy_J: Amount, begin_s: float, seconds: Amount) -> Amount:
        """Return the grams of CO2 equivalent for ``energy_J`` joules, used evenly over ``seconds`` seconds.

        ``begin_s``: seconds since midnight UTC at which the use begins. ``energy_J`` and ``seconds`` are numbers, or
        arrays of equal shape, at least 0.
        """
        if len(self.g_per_kwh) == 1:
            return energy_J / J_PER_KWH * self.g_per_kwh[0]
        begin_s, some_s = begin_s % DAY_S, seconds + MOMENT_S
        mean = (self._integral(begin_s + some_s) - self._integral(begin_s + 0.0 * some_s)) / some_s
        return energy_J / J_PER_KWH * mean

    def _integral(self, until_s: Amount) -> Amount:
        """Return the integral of the intensity from midnight UTC to ``until_s`` seconds later, in g s per kWh."""
        edges = np.concatenate([[0.0], np.cumsum(self.g_per_kwh) * HOUR_S])
        days = until_s // DAY_S
        rest: Amount = np.interp(until_s - days * DAY_S, np.arange(25) * HOUR_S, edges)
        return days * float(edges[-1]) + rest


@dataclass(frozen=True)
class EnergySettings:
    """What an administrator states about the power of nodes and the source of their energy."""

    idle_W: Mapping[str, float] = field(default_factory=dict)
    """Device type → power of one idle device in watts. For CPU nodes, it is the power of one CPU."""
    gpu_host_W: float | None = None
    """Power in watts of the rest of a GPU node, for each of its GPUs; None: an assumption of the performance model."""
    pue: float | None = None
    """Power of the data centre divided by that of its computers; None: an assumption of the performance model."""
    carbon: CarbonIntensity = CarbonIntensity()

    def device(self, device: Device, label: str, cores: float) -> Device:
        """Return ``device`` with the administrator's figures for its type ``label``, or unchanged without such figures.

        ``cores``: number of CPUs of a CPU device, by which the power of one CPU is multiplied. A MIG instance (a part
        of a GPU) without a figure of its own has its part of the whole GPU's power. The power of an idle device is at
        most its peak power.
        """
        if self.gpu_host_W is not None or self.pue is not None:
            device = replace(device, host_power_W=self.gpu_host_W, pue=self.pue)
        idle_W = listed(self.idle_W, label)
        if idle_W is not None:
            idle_W *= 1.0 if device.kind == "gpu" else cores
        elif (part := MIG.match(label)) is not None and (whole := listed(self.idle_W, part[1])) is not None:
            idle_W = whole * device.idle_power_W / gpu_or_assumed(part[1]).idle_power_W
        return device if idle_W is None else replace(device, idle_power_W=min(idle_W, device.peak_power_W))


ASSUMED_ENERGY = EnergySettings()
"""Settings if the administrator has made none."""
