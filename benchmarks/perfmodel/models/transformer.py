"""Model a transformer's iteration time under data, tensor and pipeline parallelism with fitted constants.

The model has L layers, hidden size h, sequence length s, vocabulary v and micro-batches of m sequences, with t-way
tensor, d-way data and p-way pipeline parallelism and global batch size B. k = B / (d m) micro-batches pass p stages in
k + p - 1 slots (Huang et al. 2019). A slot computes 24 m s h² (1 + s / 6h) L / (p t) operations forward (Narayanan et
al. 2021, without the head), and all-reduces activations of m s h over t ranks four times per layer (Shoeybi et al.
2019). Then gradients of (12 L h² + v h) / (p t) parameters are all-reduced over d ranks and applied.

The iteration time is a sum of such terms with nonnegative constants: seconds per operation, per byte on each kind of
link, per kernel, per step. They are fitted to measured iterations. The residuals are smooth in the configuration, so a
Gaussian process interpolates them.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from benchmarks.perfmodel.models.positive_fit import positive_fit

from dljob.perf.fit.fitting import Floats, checked, posterior, radial

VOCABULARY = 51_200
"""GPT-2's 50,257 tokens, padded for tensor parallelism."""
RESIDUAL_SPREAD, RESIDUAL_LENGTH, REPEAT_NOISE = 0.12, 1.0, 0.04
"""For the log of the residual. Length: in units of two doublings of a feature. Fitted to vTrain's single-node rows."""
OUTLIER = 3.0


@dataclass(frozen=True)
class Configuration:
    """Model and parallelism of one iteration. All are counts; ``global_batch`` and ``micro_batch`` in sequences."""

    global_batch: float
    micro_batch: float
    hidden: float
    heads: float
    layers: float
    sequence: float
    tensor: float
    data: float
    pipeline: float

    def __post_init__(self) -> None:
        checked(f"{self}", astuple(self))
        if self.global_batch < self.data * self.micro_batch:
            raise ValueError(f"{self}: global batch below data x micro batch, expected at least one micro-batch each")

    @property
    def is_data_parallel(self) -> bool:
        """Return True if there is neither tensor nor pipeline parallelism."""
        return self.tensor == 1 and self.pipeline == 1


def terms(configurations: Sequence[Configuration], devices_per_node: int = 8) -> dict[str, Floats]:
    """Return the amount by which each constant is multiplied, by name of the term; arrays over the configurations."""
    batch, micro, h, heads, layers, s, t, d, p = np.array([astuple(c) for c in configurations], dtype=float).T
    steps = batch / (d * micro)
    slots, stage_layers = steps + p - 1, layers / p
    tokens = micro * s
    parameters = (12 * layers * h * h + VOCABULARY * h) / (t * p)

    def summed(ranks: Floats, volume: Floats) -> Floats:
        return np.asarray(2 * (ranks - 1) / ranks * volume)  # a ring's

    tensor_sum = slots * stage_layers * summed(t, tokens * h)
    gradient_sum = summed(d, parameters)
    return {
        "matrix products": slots * stage_layers * 24 * tokens * h * h * (1 + s / (6 * h)) / t,
        "attention scores": slots * stage_layers * heads * micro * s * s / t,
        "output head": steps * tokens * h * VOCABULARY / t,
        "activations, split": slots * stage_layers * tokens * h / t,
        "activations, whole": slots * stage_layers * tokens * h,
        "weights read": slots * parameters,
        "kernel launches": slots * stage_layers,
        "a micro-batch": slots,
        "a step": np.ones_like(batch),
        "tensor sums in a node": tensor_sum,
        "tensor sums across nodes": tensor_sum * (t > devices_per_node),
        "tensor sums' latency": slots * stage_layers * np.log2(t),
        "between stages": slots * (p > 1) * tokens * h,
        "gradient sum in a node": gradient_sum,
        "gradient sum across nodes": gradient_sum * (t * d * p > devices_per_node),
        "update": parameters,
    }


@dataclass(frozen=True)
class IterationModel:
    """Fitted constants and their residuals."""

    constants: dict[str, float]
    known: tuple[Configuration, ...]
    residuals: tuple[float, ...]
    """log(measured / terms) of each of ``known``."""
    devices_per_node: int = 8

    def parts_s(self, configuration: Configuration) -> dict[str, float]:
        """Return the seconds of an iteration by term, before the residual."""
        found = terms([configuration], self.devices_per_node)
        return {name: float(self.constants[name] * value[0]) for name, value in found.items()}

    def seconds(self, configurations: Sequence[Configuration]) -> Floats:
        """Return the seconds of an iteration of each configuration."""
        white = sum(self.constants[n] * v for n, v in terms(configurations, self.devices_per_node).items())
        features, queried = _features(self.known), _features(configurations)
        known = radial(features, features, RESIDUAL_SPREAD, RESIDUAL_LENGTH)
        cross = radial(queried, features, RESIDUAL_SPREAD, RESIDUAL_LENGTH)
        return np.asarray(white * np.exp(posterior(known, cross, np.array(self.residuals), REPEAT_NOISE)))


def fitted(
    configurations: Sequence[Configuration], seconds: Sequence[float], devices_per_node: int = 8
) -> IterationModel:
    """Fit the model to measured iterations.

    Iterations that differ by a factor ``OUTLIER`` from the fit to the others are excluded; ``IterationModel.known``
    lists the rest. Raise ValueError for no iterations, or a time that is not finite and above 0.
    """
    measured = checked("iteration seconds", seconds)
    if len(measured) != len(configurations):
        raise ValueError(f"{len(configurations)} configurations, {len(measured)} times: expected as many")
    found = terms(configurations, devices_per_node)
    columns = np.stack(list(found.values()), axis=1)
    inliers = np.ones(len(measured), dtype=bool)
    for _ in range(2):
        constants = positive_fit(columns[inliers], measured[inliers])
        residuals = np.log(measured / np.maximum(columns @ constants, 1e-12))
        inliers = np.abs(residuals - np.median(residuals[inliers])) < np.log(OUTLIER)
        if inliers.all():
            break
    return IterationModel(
        dict(zip(found, constants.tolist(), strict=True)),
        tuple(c for c, k in zip(configurations, inliers, strict=True) if k),
        tuple(residuals[inliers].tolist()),
        devices_per_node,
    )


def _features(configurations: Sequence[Configuration]) -> Floats:
    """Return log2 / 2 of the work of a slot, t, d, p, micro-batches, hidden size and layers."""
    batch, micro, h, _, layers, s, t, d, p = np.array([astuple(c) for c in configurations], dtype=float).T
    work = micro * s * h / t
    return np.stack([np.log2(x) for x in (work, t, d, p, batch / (d * micro), h, layers)], axis=1) / 2
