"""Compare the steps of the hardware probe with data sheets: fit the factors of measured to predicted times.

Each factor belongs to one part of a step (``TimeFactors``). The fit is the maximum a posteriori estimate of the
logarithms of the factors. Before the measurement, each logarithm is distributed normally around 0 with the standard
deviation ``PRIOR``, so that the factor of a part that the measured networks hardly use stays near 1. Errors of
measurements have Student's t distribution, so that a disturbed step has little weight.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from math import prod

import numpy as np

from dlcontract.hardware import REFERENCE_NETS, HardwareMeasure, LinkRate, ReferenceNet, TimedStep
from dljob.cluster import catalogue
from dljob.cluster.catalogue import Device, TimeFactors
from dljob.cluster.hardware import Hardware, LinkSpeed
from dljob.perf.fit.fitting import Floats
from dljob.perf.step.compute import catalogue_curve
from dljob.perf.step.core_scaling import SATURATING_PART, SERIAL, CoreUse
from dljob.perf.workload.datasets import Dataset
from dljob.perf.workload.layers import Net
from dljob.perf.workload.models import add_block
from dljob.perf.workload.workload import Workload, in_precision, of_layers

PRIOR = 0.7
"""Standard deviation of the logarithm of a factor before the measurement: a factor of 2."""
SERIAL_PRIOR = 1.0
"""Standard deviation, before the measurement, of the logarithm of the serial fraction of the arithmetic.

The serial fraction is the part that more cores do not speed up. Its median is ``SERIAL``."""
MEMORY_PRIOR = 0.5
"""Standard deviation, before the measurement, of the logarithm of the number of cores that use up the memory bandwidth.

The median of this number is ``SATURATING_PART`` of the node's cores."""
NOISE = 0.1
"""Standard deviation of log(measured / predicted) of a step. Noise and inexact formulas cause it."""
TAIL = 4.0
"""Degrees of freedom of Student's t distribution, which the noise of measured steps has."""
ROUNDS = 20
DISTURBED = 1.1
"""A step on several cores that takes more than this many times its time on one core was disturbed and is ignored."""
CPU_PARTS = ("host", "convolution", "product", "activation", "weight")
GPU_PARTS = (*CPU_PARTS, "half")


@cache
def workload(net: str) -> Workload:
    """Return the workload of the probe's reference network ``net``. Raise KeyError if this release does not know it."""
    return workload_of(REFERENCE_NETS[net], net)


@lru_cache(maxsize=128)
def workload_of(net: ReferenceNet, name: str = "network of the probe") -> Workload:
    """Return the workload of a network that the probe trains with SGD with momentum."""
    table, element_nbytes = Net(*net.shape), 4
    for layer, *sizes in net.layers:
        if layer == "conv":
            table.conv(sizes[0], 3)
        elif layer == "pool":
            table.pool(2)
        elif layer == "block":
            add_block(table, sizes[0])
        else:
            element_nbytes = 8 if layer == "embedding" else element_nbytes  # tokens are integers of 64 bits
            getattr(table, layer)(*sizes)
    return of_layers(name, table, Dataset(0, 0, net.shape, 10, element_nbytes * prod(net.shape)))


def compared(measure: HardwareMeasure, device: Device | None = None) -> Hardware:
    """Return the constants of the hardware that a probe has measured, with factors relative to a data sheet.

    ``measure``: the probe's document. ``device``: the data sheet; for CPUs, that of one core. None: the data sheet of
    the device that the document names. Implausible values stay: ``Hardware.believed`` limits them.
    """
    on_gpu = measure.kind == "gpu"
    if device is None:
        device = catalogue.gpu_or_assumed(measure.device) if on_gpu else catalogue.cpu("cpu", 1.0)
    one_Bps = next((rate.Bps for rate in measure.memory if rate.cores == 1), None)
    factors, scaling, deviation = _fit(measure, device)
    return Hardware(
        factors=factors,
        deviation=deviation,
        serial=scaling[0] if scaling else None,
        memory_cores=scaling[1] if scaling else None,
        memory_Bps=one_Bps,
        disk_Bps=measure.disk.read_Bps if measure.disk and measure.disk.direct else None,
        disk_write_Bps=measure.disk.write_Bps if measure.disk else None,
        near=_speed(measure.near),
        far=_speed(measure.far),
    )


def _speed(link: LinkRate | None) -> LinkSpeed | None:
    return None if link is None else LinkSpeed(link.latency_s, link.Bps)


def usable(measure: HardwareMeasure) -> list[TimedStep]:
    """Return the measured steps that can be used: those of networks that this release knows.

    Steps on several cores that took much longer than on one core (``DISTURBED``) are left out, because other processes
    disturbed them.
    """
    known = [step for step in measure.steps if step.net in REFERENCE_NETS]
    single = {(step.net, step.batch): step.s for step in known if step.cores == 1}
    return [
        step
        for step in known
        if step.cores == 1 or step.s <= DISTURBED * single.get((step.net, step.batch), float("inf"))
    ]


def _fit(measure: HardwareMeasure, device: Device) -> tuple[TimeFactors, tuple[float, float] | None, float]:
    """Return (factors, scaling, standard deviation of log(measured / fitted)) of the probe's measured steps.

    The scaling is (fraction of the arithmetic that more cores do not speed up, number of cores that use the whole
    memory bandwidth), or None for a GPU and if no steps on several cores are usable. The measured bandwidth of large
    copies does not tell this number of cores, because most traffic of small networks stays in caches.
    """
    steps = usable(measure)
    if not steps:
        return TimeFactors(), None, 0.0
    parts = GPU_PARTS if device.kind == "gpu" else CPU_PARTS
    scales = device.kind == "cpu" and any(step.cores > 1 for step in steps)
    spread = np.array([PRIOR] * len(parts) + [SERIAL_PRIOR, MEMORY_PRIOR] * scales)
    log_s = np.log([step.s for step in steps])
    saturating = max(2.0, SATURATING_PART * measure.node_cores)

    def of(logs: Floats) -> tuple[TimeFactors, tuple[float, float] | None]:
        values = np.exp(logs).tolist()
        factors = TimeFactors(**dict(zip(parts, values, strict=False)))
        return factors, (min(1.0, SERIAL * values[-2]), max(1.0, saturating * values[-1])) if scales else None

    def predicted(logs: Floats) -> Floats:
        return np.log([_step_s(step, measure, device, *of(logs)) for step in steps])

    logs = map_estimate(predicted, log_s, spread)
    residuals = log_s - predicted(logs)
    weights = _weights(residuals)
    return *of(logs), float(np.sqrt((weights * residuals**2).sum() / weights.sum()))


def _step_s(
    step: TimedStep,
    measure: HardwareMeasure,
    device: Device,
    factors: TimeFactors,
    scaling: tuple[float, float] | None,
) -> float:
    """Return the predicted seconds of a step of the probe on ``device``, multiplied by ``factors``.

    ``scaling``: (serial fraction of the arithmetic, number of cores that use the whole memory bandwidth) of a CPU node;
    None: assumed values.
    """
    typed = in_precision(workload(step.net), step.precision)
    if device.kind == "gpu":
        return catalogue_curve(typed, replace(device, factors=factors)).seconds(step.batch)
    use = CoreUse(float(step.cores), 1, float(max(measure.node_cores, step.cores)))
    if scaling is not None:
        use = replace(use, serial=scaling[0], memory_cores=scaling[1])
    chip = replace(device, factors=factors, fp32_FLOPs=device.fp32_FLOPs * step.cores)
    return catalogue_curve(typed, chip, float(step.cores), use).seconds(step.batch)


def _weights(residuals: Floats, noise: float = NOISE) -> Floats:
    """Return the weight of each measurement in the next least-squares fit (iteratively reweighted least squares).

    ``residuals``: log(measured / predicted) of each measurement. ``noise``: their usual standard deviation. Large
    residuals get small weights, by Student's t distribution.
    """
    return np.asarray((TAIL + 1) / (TAIL + (residuals / noise) ** 2))


def map_estimate(predicted: Callable[[Floats], Floats], log_s: Floats, spread: Floats, noise: float = NOISE) -> Floats:
    """Return the most probable logarithms of the factors, which have the mean 0 and the deviations ``spread``.

    ``predicted``: function from logarithms of factors to log(step seconds) of each measured step. ``log_s``: log of the
    measured seconds. ``noise``: standard deviation of a measurement. The method is Gauss-Newton with numeric
    derivatives. A step that makes the fit worse is halved.
    """
    at = np.zeros(len(spread))

    def misfit(tried: Floats, weights: Floats) -> float:
        return float((weights * (log_s - predicted(tried)) ** 2).sum() / noise**2 + ((tried / spread) ** 2).sum())

    for _ in range(ROUNDS):
        base = predicted(at)
        weights = _weights(log_s - base, noise)
        slopes = _slopes(predicted, at)
        normal = (slopes.T * weights) @ slopes / noise**2 + np.diag(1 / spread**2)
        move = np.linalg.solve(normal, (slopes.T * weights) @ (log_s - base) / noise**2 - at / spread**2)
        length, now = 1.0, misfit(at, weights)
        while length > 0.01 and not misfit(at + length * move, weights) <= now:
            length /= 2
        if length <= 0.01:
            break
        at = at + length * move
        if float(np.abs(length * move).max()) < 1e-3:
            break
    return np.asarray(at)


def _slopes(predicted: Callable[[Floats], Floats], at: Floats, step: float = 1e-3) -> Floats:
    """Return the Jacobian of ``predicted`` at ``at``, of shape (values, parameters), by central differences.

    ``predicted``: logarithms of factors -> log(seconds). ``step``: distance to each side. At a kink, the result is the
    mean of the slopes on both sides.
    """
    units = step * np.eye(len(at))
    return np.stack([(predicted(at + unit) - predicted(at - unit)) / (2 * step) for unit in units], axis=1)
