"""Prices of devices and of energy that an administrator sets in place of the catalogue's prices."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dlcontract.pods import without_limits
from dljob.cluster.catalogue import MIG, Device, gpu, gpu_or_assumed

J_PER_KWH = 3.6e6
Amount = TypeVar("Amount", float, NDArray[np.float64])


@dataclass(frozen=True)
class Prices:
    usd_per_device_h: Mapping[str, float] = field(default_factory=dict)
    """Device type → price of one device in US dollars per hour. For CPU nodes, it is the price of one CPU."""
    usd_per_kwh: float | None = None
    """Price of energy in US dollars per kWh, which is added to that of devices; None: prices of devices include it."""

    def device(self, device: Device, label: str, cores: float) -> Device:
        """Return ``device`` with the administrator's price for its type ``label``, or unchanged without such a price.

        ``cores``: number of CPUs of a CPU device, by which the price of one CPU is multiplied. A MIG instance (a part
        of a GPU) without a price of its own has its part of the whole GPU's price.
        """
        if (price := self.listed(label)) is not None:
            return replace(device, usd_per_h=price if device.kind == "gpu" else price * cores)
        if (part := MIG.match(label)) is not None and (whole := self.listed(part[1])) is not None:
            return replace(device, usd_per_h=whole * device.usd_per_h / gpu_or_assumed(part[1]).usd_per_h)
        return device

    def listed(self, label: str) -> float | None:
        """Return the administrator's price of a device type, in US dollars per hour; None if there is no such price."""
        return listed(self.usd_per_device_h, label)

    def with_energy_usd(self, devices_usd: Amount, energy_J: Amount) -> Amount:
        """Return the total price in US dollars: ``devices_usd`` plus the price of ``energy_J`` joules.

        Both arguments are numbers, or arrays of equal shape. If ``usd_per_kwh`` is None, return ``devices_usd``.
        """
        return devices_usd if self.usd_per_kwh is None else devices_usd + energy_J / J_PER_KWH * self.usd_per_kwh


CATALOGUE_PRICES = Prices()
"""Prices if the administrator has set none: those of the device catalogue."""


def listed(values: Mapping[str, float], label: str) -> float | None:
    """Return the value of a device type in a table of the administrator; None if the table lacks the type.

    Names of GPUs in the catalogue also match if they differ in vendor or punctuation. Other names must be equal. A type
    with a power or clock limit that the table lacks has the value of its product.
    """
    label = label if label in values else without_limits(label).product
    if label in values or (known := gpu(label)) is None:
        return values.get(label)
    return next((value for name, value in values.items() if gpu(name) is known), None)
