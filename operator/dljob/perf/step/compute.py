"""Compute time of forward pass, backward pass and update on one device, as a function of its batch.

Without measurements, a GPU is modelled by a roofline per layer (Williams et al. 2009): a layer takes the time of its
arithmetic or of its memory traffic, whichever is longer. The framework's overhead per layer does not depend on the
batch. CPUs are modelled by a regression with measured coefficients (``perf.workload.structure``). With measurements,
the curve passes through the measured points. Outside their range, it has the shape that is predicted without them.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dlcontract import Precision
from dljob.cluster.catalogue import Device
from dljob.perf.fit.curve import Curve, nondecreasing
from dljob.perf.fit.few_points import knots_through
from dljob.perf.resources.power import slowed
from dljob.perf.step.core_scaling import ONE_CORE, CoreUse
from dljob.perf.workload import structure
from dljob.perf.workload.layer import Layer
from dljob.perf.workload.layers import PRODUCTS
from dljob.perf.workload.workload import REAL_NBYTES, Workload

ARITHMETIC_EFFICIENCY = {"cpu": 0.75, "gpu": 0.55}
"""Fraction of the peak that matrix products and convolutions reach in single-precision training. The CPU value is from
benchmarks/perfmodel/compute_constants.py and prediction.py, which found 0.7 to 0.95 of the peak of the catalogue's
generic core. The GPU value is an assumption."""
TENSOR_EFFICIENCY = 0.25
"""Fraction of a tensor core's peak that TF32 convolutions reach. For 16-bit ones, the same is assumed; with this
value, benchmarks/perfmodel/published_precision.py predicts 1.2 to 1.4 times NVIDIA's times of ResNet-50."""
PRODUCT_EFFICIENCY_16 = 0.7
"""Fraction of a tensor core's peak that matrix products and attention reach in 16 bits, without all that is not a
product. An A100 reaches 0.87 in products of the best shapes (stas00/ml-engineering, commit 744d01e: 271 TFLOP/s), and
0.71 at the clock to which its power limit slows it down (liangan1/GPU_travel: 220 TFLOP/s). Causal attention is counted
with all scores, of which kernels compute half at about half this rate (same source). With this value,
``benchmarks/perfmodel/large_models.py`` predicts 0.98 of published step times at the median."""
CAST_NBYTES = 18
"""Bytes per parameter and step that autocast to 16 bits reads and writes: the conversion of the parameter (4 + 2), its
use in both passes (2 + 2), its gradient (2), and the conversion of the gradient (2 + 4). In float32 it is 3 x 4."""
RECAST_NBYTES = 8
"""Bytes per parameter that a second forward pass with autocast adds: another conversion (4 + 2), and its use (2)."""
BANDWIDTH_EFFICIENCY = 0.75
"""Fraction of the peak memory bandwidth that streaming kernels reach."""

LAYER_OVERHEAD_S = 25e-6
"""PyTorch's overhead per layer and step (dispatch of forward, backward and update) on one core.
benchmarks/perfmodel/compute_constants.py measured 24 us on a virtual core of an AMD EPYC."""
STEP_OVERHEAD_S = 300e-6
"""Overhead of a step outside the layers (batch, loss and training loop) on one core, in seconds.

benchmarks/perfmodel/compute_constants.py measured it."""

GPU_LAYER_OVERHEAD_S = 150e-6
GPU_STEP_OVERHEAD_S = 1900e-6
GPU_CAST_OVERHEAD = 1.25
"""Overheads per layer and per step on the host of a GPU, and their factor with autocast, which launches casts as well.

On a GPU, the host also launches each kernel and allocates its result. benchmarks/gpu/predictions.py measured a
computing time of 2.4 ms (5 layers), 3.0 (9), 8.6 (43), 14.7 (67) and 27.5 (173) on the host of an H200, a virtual
machine on an Intel Xeon, at small batches. With autocast, it was 1.2 to 1.3 times as long. Gavel's public measurements
confirm the order: with batches of 16 and 32, ResNet-18 took 24 to 27 ms on a P100 and 31 to 33 ms on a V100."""
LOOP_S = 400e-6
"""Time per step of a CPU rank's training loop outside the step that the regression describes: the next batch, checks
of gradients, metrics, agreement with the agent.

On the development cluster (benchmarks/predictions/__main__.py), steps of 1 to 4 ms took 0.4 to 0.7 ms longer than the
same steps in a bare loop, on cores whose overhead was 1.4 times that of the constants."""


def loop_s(device: Device, cores: float) -> float:
    """Return the seconds per step of the training loop (``LOOP_S``) on a rank with ``cores`` CPUs of ``device``."""
    return device.factors.host * LOOP_S / min(1.0, cores)


def host_overhead_s(workload: Workload, cores: float = 1.0, factor: float = 1.0, *, is_gpu: bool = False) -> float:
    """Return the framework's overhead per step in seconds, which does not depend on the batch.

    A single thread causes it, so only a rank with less than one core takes longer. ``factor``: measured overhead,
    relative to that of the constants. ``is_gpu``: True if the host launches the kernels of a GPU.
    """
    layers = structure.host_layers(workload)
    if is_gpu:
        factor *= GPU_CAST_OVERHEAD if workload.precision != "FP32" else 1.0
        return factor * (GPU_STEP_OVERHEAD_S + GPU_LAYER_OVERHEAD_S * layers) / min(1.0, cores)
    return factor * (STEP_OVERHEAD_S + LAYER_OVERHEAD_S * layers) / min(1.0, cores)


def step_overhead_s(workload: Workload, *, is_gpu: bool) -> float:
    """Return the part of ``host_overhead_s`` that occurs once per step, however many micro-batches it has."""
    if not is_gpu:
        return STEP_OVERHEAD_S
    return GPU_STEP_OVERHEAD_S * (GPU_CAST_OVERHEAD if workload.precision != "FP32" else 1.0)


@lru_cache(maxsize=256)
def update_s(workload: Workload, device: Device, use: CoreUse = ONE_CORE) -> float:
    """Return the seconds in which the optimizer updates all parameters once, at the end of a step.

    An update sets gradients to zero and reads them. It reads and writes parameters and optimizer state. ``use``: on a
    CPU node, the cores of the rank and of the node's other ranks; not used for GPUs.
    """
    if device.kind == "cpu":  # ``structure`` also counts the accesses to weights by forward and backward pass
        accesses = 4 + 2 * workload.optimizer_slots
        passes = sum(layer.weight_accesses * layer.parameters for layer in workload.layers) / workload.parameters
        terms = _measured_s(structure.time_terms(workload, 0), structure.TIME_S, device)
        weights = sum(seconds for name, seconds in terms.items() if name != "convolution_weight_B")
        return weights * accesses / (accesses + passes) / (use.traffic * _core_speed(device, use))
    return _sheet_update_s(workload, device)


def _sheet_update_s(workload: Workload, device: Device) -> float:
    device = slowed(device)
    accesses = 4 + 2 * workload.optimizer_slots
    return (
        device.factors.weight
        * accesses
        * workload.gradient_nbytes
        / (device.memory_bandwidth_Bps * BANDWIDTH_EFFICIENCY)
    )


@lru_cache(maxsize=256)
def catalogue_curve(workload: Workload, device: Device, cores: float = 1.0, use: CoreUse | None = None) -> Curve:
    """Predict the compute seconds of a step over the batch, for a workload that was never measured on this device.

    The result is ``regressed`` for a CPU and ``roofline`` for a GPU. ``cores``: CPUs that the rank's framework threads
    may use. ``use``: on a CPU node, the cores of the rank and of the node's other ranks; None: there are no others.
    """
    return (
        regressed(workload, device, use or CoreUse(cores))
        if device.kind == "cpu"
        else roofline(workload, device, cores)
    )


def regressed(workload: Workload, device: Device, use: CoreUse = ONE_CORE) -> Curve:
    """Return a CPU's compute seconds of a step over the batch, as a line with the fitted coefficients in ``structure``.

    The coefficients are the times on one core. ``core_scaling`` divides them by the speed of more cores, separately for
    arithmetic and for memory traffic. The framework's overhead runs in one thread, so it takes longer below one CPU,
    but no less time above. ``use``: the cores of the rank and of the node's other ranks. If the peak of ``device``
    differs from that of ``use.cores`` cores in the catalogue, all times are divided by the ratio of the two peaks,
    except for the framework's overhead. The measured factors of the device (``Device.term_factors``, or ``factors``)
    multiply the terms.
    """
    host = sum(
        _measured_s(structure.host_terms(workload), {**structure.HOST_S, **structure.CALL_S}, device).values()
    ) / min(1.0, use.cores)
    host += use.fork_s * len(workload.layers)
    speed = _core_speed(device, use)
    fixed, one = (_on_cores(structure.time_terms(workload, b), use, device) / speed for b in (0, 1))
    return Curve((0.0,), (host + fixed,), max(one - fixed, 1e-12))


def _core_speed(device: Device, use: CoreUse) -> float:
    """Return the speed of one of the device's cores, relative to a core of the catalogue."""
    return device.fp32_FLOPs / (structure.CORE_FLOPs * use.cores)


PART_OF_TERM = {
    "step": "host",
    "layer": "host",
    **dict.fromkeys(structure.CALL_S, "host"),
    "convolution_FLOP": "convolution",
    "padding_FLOP": "convolution",
    "narrow_FLOP": "convolution",
    "function_FLOP": "product",
    "product_FLOP": "product",
    "convolution_B": "activation",
    "pooling_B": "activation",
    "other_B": "activation",
    "simple_B": "activation",
    "weight_B": "weight",
    "large_weight_B": "weight",
    "convolution_weight_B": "weight",
}
"""Term of ``structure.host_terms`` or ``time_terms`` → the field of ``TimeFactors`` that measures it."""


def _measured_s(terms: Mapping[str, float], unit_s: Mapping[str, float], device: Device) -> dict[str, float]:
    """Return the seconds of each term on the device's cores: amount, seconds for a unit, and measured factor."""
    own, parts = dict(device.term_factors), vars(device.factors)

    def each_s(name: str) -> float:
        if name in own:
            return own[name] * structure.UNIT_S[name]
        return float(parts[PART_OF_TERM[name]]) * unit_s[name]

    return {name: each_s(name) * amount for name, amount in terms.items()}


def _on_cores(terms: Mapping[str, float], use: CoreUse, device: Device) -> float:
    """Return the seconds for the work ``terms`` on the cores ``use`` of the catalogue's speed.

    ``terms``: operations and bytes by name, from ``structure.time_terms``. ``device``: has the measured factors.
    """
    seconds = _measured_s(terms, structure.TIME_S, device)
    arithmetic_s = sum(each for name, each in seconds.items() if name.endswith("_FLOP"))
    return arithmetic_s / use.arithmetic + (sum(seconds.values()) - arithmetic_s) / use.traffic


@lru_cache(maxsize=256)
def roofline(workload: Workload, device: Device, cores: float = 1.0) -> Curve:
    """Return the compute seconds of a step over the batch b from the device's data sheet and its measured factors.

    A layer takes max((F + B) b / peak, (M b + 3 P) / bandwidth). F and B are its operations per sample in forward and
    backward pass, M the bytes per sample that it reads and writes, and P the bytes of its parameters. Peak and
    bandwidth include the usual efficiency. With activation checkpointing, F and the forward pass's part of M and 3 P
    count twice in layers of blocks. The sum over the layers is piecewise linear in b, with a knot where a layer turns
    from memory-bound to compute-bound. The optimizer's update is added. On a GPU, the longer of device time and host
    time counts, because the host runs ahead of the device; on a CPU, the two add up. A power limit of the device slows
    down what it does, not the host. ``cores``: CPUs that the rank's framework threads may use.
    """
    curve = kernels_curve(workload, device)
    host = host_overhead_s(workload, cores, device.factors.host, is_gpu=device.kind == "gpu")
    return at_least(curve, host) if device.kind == "gpu" else curve.later(host)


def active_part(workload: Workload, device: Device, batch: float) -> float:
    """Return the fraction of a step's computing in which the device itself works; 1 on CPUs.

    In the rest, a GPU waits until its host has launched the next kernel.
    """
    if device.kind == "cpu":
        return 1.0
    return kernels_curve(workload, device).seconds(batch) / roofline(workload, device).seconds(batch)


def active_parts(workload: Workload, device: Device, batches: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``active_part`` of a GPU for each batch in the array ``batches``."""
    return kernels_curve(workload, device).seconds_array(batches) / roofline(workload, device).seconds_array(batches)


@lru_cache(maxsize=256)
def kernels_curve(workload: Workload, device: Device) -> Curve:
    """Return the seconds in which the device itself works in a step, over the batch: ``roofline`` without the host."""
    device = slowed(device)
    bandwidth = device.memory_bandwidth_Bps * BANDWIDTH_EFFICIENCY
    arithmetic, traffic, weights = (
        np.array(column)
        for column in zip(
            *(_line(layer, device, bandwidth, workload.precision) for layer in workload.layers), strict=True
        )
    )
    fixed = _sheet_update_s(workload, device)
    crosses = (arithmetic > traffic) & (weights > 0)
    crossings = np.unique(weights[crosses] / (arithmetic - traffic)[crosses])
    batches = np.concatenate([[0.0], crossings])[:, None]
    times = fixed + np.maximum(arithmetic * batches, traffic * batches + weights).sum(axis=1)
    # Rounding may make a sum of nondecreasing terms decrease by a bit.
    times = np.maximum.accumulate(times)
    slope = float(np.maximum(arithmetic, traffic).sum()) or 1e-12
    return Curve(tuple(batches[:, 0].tolist()), tuple(times.tolist()), slope)


def arithmetic_FLOPs(workload: Workload, device: Device) -> float:  # noqa: N802 - the unit is part of the name
    """Return the operations per second that a device reaches in a step of the workload if memory traffic costs nothing.

    Each layer reaches its usual efficiency.
    """
    device = slowed(device)
    bandwidth = device.memory_bandwidth_Bps
    lines = [_line(layer, device, bandwidth, workload.precision)[0] for layer in workload.layers]
    operations = sum(layer.forward_FLOPs + layer.backward_FLOPs for layer in workload.layers)
    return operations / sum(lines) if operations > 0 else device.fp32_FLOPs


def _line(
    layer: Layer, device: Device, bandwidth_Bps: float, precision: Precision = "FP32"
) -> tuple[float, float, float]:
    """Return a layer's (arithmetic seconds per sample, traffic seconds per sample, traffic seconds of parameters).

    Traffic is data that the layer reads from and writes to memory. The parameters' traffic occurs once per step.
    ``bandwidth_Bps``: the reachable memory bandwidth. A 16-bit ``precision`` without units on the device has the speed
    of float32. The measured factors of the device multiply all times.
    """
    factors = device.factors
    operations, peak_16 = layer.forward_FLOPs + layer.backward_FLOPs, device.matrix_FLOPs(precision)
    if precision != "FP32":
        recast = RECAST_NBYTES * (layer.weight_accesses - 3)
        traffic, weights = layer.moved_16_nbytes, (CAST_NBYTES + recast) * layer.parameters
    else:
        traffic = REAL_NBYTES * layer.moved_elements
        weights = layer.weight_accesses * REAL_NBYTES * layer.parameters
    if precision != "FP32" and peak_16 and layer.kind in PRODUCTS:
        speed = peak_16 * (TENSOR_EFFICIENCY if layer.is_conv else PRODUCT_EFFICIENCY_16) / factors.half
    else:
        peak = device.conv_FLOPs if layer.is_conv else device.fp32_FLOPs
        speed = peak * (TENSOR_EFFICIENCY if peak > device.fp32_FLOPs else ARITHMETIC_EFFICIENCY[device.kind])
        speed /= factors.convolution if layer.is_conv else factors.product
    return (
        operations / speed,
        factors.activation * traffic / bandwidth_Bps,
        factors.weight * weights / bandwidth_Bps,
    )


def at_least(curve: Curve, floor_s: float) -> Curve:
    """Return ``curve`` with all times below ``floor_s`` seconds raised to ``floor_s``.

    A GPU's step takes at least ``floor_s``, the time that the host needs to launch its kernels.
    """
    reach = curve.samples(floor_s)
    if curve.times_s[0] >= floor_s:
        return curve
    later = [(b, t) for b, t in zip(curve.batches, curve.times_s, strict=True) if b > reach and t > floor_s]
    knots = [(0.0, floor_s), (reach, floor_s), *later]
    return Curve(tuple(b for b, _ in knots), tuple(t for _, t in knots), curve.slope_s)


def calibrated(curve: Curve, points: Sequence[tuple[int, float]]) -> Curve:
    """Return ``curve``, which the device catalogue predicts, corrected by measured (batch, seconds) points.

    Times of equal batches are averaged, and the points are made nondecreasing. The result passes through the points,
    and the module ``few_points`` interpolates between them. Below the smallest measured batch, the result is ``curve``,
    multiplied by a factor so that it meets the first point. Above the largest measured batch, the result is a line.

    Let s be the final slope of ``curve``, multiplied by measured / predicted time at the largest measured batch. The
    slope of the line is s. However, if the largest measured batch is at least twice the smallest and takes longer, the
    slope is the mean slope between these two points, limited to between 0.25 s and s. Batches and times must be finite
    and positive.
    """
    return _calibrated(curve, tuple(points)) if points else curve


@lru_cache(maxsize=256)
def _calibrated(curve: Curve, points: tuple[tuple[int, float], ...]) -> Curve:
    by_batch: dict[int, list[float]] = {}
    for batch, seconds in points:
        by_batch.setdefault(batch, []).append(seconds)
    batches = sorted(by_batch)
    means = [sum(by_batch[b]) / len(by_batch[b]) for b in batches]
    times = nondecreasing(means, [float(len(by_batch[b])) for b in batches])
    low, high = times[0] / curve.seconds(batches[0]), times[-1] / curve.seconds(batches[-1])
    # The slope between two measured batches that are far enough apart is better than the catalogue's scaled slope.
    slope = high * curve.slope_s
    if batches[-1] >= 2 * batches[0] and times[-1] > times[0]:
        slope = (times[-1] - times[0]) / (batches[-1] - batches[0])
        slope = min(max(slope, 0.25 * high * curve.slope_s), high * curve.slope_s)
    before = [
        (b, low * t) for b, t in zip(curve.batches, curve.times_s, strict=True) if b < batches[0] and low * t < times[0]
    ]
    knots = [*before, *knots_through(batches, times)]
    return Curve(tuple(b for b, _ in knots), tuple(t for _, t in knots), slope)


def scatter(points: Sequence[tuple[int, float]]) -> float:
    """Return how much measured (batch, seconds) points scatter: the standard deviation of their errors around a line.

    Errors are relative, and the line minimizes their squares. The planner counts the result as a part of the
    uncertainty of predicted times. With fewer than four points, which cannot tell noise from shape, return 0.
    """
    if len(points) < 4:
        return 0.0
    batches, times = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    design = np.stack([np.ones_like(batches), batches], axis=1) / times[:, None]
    line, *_ = np.linalg.lstsq(design, np.ones_like(times), rcond=None)
    residuals = design @ line - 1.0
    return float(np.sqrt((residuals**2).sum() / (len(points) - 2)))
