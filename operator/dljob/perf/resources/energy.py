"""Power of a rank while it computes and waits; ``planner/candidates/evaluate.py`` computes the energy of a plan.

The energy of a plan is the sum over its ranks, times the run time. This module also has the price of devices;
``cluster/prices.py`` adds that of energy.

A device always draws at least its idle power. It draws the most power while it computes, but rarely as much as its
power limit allows. While it waits, it draws less.
"""

from dljob.cluster.catalogue import Device

COMPUTING_PART = 0.75
"""Power above idle while a rank computes, as a fraction of peak minus idle power. In the public measurements of Zeus on
a V100 and a P100, it is 0.86 and 0.59 (ResNet-50), 0.89 and 0.65 (BERT), 0.62 and 0.42 (DeepSpeech2), and 0 for a model
that hardly uses its GPU (NCF)."""
WAITING_PART = 0.2
"""Power above idle while a rank waits for other ranks or for the network, as a fraction of peak minus idle power.

It is above 0, because a waiting rank polls."""
LAUNCHING_PART = 0.12
"""Power above idle while a GPU waits for its host to launch the next kernel, as a fraction of peak minus idle power.

benchmarks/gpu/predictions.py measured 137 to 236 W on an H200 (idle: 77 W, peak: 700 W) in steps whose kernels fill a
tenth of the time by the roofline, and 535 W (``COMPUTING_PART``: 544 W) where they fill nearly all of it."""
HELD_CLOCK = 0.87
"""Mean clock of a busy GPU without a clock limit, divided by its maximum clock.

Under its power limit, a busy GPU does not hold the maximum. A clock limit above this fraction has no effect. Fitted
with ``power.CLOCK_PART`` (benchmarks/perfmodel/formats/clocks.py has the data)."""
KNEE_CLOCK, KNEE_VOLTAGE = 0.65, 0.7
"""Clock at and below which the voltage is lowest, and this voltage, as fractions of the maximum clock and its voltage.

In between, the voltage is linear in the clock. Fitted on the same measurements. The energy of Perseus' measured steps
is lowest at 0.62 to 0.77 of the maximum clock."""
MAX_OF_PEAK = 1.25
"""Largest measured power that is believed, divided by the peak power of the catalogue. Short peaks may exceed it."""
HOST_POWER_W = 40.0
"""Power in watts of the rest of a GPU node (fans, disks, network, idle CPUs), for each device of the node."""
PUE = 1.4
"""Power usage effectiveness: the power of a whole data centre divided by the power of its computers.

The Uptime Institute reports 1.5 on average."""


def rank_watts(device: Device, busy: float, active: float = 1.0) -> float:
    """Return a rank's mean power in watts, including its host's power and the data centre's overhead.

    ``busy``: fraction of the step in which the rank computes (0 to 1). ``active``: as for ``device_watts``.
    """
    return overhead(device) * (device_watts(device, busy, active) + host_watts(device))


def device_watts(device: Device, busy: float, active: float = 1.0) -> float:
    """Return the mean power in watts of a rank's device alone.

    ``busy``: fraction of the step in which the rank computes (0 to 1). ``active``: fraction of this time in which the
    device itself works (``perf.step.compute.active_part``). A measured power includes its pauses.
    """
    reach, computing = device.peak_power_W - device.idle_power_W, device.computing_power_W
    reach *= dynamic_part(device)
    limit_W = device.power_limit_W or device.peak_power_W
    if computing is None:
        working = device.active_power_W
        working_W = device.idle_power_W + COMPUTING_PART * reach if working is None else working
        launching_W = device.idle_power_W + LAUNCHING_PART * reach
        computing = active * min(working_W, limit_W) + (1 - active) * min(launching_W, limit_W)
    return busy * computing + (1 - busy) * min(device.idle_power_W + WAITING_PART * reach, limit_W)


def clock_part(device: Device) -> float:
    """Return the clock of a busy device divided by its maximum clock: ``HELD_CLOCK``, or less under a clock limit.

    Without a clock limit, and for devices whose maximum clock is unknown, the result is ``HELD_CLOCK``.
    """
    if device.clock_limit_MHz is None or device.max_clock_MHz <= 0:
        return HELD_CLOCK
    return min(HELD_CLOCK, device.clock_limit_MHz / device.max_clock_MHz)


def dynamic_part(device: Device) -> float:
    """Return the power above idle under the device's clock limit, divided by that without it; 1 without a limit.

    Dynamic power is proportional to f V(f)^2 with the clock f and the voltage V (Weste and Harris, CMOS VLSI Design,
    chapter 5). V is linear in f down to ``KNEE_CLOCK`` and constant below. Afzal et al. (arXiv 2607.00819) also find a
    clock of each GPU below which power is linear. Waiting ranks poll, so that their power follows the clock as well.
    """
    return _dynamic(clock_part(device)) / _dynamic(HELD_CLOCK)


def _dynamic(clock: float) -> float:
    above = max(0.0, clock - KNEE_CLOCK) / (1 - KNEE_CLOCK)
    voltage = KNEE_VOLTAGE + (1 - KNEE_VOLTAGE) * above
    return clock * voltage**2


def idle_watts(device: Device) -> float:
    """Return a rank's power in watts while its device is idle, with its host's power and the data centre's overhead.

    A waiting rank polls, and draws more (``rank_watts``).
    """
    idle_W = min(device.idle_power_W, device.power_limit_W or device.idle_power_W)
    return overhead(device) * (idle_W + host_watts(device))


def believable_watts(device: Device, measured_W: float) -> float:
    """Return the measured power of a computing device, limited to values that the device can have.

    It is at least the idle power, and at most ``MAX_OF_PEAK`` times the power limit or, without one, the peak power. A
    profile that is wrong by a factor of 100 must not decide which device uses the least energy.
    """
    most_W = MAX_OF_PEAK * (device.power_limit_W or device.peak_power_W)
    return min(max(measured_W, device.idle_power_W), most_W)


def host_watts(device: Device) -> float:
    """Return the power in watts of the rest of the node for one of its GPUs; 0 for CPUs, whose figures include it."""
    if device.kind == "cpu":
        return 0.0
    return HOST_POWER_W if device.host_power_W is None else device.host_power_W


def overhead(device: Device) -> float:
    """Return the power of the device's data centre, divided by the power of the computers in it (PUE)."""
    return PUE if device.pue is None else device.pue


def cost_usd(device: Device, seconds: float, ranks: int) -> float:
    """Return the price in US dollars of using ``ranks`` devices for ``seconds`` seconds.

    The price of energy is not included: ``Prices.with_energy_usd`` adds it.
    """
    return device.usd_per_h / 3600 * seconds * ranks
