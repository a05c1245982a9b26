"""Step time and memory of a rank on CPUs, from a regression on the structure of generated networks.

Time and memory are sums of terms (such as operations or bytes moved) over the model's layers. Each term has a measured,
nonnegative coefficient.
``benchmarks/perfmodel/structure_regression.py`` trains the generated networks and prints the errors on held-out
structures. With ``--refit``, it also prints the constants below.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from dljob.perf.workload.layer import Layer
from dljob.perf.workload.workload import REAL_NBYTES, Workload

CORE_FLOPs = 96e9
"""Peak operations per second of a core in the catalogue (``catalogue.cpu``). The measurements behind the coefficients
are assumed to have used such a core."""

HOST_S: Mapping[str, float] = {"step": 3.72e-5, "layer": 8.79e-5}
"""Framework overhead in seconds per step and per layer, independent of the batch."""
CALL_S: Mapping[str, float] = {
    "updates": 1.1e-4,
    "functions": 1.6e-7,
    "different": 1.4e-6,
    "views": 1.9e-6,
    "operators": 3.5e-6,
    "products": 7.6e-6,
    "convolutions": 1.45e-4,
    "messages": 8.5e-5,
    "distributed": 1.5e-5,
    "random": 4.5e-9,
}
"""Seconds of the host for each counted call of an observed script (``dlcontract.HostCalls``), in place of ``HOST_S``.

Code that a step runs for the first time is not in the caches any more, so that a function costs more in its first call
of a step (``different``) than in the others. benchmarks/perfmodel/host_calls measured the constants with small
programs of its own on a virtual core of an AMD EPYC."""
TIME_S: Mapping[str, float] = {
    "convolution_FLOP": 7.16e-12,
    "padding_FLOP": 0.0,
    "narrow_FLOP": 7.16e-12,
    "function_FLOP": 0.0,
    "product_FLOP": 9.46e-12,
    "convolution_B": 2.06e-10,
    "pooling_B": 9.36e-10,
    "other_B": 8.6e-11,
    "simple_B": 8.6e-11,
    "weight_B": 3.45e-11,
    "large_weight_B": 7.26e-11,
    "convolution_weight_B": 0.0,
}
"""Term of ``time_terms`` → seconds on one core for one operation (FLOP) or one byte (B) of it.

The fit behind these constants did not have operations of padded channels, elementary functions, or conversions of the
weights of convolutions, so these take no time here. It had none of short rows either, which take the time of usual
operations."""
UNIT_S: Mapping[str, float] = {
    **HOST_S,
    **TIME_S,
    "padding_FLOP": TIME_S["convolution_FLOP"],
    "pooling_B": 4.7e-10,
    "simple_B": 2.2e-11,
    "function_FLOP": 4e-9,
    "convolution_weight_B": 1e-10,
}
"""Term → seconds that its measured factor multiplies (``Device.term_factors``)."""
CACHED_NBYTES = 4 * 2**20
"""Bytes of a layer's weights that stay in the cache; the rest is read from memory in every pass. The value is between
the size of a core's L2 cache and the core's part of the L3 cache. 1 and 16 MiB fit the measurements nearly as well."""
REDISPATCH = 1 / 3
"""Assumed overhead of a recomputed layer's second forward pass, as a fraction of the overhead per layer, which covers
forward pass, backward pass and update."""
GROWTH: Mapping[str, float] = {
    "process": 3.51e7,
    "convolution": 0.0,
    "parameter_B": 1.35,
    "kept_B": 1.74,
    "largest_B": 1.17,
}
"""Term of ``growth_terms`` → bytes of memory for one unit of it: for a process, or for one byte of the term. All
networks behind these constants have convolutions, whose kernels and scratch memory are therefore part of the process.
"""
GROWTH_UNIT: Mapping[str, float] = {**GROWTH, "convolution": 8e6}
"""Term → bytes that its measured factor multiplies (``Device.growth_factors``)."""


def host_layers(workload: Workload) -> float:
    """Return the number of layers, plus ``REDISPATCH`` for each layer that activation checkpointing runs again."""
    again = sum(layer.recomputable for layer in workload.layers) if workload.recomputes else 0
    return len(workload.layers) + REDISPATCH * again


def host_terms(workload: Workload) -> dict[str, float]:
    """Return {"step": 1, "layer": number of layers (``host_layers``)}, or the counted calls of an observed script.

    These counts, multiplied by the seconds in ``HOST_S`` or ``CALL_S``, give the framework's overhead per step.
    """
    if workload.host_calls is not None:
        return dict(workload.host_calls)
    return {"step": 1.0, "layer": float(host_layers(workload))}


@lru_cache(maxsize=256)
def time_terms(workload: Workload, batch: float) -> Mapping[str, float]:
    """Return the work of a step with ``batch`` samples, in the units of ``TIME_S``: operations and bytes moved.

    Convolutions and pools have separate terms, because they convert tensor layouts. Kernels of convolutions pad
    channels to full vector registers, and are slow with short rows. However small the batch, they convert the weights
    to another layout in each access of both passes. Exponentials and similar functions take longer than other
    operations, and sums and ReLUs less. The forward and the backward pass read the weights, and the backward pass
    writes their gradients. The update reads and writes parameters, gradients and optimizer state.
    """
    found = dict.fromkeys(TIME_S, 0.0)
    for layer in workload.layers:
        passes = REAL_NBYTES * (4.0 + layer.weight_accesses + 2.0 * workload.optimizer_slots)
        flops = batch * (layer.forward_FLOPs + layer.backward_FLOPs)
        found["convolution_FLOP" if layer.is_conv else "product_FLOP"] += flops
        found["padding_FLOP"] += layer.padding_part * flops
        found["narrow_FLOP"] += layer.narrow_part * flops
        found["function_FLOP"] += batch * layer.function_elements
        found[_mover(layer)] += batch * REAL_NBYTES * layer.moved_elements
        found["weight_B"] += passes * layer.parameters
        if layer.is_conv:
            found["convolution_weight_B"] += REAL_NBYTES * layer.weight_accesses * layer.parameters
        found["large_weight_B"] += passes * max(0.0, layer.parameters - CACHED_NBYTES / REAL_NBYTES)
    return MappingProxyType(found)


def _mover(layer: Layer) -> str:
    if layer.is_conv:
        return "convolution_B"
    if layer.kind == "pool":
        return "pooling_B"
    return "simple_B" if layer.kind in ("activation", "add") and not layer.function_elements else "other_B"


def growth_terms(workload: Workload, batch: float) -> dict[str, float]:
    """Return what the memory of a rank with a local batch of ``batch`` samples depends on, as {term: amount}.

    The amount of ``process`` is 1, and that of ``convolution`` is 1 with convolutions, else 0. All others are bytes.
    ``parameter_B``: parameters, gradients and optimizer state. ``kept_B``: samples, and activations that are kept for
    the backward pass. ``largest_B``: the largest transient activations. ``GROWTH`` has the coefficient of each term.
    """
    return {
        "process": 1.0,
        "convolution": float(workload.has_convolutions),
        "parameter_B": (2.0 + workload.optimizer_slots) * REAL_NBYTES * workload.parameters,
        "kept_B": batch * (workload.activation_nbytes + workload.sample_nbytes),
        "largest_B": batch * workload.transient_nbytes,
    }


def total(terms: Mapping[str, float], coefficients: Mapping[str, float]) -> float:
    """Return the sum of all terms, each multiplied by its coefficient.

    ``terms``: the amount of each term, by name. ``coefficients``: the seconds or bytes for a unit of each term, by
    name. The result is in seconds or bytes accordingly.
    """
    return sum(coefficients[name] * amount for name, amount in terms.items())
