"""Measured steps of ranks that each hold a part of the model, as a correction of predicted steps.

The logarithm of measured / predicted is a Gaussian process over placements and batches, with mean 0 and the covariance
s^2 exp(-d / ``LENGTH``), where s is the spread of a prediction without measurements, and d is the distance of two runs:
the sum of |log| of the ratios of their ranks, ranks per node, cores of a rank, nodes on a machine, samples of a rank,
micro-batches and replicas, and ``OTHER_WORKLOAD`` if one computed in another precision or recomputed activations.
Errors of the formulas are mostly common to all placements, such as the speed of the device, so that the correlation
falls slowly. Only the nearest measured run counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, hypot, log, sqrt

from dljob.calibrate.learned import SplitPoint
from dljob.perf.step.step import SPREAD
from dljob.planner.candidates.evaluate import Part
from dljob.planner.candidates.node_layout import Layout, on_machine
from dljob.planner.candidates.options import Option
from dljob.planner.types.texts import duration

LENGTH = 4.0
"""Distance at which the correlation of two errors is 1 / e. Twice as many ranks have a correlation of 0.84 with as many
samples each, and of 0.71 if they divide the same batch."""
OTHER_WORKLOAD = 0.5
"""Distance of equal runs of which one computed in another precision, or with activation checkpointing: the logarithm of
the ratio of both errors then has half of the standard deviation of one, about as much as ``PRECISION_SPREAD``."""
LARGEST_RATIO = 20.0
"""Ratios of measured and predicted steps beyond this factor, or its inverse, have nothing that explains them.

Such steps of a built-in model are not used. Those of a script are, because its hints may be wrong by any factor."""


@dataclass(frozen=True)
class Correction:
    """What the nearest measured run says about a predicted step."""

    log_ratio: float
    """log(measured / predicted) of that run."""
    correlation: float
    observations: int
    repeats: float = SPREAD["profile"]
    """Standard deviation of log(measured / predicted) of a time that earlier equal runs predict."""

    def applied(self, spread: float) -> tuple[float, float]:
        """Return (factor of the predicted step, spread of the corrected step).

        ``spread``: standard deviation of log(measured / predicted) without measurements. No prediction is surer
        than equal runs are equal.
        """
        noise = self.repeats
        gain = self.correlation * spread**2 / (spread**2 + noise**2 / self.observations)
        left = spread * sqrt(max(0.0, 1 - self.correlation * gain))
        return exp(gain * self.log_ratio), min(spread, hypot(left, noise))


@dataclass(frozen=True)
class Evidence:
    """What measured runs say about a predicted step.

    ``correction``: that of the nearest run that counts; None without any. ``doubt``: a text about the nearest run with
    a step that nothing explains (``LARGEST_RATIO``); None without any.
    """

    correction: Correction | None = None
    doubt: str | None = None


NO_EVIDENCE = Evidence()


def evidence(
    part: Part, candidate: SplitPoint, predicted_s: Callable[[SplitPoint, Part], float | None], is_script: bool
) -> Evidence:
    """Return what the measured runs of the strategy say.

    ``part``: the nodes and ranks of the candidate. ``candidate``: its predicted step. ``predicted_s``: the predicted
    seconds of a measured run's step on its nodes and ranks, without input and without a correction; None if it cannot
    be predicted. ``is_script``: True unless the model is built in.
    """
    option, doubt = part.option, None
    if option.learned is None or not option.learned.split_steps:
        return NO_EVIDENCE
    known = [
        (_distance(candidate, each) + _layout_distance(option, _layout_of(option, each)), each)
        for each in option.learned.split_steps
        if each.strategy == candidate.strategy and (option.pool.is_gpu or each.place.cores is not None)
    ]
    for distance, nearest in sorted(known, key=lambda each: each[0]):
        own = _as_measured(option, nearest)
        step_s = predicted_s(nearest, replace(part, option=own, nodes=nearest.place.nodes))
        if not step_s:
            continue
        explained = abs(log(nearest.step_s / step_s)) <= log(LARGEST_RATIO)
        if not explained and doubt is None:
            doubt = (
                f"found a step of {duration(nearest.step_s)} on {nearest.place.devices} ranks with strategy "
                f"{nearest.strategy}; expected about {duration(step_s)}"
            )
        if explained or is_script:
            repeats = SPREAD["profile"] if option.speed_of is None else option.speed_of(None).repeats
            found = Correction(log(nearest.step_s / step_s), exp(-distance / LENGTH), nearest.observations, repeats)
            return Evidence(found, doubt)
    return Evidence(doubt=doubt)


def _as_measured(option: Option, point: SplitPoint) -> Option:
    """Return ``option`` with the speed and the network of a measured run.

    Measured runs did not cross a border between racks or zones. Their ranks may have had another layout than those of
    the candidate, and may have computed in another precision.
    """
    layout, own = _layout_of(option, point), Layout(option.ranks_per_node, option.cores, option.machine_nodes)
    if option.pool.crossing is not None:
        option = replace(option, pool=replace(option.pool, crossing=None))
    if option.speed_of is None or (layout == own and point.workload is None):
        return option
    cpus = {} if option.pool.is_gpu else {"cores": layout.cores, "machine_nodes": layout.machine_nodes}
    found = option.speed_of(point.workload, ranks=layout.ranks, **cpus)
    chip = found.device
    device = replace(
        option.device, memory_bandwidth_Bps=chip.memory_bandwidth_Bps, peer_bandwidth_Bps=chip.peer_bandwidth_Bps
    )
    return replace(
        option,
        ranks_per_node=layout.ranks,
        device=device,
        computing=found.computing,
        slowdown=found.slowdown,
        update_s=found.update_s,
        update_once_s=found.update_once_s,
    )


def _layout_of(option: Option, point: SplitPoint) -> Layout:
    """Return the layout of a measured run on the nodes of ``option``. Ranks on a part of a CPU have stored one CPU."""
    place, pool = point.place, option.pool
    if pool.is_gpu or place.cores is None:
        return Layout(place.node_devices, option.cores, option.machine_nodes)
    same = place.cores == max(1, int(option.cores))
    cores = option.cores if same else min(float(place.cores), pool.most_cpu / place.node_devices)
    return on_machine(pool, Layout(place.node_devices, cores), place.machine_nodes, option.hardware)


def _layout_distance(option: Option, layout: Layout) -> float:
    """Return the part of the distance from a run with ``layout`` that ``_distance`` does not know."""
    cores = abs(log(max(1.0, option.cores) / max(1.0, layout.cores)))
    return cores + abs(log(option.machine_nodes / layout.machine_nodes))


def _distance(one: SplitPoint, other: SplitPoint) -> float:
    pairs = (
        (one.place.devices, other.place.devices),
        (one.place.node_devices, other.place.node_devices),
        (one.samples, other.samples),
        (one.micro_batches, other.micro_batches),
        (one.replicas, other.replicas),
    )
    return sum(abs(log(a / b)) for a, b in pairs) + (0.0 if other.workload is None else OTHER_WORKLOAD)
