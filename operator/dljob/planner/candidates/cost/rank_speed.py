"""Predicted speed of one rank, from measurements of its device, of similar devices or layouts, or from data sheets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import hypot, log2

from dljob.calibrate.learned import Learned, LearnedPoint, StepPoint, hardware_of
from dljob.calibrate.repeats import repeat_spread
from dljob.cluster import catalogue
from dljob.cluster.catalogue import Device
from dljob.cluster.hardware import Hardware
from dljob.perf.fit.curve import Curve
from dljob.perf.fit.measured_ratio import ON_CURVE, MeasuredRatio, measured_ratio
from dljob.perf.step.compute import calibrated, catalogue_curve, loop_s, scatter, update_s
from dljob.perf.step.core_scaling import CORES_SPREAD
from dljob.perf.step.step import SPREAD
from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.cost.transfer import carried
from dljob.planner.candidates.node_layout import Layout, measured_on, on_machine, packing_of, use_of
from dljob.planner.candidates.pools import Pool
from dljob.planner.types import Request

ASSUMED_SPREAD = 1.5
"""Factor on the spread of a predicted computing time if the device is not in the catalogue.

The spread is the standard deviation of log(measured / predicted)."""

UNKNOWN_UNITS_SPREAD = 0.7
"""Standard deviation of log(measured / predicted) of computing times of CPUs in bfloat16. They are predicted as in
float32, because labels do not say whether CPUs have units for it. With AVX512-BF16, an AMD EPYC needed 0.5 to 1.4 times
the time of float32 (benchmarks/training/precision.py). The value is an assumption, which covers a factor of two."""


@dataclass(frozen=True)
class RankSpeed:
    """Predicted speed of a rank.

    ``computing``: computing seconds over the rank's batch, while the other ranks of the node compute too.
    ``slowdown``: factor by which these other ranks slow it down. ``shared_slowdown``: the same for all other ranks of
    its machine, also those on other nodes. ``spread``: standard deviation of log(measured / predicted) of computing
    times. ``alone_s``: function from a measured multi-device step to the computing seconds of one of its ranks, if this
    rank had the node for itself. ``ratio``: measured times / ``computing``, which ``alone_s`` includes. ``update_s``:
    seconds within ``computing`` for the optimizer's update; 0 if measurements replace the prediction.
    ``update_once_s``: predicted seconds for it. ``cores``: CPUs that the rank keeps busy, fewer than those of its
    layout if nodes share the cores of a machine. ``repeats``: standard deviation of the logarithm of times that earlier
    equal runs predict. ``packing``: see ``node_layout.packing_of``.
    """

    device: Device
    computing: Curve
    spread: float
    slowdown: float
    update_s: float
    update_once_s: float
    alone_s: Callable[[StepPoint], float]
    cores: float
    shared_slowdown: float
    repeats: float
    packing: float = 1.0
    ratio: MeasuredRatio = ON_CURVE


def rank_speed(
    pool: Pool, layout: Layout, workload: Workload, request: Request, learned: Mapping[tuple[str, str], Learned]
) -> RankSpeed:
    """Return the predicted speed of a rank on the nodes of ``pool`` with this layout.

    ``learned``: measured constants by (``request.key``, device).
    """
    return (_gpu_speed if pool.is_gpu else _cpu_speed)(pool, layout, workload, request, learned)


def _gpu_speed(
    pool: Pool, layout: Layout, workload: Workload, request: Request, learned: Mapping[tuple[str, str], Learned]
) -> RankSpeed:
    profile = request.key(workload.precision, workload.recomputes)
    known, device = learned.get((profile, pool.device)), catalogue.gpu_or_assumed(pool.device)
    hardware = hardware_of(pool.device, learned)
    if hardware is not None:
        device = hardware.device(device)
    points = [(p.batch, p.compute_s) for p in known.points] if known else []
    repeats = repeat_spread(pool.device, learned)
    if points:
        spread = hypot(repeats, scatter(points))
    else:
        points, spread = carried(profile, pool.device, workload, learned)
        if not points and hardware is not None:
            spread = _probed_spread(hardware)
        elif not points:
            spread = SPREAD["catalogue"] * (ASSUMED_SPREAD if device.assumed else 1.0)
    if known is not None and known.compute_spread is not None:
        spread = max(known.compute_spread, repeats)
    slowdown = known.contention.slowdown(layout.ranks) if known else 1.0
    alone = calibrated(catalogue_curve(workload, device, layout.cores), points)
    ratio = measured_ratio(alone, points)
    once_s = update_s(workload, device)
    updating_s = 0.0 if points else once_s
    return RankSpeed(
        device,
        alone.scaled(slowdown),
        spread,
        slowdown,
        updating_s,
        once_s,
        lambda s: alone.seconds(s.batch) * ratio.at(s.batch),
        layout.cores,
        slowdown,
        repeats,
        ratio=ratio,
    )


def _cpu_speed(
    pool: Pool, layout: Layout, workload: Workload, request: Request, learned: Mapping[tuple[str, str], Learned]
) -> RankSpeed:
    """Return the predicted speed of a rank on CPUs.

    It follows from measurements of the job's model with this layout or with a similar one. Without such measurements,
    it follows from the regression for CPUs (``perf.step.compute.regressed``).
    """
    known = learned.get((request.key(workload.precision, workload.recomputes), pool.device))
    hardware = hardware_of(pool.device, learned)

    def chip(cores: float) -> Device:
        sheet = catalogue.cpu(pool.device, cores)
        return sheet if hardware is None else hardware.device(sheet, cores)

    use = use_of(pool, layout, hardware)
    whole = chip(use.cores)
    # Each exchange through shared memory reads and writes the data twice.
    shared_Bps = whole.memory_bandwidth_Bps * use.memory_part / 4
    device = replace(
        whole,
        memory_bandwidth_Bps=whole.memory_bandwidth_Bps * use.memory_part,
        peer_bandwidth_Bps=min(whole.peer_bandwidth_Bps, max(shared_Bps, whole.peer_bandwidth_Bps / layout.ranks)),
        usd_per_h=chip(layout.cores).usd_per_h,
    )

    @cache
    def predicted_on(each: Layout) -> Curve:
        own = use_of(pool, each, hardware)
        core = chip(own.cores)
        curve = catalogue_curve(workload, core, use=own)
        # The counted calls of a script are those of its whole step.
        return curve if workload.host_calls is not None else curve.later(loop_s(core, own.cores))

    seen = [_as_on_machine(point, pool, hardware) for point in known.points] if known else []

    @cache
    def measured(each: Layout) -> tuple[Curve, list[tuple[int, float]], float]:
        asked = request.cpu_per_pod or 1.0
        points, added = measured_on(seen, each, lambda at, b: predicted_on(at).seconds(b), asked, pool.most_cpu)
        return calibrated(predicted_on(each), points), points, added

    computing, points, added = measured(layout)
    repeats = repeat_spread(pool.device, learned)
    if known is not None and known.compute_spread is not None:
        spread = hypot(max(known.compute_spread, repeats), added)
    elif points:
        spread = hypot(repeats, scatter(points), added)
    else:
        spread = SPREAD["catalogue"] if hardware is None else _probed_spread(hardware)
        if hardware is None or hardware.serial is None:
            spread = hypot(spread, CORES_SPREAD * log2(max(1.0, layout.cores)))
        spread = hypot(spread, CORES_SPREAD * log2(layout.machine_nodes))
        if workload.precision != "FP32":
            spread = hypot(spread, UNKNOWN_UNITS_SPREAD)
    # Nodes that share a machine slow down also a rank that is alone on its node.
    slowdown, shared_slowdown = (
        max(1.0, predicted_on(layout).slope_s / predicted_on(replace(layout, ranks=1, machine_nodes=nodes)).slope_s)
        for nodes in (layout.machine_nodes, 1)
    )

    def alone_s(step: StepPoint) -> float:
        cores = float(step.place.cores or max(1, int(request.cpu_per_pod or 1)))
        alone = on_machine(pool, Layout(1, min(cores, pool.most_cpu)), step.place.machine_nodes, hardware)
        curve, there, _ = measured(alone)
        return curve.seconds(step.batch) * measured_ratio(curve, there).at(step.batch)

    once_s = update_s(workload, device, use)
    updating_s = 0.0 if points else once_s
    packing = packing_of(pool, layout, hardware)
    return RankSpeed(
        device,
        computing,
        spread,
        slowdown,
        updating_s,
        once_s,
        alone_s,
        use.cores,
        shared_slowdown,
        repeats,
        packing,
        measured_ratio(computing, points),
    )


def _as_on_machine(point: LearnedPoint, pool: Pool, hardware: Hardware | None) -> LearnedPoint:
    """Return a measured point without its nodes on one machine (``machine_nodes`` 1) if they were no slower for it."""
    if point.machine_nodes == 1:
        return point
    cores = min(float(point.cores or 1), pool.most_cpu / point.ranks)
    shared = on_machine(pool, Layout(point.ranks, cores), point.machine_nodes, hardware)
    return replace(point, machine_nodes=shared.machine_nodes)


def _probed_spread(hardware: Hardware) -> float:
    """Return the standard deviation of log(measured / predicted) of computing times on measured hardware.

    It applies to a model that was never measured, and is at most that of predictions from data sheets.
    """
    if hardware.doubts:
        return SPREAD["catalogue"]
    return min(SPREAD["catalogue"], hypot(SPREAD["probe"], hardware.deviation))
