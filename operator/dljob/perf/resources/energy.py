"""Energy and cost of a training run.

Power is not the power limit: a device draws its idle power always, more while it computes, some of it while it waits.
"""

from dljob.cluster.catalogue import Device

COMPUTING_PART = 0.75
"""Of the range between idle and peak power, what training draws while it computes: on Zeus' V100 and P100 0.86 and 0.59
(ResNet-50), 0.89 and 0.65 (BERT), 0.62 and 0.42 (DeepSpeech2); nothing for a model that hardly uses its GPU (NCF)."""
WAITING_PART = 0.2
"""The same while a rank waits for others or for the network: it polls."""
HOST_POWER_W = 40.0
"""A node's share of power that is no device's: fans, disks, network, and idle CPUs of a GPU node, per device."""
PUE = 1.4
"""Power usage effectiveness, a data centre's power over its computers'; Uptime Institute, about 1.5 on average."""


def rank_watts(device: Device, busy: float) -> float:
    """Mean power of one rank that computes for the part ``busy`` (0..1) of a step, host and data centre included."""
    reach = device.peak_power_W - device.idle_power_W
    dynamic = reach * (busy * COMPUTING_PART + (1 - busy) * WAITING_PART)
    host = HOST_POWER_W if device.kind == "gpu" else 0.0  # a CPU's own figures are the host's
    return PUE * (device.idle_power_W + dynamic + host)


def cost_usd(device: Device, seconds: float, ranks: int) -> float:
    """Price of ``ranks`` devices for ``seconds``."""
    return device.usd_per_h / 3600 * seconds * ranks
