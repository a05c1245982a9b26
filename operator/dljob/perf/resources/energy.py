"""Energy and cost of a training run.

A device always draws its idle power, more while it computes, and a part of that while it waits. It rarely draws its
power limit.
"""

from dljob.cluster.catalogue import Device

COMPUTING_PART = 0.75
"""Fraction of the range between idle and peak power drawn while computing. On Zeus' V100 and P100 it is 0.86 and 0.59
(ResNet-50), 0.89 and 0.65 (BERT), 0.62 and 0.42 (DeepSpeech2), and 0 for a model that hardly uses its GPU (NCF)."""
WAITING_PART = 0.2
"""The same fraction while a rank waits for others or for the network, as it polls."""
HOST_POWER_W = 40.0
"""Power of a GPU node per device, besides the device: fans, disks, network, and idle CPUs."""
PUE = 1.4
"""Power usage effectiveness: a data centre's power divided by its computers'. Uptime Institute: 1.5 on average."""


def rank_watts(device: Device, busy: float) -> float:
    """Return the mean watts of one rank that computes for the fraction ``busy`` of a step, with host and PUE."""
    reach = device.peak_power_W - device.idle_power_W
    dynamic = reach * (busy * COMPUTING_PART + (1 - busy) * WAITING_PART)
    host = HOST_POWER_W if device.kind == "gpu" else 0.0  # a CPU's figures include the host
    return PUE * (device.idle_power_W + dynamic + host)


def cost_usd(device: Device, seconds: float, ranks: int) -> float:
    """Return the price of ``ranks`` devices for ``seconds``."""
    return device.usd_per_h / 3600 * seconds * ranks
