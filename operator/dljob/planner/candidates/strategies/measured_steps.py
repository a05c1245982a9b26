"""Measured steps of ranks that each hold a part of the model, as a correction of predicted steps.

The logarithm of measured / predicted is a Gaussian process over placements and batches, with mean 0 and the covariance
s^2 exp(-d / ``LENGTH``), where s is the spread of a prediction without measurements, and d is the distance of two runs:
the sum of |log| of the ratios of their ranks, samples of a rank, micro-batches and replicas. Errors of the formulas are
mostly common to all placements, such as the speed of the device, so that the correlation falls slowly. Only the nearest
measured run counts, in the same layout: ranks per node, cores of a rank and nodes on one machine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, hypot, log, sqrt
from typing import Literal

from dljob.calibrate.learned import SplitPoint
from dljob.perf.step.step import SPREAD
from dljob.planner.candidates.node_layout import Layout, on_machine
from dljob.planner.candidates.options import Option

LENGTH = 4.0
"""Distance at which the correlation of two errors is 1 / e. Twice as many ranks have a correlation of 0.84."""
LARGEST_RATIO = 20.0
"""Ratios of measured and predicted steps beyond this factor, or its inverse, are not used: nothing explains them."""


@dataclass(frozen=True)
class Run:
    """A candidate plan, for comparison with measured runs. ``samples``: as ``SplitPoint.samples``."""

    strategy: Literal["Sharded", "Pipeline", "Tensor"]
    nodes: int
    samples: float
    micro_batches: int
    replicas: int


@dataclass(frozen=True)
class Correction:
    """What the nearest measured run says about a predicted step."""

    log_ratio: float
    """log(measured / predicted) of that run."""
    correlation: float
    observations: int

    def applied(self, spread: float) -> tuple[float, float]:
        """Return (factor of the predicted step, spread of the corrected step).

        ``spread``: standard deviation of log(measured / predicted) without measurements. Equal runs differ by
        ``SPREAD["profile"]``, so that no prediction is surer than this.
        """
        noise = SPREAD["profile"]
        gain = self.correlation * spread**2 / (spread**2 + noise**2 / self.observations)
        left = spread * sqrt(max(0.0, 1 - self.correlation * gain))
        return exp(gain * self.log_ratio), min(spread, hypot(left, noise))


def correction(option: Option, run: Run, predicted_s: Callable[[SplitPoint], float | None]) -> Correction | None:
    """Return what the nearest measured run of the strategy says; None without any.

    ``option``: the way to use the nodes. ``predicted_s``: the predicted seconds of a measured run's step, without input
    and without a correction; None if it cannot be predicted.
    """
    if option.learned is None or not option.learned.split_steps:
        return None
    known = [
        (_distance(option, run, each), each)
        for each in option.learned.split_steps
        if each.strategy == run.strategy and _same_layout(option, each)
    ]
    for distance, nearest in sorted(known, key=lambda each: each[0]):
        step_s = predicted_s(nearest)
        if step_s and 1 / LARGEST_RATIO <= nearest.step_s / step_s <= LARGEST_RATIO:
            return Correction(log(nearest.step_s / step_s), exp(-distance / LENGTH), nearest.observations)
    return None


def _same_layout(option: Option, point: SplitPoint) -> bool:
    place = point.place
    if place.node_devices != option.ranks_per_node or option.pool.is_gpu:
        return place.node_devices == option.ranks_per_node
    own = Layout(option.ranks_per_node, option.cores)
    shared = on_machine(option.pool, own, place.machine_nodes, option.hardware).machine_nodes
    return place.cores == max(1, int(option.cores)) and shared == option.machine_nodes  # also on a part of a CPU


def _distance(option: Option, run: Run, point: SplitPoint) -> float:
    pairs = (
        (run.nodes * option.ranks_per_node, point.place.devices),
        (run.samples, point.samples),
        (run.micro_batches, point.micro_batches),
        (run.replicas, point.replicas),
    )
    return sum(abs(log(one / other)) for one, other in pairs)
