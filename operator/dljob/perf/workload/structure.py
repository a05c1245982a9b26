"""CPU time of a step and memory of a rank on CPUs, regressed on the structure of generated networks.

Both are sums of terms over the layer table, each with a measured coefficient of 0 or more.
``benchmarks/perfmodel/structure_regression.py`` trains the networks, prints how well the sums predict structures that
they never saw and, with ``--refit``, the constants below.
"""

from collections.abc import Mapping

from dljob.perf.workload.workload import REAL_NBYTES, Workload

CORE_FLOPs = 96e9
"""Peak of the catalogue's core (``hardware.cpu``) that stands for the core of the measurements."""

HOST_S: Mapping[str, float] = {"step": 3.72e-5, "layer": 8.79e-5}
"""Seconds that the framework takes for a step and for a layer, whatever the batch."""
TIME_S: Mapping[str, float] = {
    "convolution_FLOP": 7.16e-12,
    "product_FLOP": 9.46e-12,
    "convolution_B": 2.06e-10,
    "pool_B": 9.36e-10,
    "other_B": 8.6e-11,
    "weight_B": 3.45e-11,
    "large_weight_B": 7.26e-11,
}
"""Core seconds for each unit of ``time_terms``."""
CACHED_NBYTES = 4 * 2**20
"""Weights of a layer beyond this come from memory in every pass: between a core's second-level cache and its part of
the third level; 1 and 16 MiB fit nearly as well."""
GROWTH: Mapping[str, float] = {"process": 3.51e7, "parameter_B": 1.35, "kept_B": 1.74, "largest_B": 1.17}
"""Bytes for each unit of ``growth_terms``."""


def host_terms(workload: Workload) -> dict[str, float]:
    """How often a step pays what is in ``HOST_S``."""
    return {"step": 1.0, "layer": float(len(workload.layers))}


def time_terms(workload: Workload, batch: float) -> dict[str, float]:
    """Work of a step on ``batch`` samples: operations of forward and backward pass, bytes moved.

    Convolutions are apart from matrix products, and what they and pools move from what others move: they lay tensors
    out anew. Weights are read by both passes and their gradients written by the second; the update reads and writes
    parameters, gradients and the optimizer's state.
    """
    found = dict.fromkeys(TIME_S, 0.0)
    passes = REAL_NBYTES * (7.0 + 2.0 * workload.optimizer_slots)
    for layer in workload.layers:
        found["convolution_FLOP" if layer.is_conv else "product_FLOP"] += batch * (
            layer.forward_FLOPs + layer.backward_FLOPs
        )
        mover = "convolution_B" if layer.is_conv else "pool_B" if layer.kind == "pool" else "other_B"
        found[mover] += batch * REAL_NBYTES * layer.moved_elements
        found["weight_B"] += passes * layer.parameters
        found["large_weight_B"] += passes * max(0.0, layer.parameters - CACHED_NBYTES / REAL_NBYTES)
    return found


def growth_terms(workload: Workload, batch: float) -> dict[str, float]:
    """What training on ``batch`` samples adds to a process: bytes by kind, and once what every process adds.

    Parameters come with gradients and the optimizer's state; kept activations with the samples themselves.
    """
    return {
        "process": 1.0,
        "parameter_B": (2.0 + workload.optimizer_slots) * REAL_NBYTES * workload.parameters,
        "kept_B": batch * (workload.activation_nbytes + workload.sample_nbytes),
        "largest_B": batch * workload.transient_nbytes,
    }


def total(terms: Mapping[str, float], coefficients: Mapping[str, float]) -> float:
    """Sum of each term times its coefficient."""
    return sum(coefficients[name] * amount for name, amount in terms.items())
