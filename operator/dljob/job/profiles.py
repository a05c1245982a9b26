"""Translate DLProfile objects into the planner's constants, and update them from reports. No I/O."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from math import ceil, exp, log
from statistics import fmean, median
from typing import Any

from pydantic import ValidationError

from dlcontract import Plan, RankMeasure, Report, micro_batches_of
from dljob.api import ComputePoint, DLProfileStatus, NextMeasurement, NoiseScale, ScalingConstants, ScalingPoint
from dljob.api.base import MAX_S
from dljob.api.profiles.profile import RepeatedRuns
from dljob.api.profiles.steps import MAX_EXPONENT, MAX_GAMMA
from dljob.calibrate import (
    Learned,
    LearnedPoint,
    Measured,
    NoiseOf,
    Place,
    Scaling,
    StepPoint,
    learn,
    learn_scaling,
    next_place,
    remembered,
)
from dljob.calibrate.learned import Repeats, parts_of_key
from dljob.calibrate.noise import after as noise_after
from dljob.calibrate.repeats import after as repeats_after
from dljob.cluster import catalogue
from dljob.job.identity import IMAGE_PREFIX
from dljob.job.observed_structure import planner_memory, planner_split_steps, planner_structure
from dljob.job.probes.hardware import hardware_of
from dljob.perf.fit.curve import Curve
from dljob.perf.fit.scaling import Contention
from dljob.perf.resources import energy
from dljob.perf.step import input_data
from dljob.perf.step.compute import calibrated, catalogue_curve
from dljob.perf.workload.datasets import DATASETS
from dljob.perf.workload.models import MODELS
from dljob.perf.workload.workload import builtin, in_precision, recomputing

STEADY_STEPS = 50
"""Smallest number of steps over which a rank averages the times that it reports."""
PROBE_STEPS = 5
MIN_BUSY = 0.2
"""Minimum part of a step in which a rank computes, so that its power says something about computing."""
MAX_PROFILES = 256
"""Maximum number of profiles in one namespace, and of those with structures of scripts. The others are deleted."""
LIFE = timedelta(days=180)
MANAGED_LABEL, MANAGER = "app.kubernetes.io/managed-by", "dljob"


def expired(profiles: Iterable[Mapping[str, Any]], now: datetime) -> Iterator[str]:
    """Yield the names of the DLProfiles to delete, because they are too old or too many.

    A profile is too old if it was not updated for ``LIFE``. Of the profiles for one namespace, and of those that all
    namespaces share, only the ``MAX_PROFILES`` newest remain. Profiles with the structure of a script, or its memory
    without a measured time, are counted apart: every command has one, so that a search over a script's arguments would
    displace all measurements. Profiles that the operator did not create never expire: they belong to an administrator.
    """
    found: dict[tuple[str, bool], list[tuple[datetime, str]]] = {}
    for profile in profiles:
        meta, spec, status = profile["metadata"], profile["spec"], profile.get("status") or {}
        if (meta.get("labels") or {}).get(MANAGED_LABEL) == MANAGER:
            updated = datetime.fromisoformat(status.get("updated") or meta["creationTimestamp"])
            timed = status.get("compute") or status.get("splitSteps")
            of_script = "structure" in status or ("memory" in status and not timed)
            found.setdefault((spec.get("namespace") or "", of_script), []).append((updated, meta["name"]))
    for listed in found.values():
        listed.sort(reverse=True)
        for i, (updated, name) in enumerate(listed):
            if i >= MAX_PROFILES or now - updated > LIFE:
                yield name


def learned_by_model(profiles: Iterable[Mapping[str, Any]], namespace: str) -> dict[tuple[str, str], Learned]:
    """Return the measured constants for the plans of a namespace: (model key, device type) → constants.

    Of two profiles with the same key, one for this namespace only takes precedence over one that all namespaces share;
    if it has nothing but the memory of a script, which is never shared, the rest is that of the shared one. Profiles
    that do not parse are left out.
    """
    found: dict[tuple[str, str], Learned] = {}
    usable = [profile for profile in profiles if profile["spec"].get("namespace") in (None, namespace)]
    for profile in sorted(usable, key=lambda each: each["spec"].get("namespace") is not None):
        try:
            status = DLProfileStatus.model_validate(profile.get("status") or {}, extra="ignore")
            constants = learned(status, profile["spec"]["device"])
        except ValidationError:
            continue  # Edited by hand.
        key = profile["spec"]["model"], profile["spec"]["device"]
        if key in found and constants == Learned(memory=constants.memory):
            constants = replace(found[key], memory=constants.memory)
        found[key] = constants
    return found


def learned(status: DLProfileStatus, device: str = "") -> Learned:
    """Convert the status of a DLProfile to the measured constants that the planner uses.

    ``device``: the profile's device type, whose data sheet bounds measured hardware.
    """
    known = status.constants
    return Learned(
        points=tuple(
            LearnedPoint(p.batch, p.seconds, p.observations, p.cores, p.ranks_per_node, p.machine_nodes)
            for p in status.compute
        ),
        steps=tuple(
            StepPoint(
                Place(p.nodes, p.node_devices, p.collective, p.sharded, p.cores, p.machine_nodes),
                p.batch,
                p.seconds,
                p.observations,
            )
            for p in status.scaling
        ),
        fetch_s=status.fetch_seconds_per_sample,
        start_s=status.start_seconds,
        computing_W=status.computing_watts,
        link_latency_s=status.link_latency_seconds,
        link_bandwidth_Bps=status.link_bandwidth_bytes_per_second,
        contention=_contention(status),
        compute_spread=known.compute_deviation if known else None,
        link_spread=known.communication_deviation if known else None,
        noise=_noise(status),
        repeats=Repeats(status.repeats.runs, status.repeats.deviation) if status.repeats else None,
        hardware=hardware_of(status.hardware, device) if status.hardware else None,
        structure=planner_structure(status.structure, device),
        memory=planner_memory(status.memory),
        split_steps=planner_split_steps(status.split_steps),
    )


def _noise(status: DLProfileStatus) -> NoiseOf | None:
    known = status.noise_scale
    return NoiseOf(known.data, known.samples, known.steps, known.runs) if known else None


def _contention(status: DLProfileStatus) -> Contention:
    return Contention(status.constants.sharing, status.constants.crowding) if status.constants else Contention()


def devices(report: Report) -> tuple[str, ...]:
    """Return the device types that a report has measurements of, sorted.

    Return an empty tuple if a rank ran on a different device than planned.
    """
    if report.mismatches:
        return ()
    return tuple(sorted({p.device for p in report.probes} | {r.device for r in report.ranks if r.device and r.share}))


def of_micro_batches(report: Report, plan: Plan, micro_batches: int) -> Report:
    """Return the report with the local batch sizes and times of one micro-batch instead of a step, for profiles.

    A micro-batch of the largest size, ``ceil(share / k)`` samples, takes its part of the samples of a step with k
    micro-batches. The update, which a step makes once, is thereby underestimated, but it is short compared with several
    micro-batches. ``plan``: the plan of the run, without model parallelism. ``micro_batches``: k with all its ranks.
    """
    if micro_batches == 1:
        return report
    present = {measure.rank: measure.share for measure in report.ranks}
    shares = [present.get(rank.rank, 0) for rank in plan.ranks]
    k = micro_batches_of(micro_batches, [rank.share for rank in plan.ranks], shares)
    return report.model_copy(update={"ranks": tuple(_of_micro_batch(m, k) for m in report.ranks)})


def _of_micro_batch(measure: RankMeasure, k: int) -> RankMeasure:
    largest = ceil(measure.share / k)
    part = largest / measure.share if measure.share else 1 / k
    parts = ("compute_s", "wait_s", "comm_s", "data_s", "fetch_s")
    return measure.model_copy(update={"share": largest} | {name: part * getattr(measure, name) for name in parts})


def updated_profile(
    before: DLProfileStatus,
    model: str,
    device: str,
    report: Report,
    now: datetime,
    place: Place | None = None,
    data: str | None = None,
    layout: tuple[int, int] | None = None,
    machine_nodes: int = 1,
    used_cores: float | None = None,
    start_s: float | None = None,
) -> DLProfileStatus:
    """Return the status of the profile of (model, device) after a run that ended with ``report``.

    If the report has no measurements of the device type, return ``before``, the status until now. ``place``: placement
    of the run, if it had equally many devices of one type on each node; None otherwise. ``data``: key of the dataset;
    None if the gradient noise scale must not be updated. The stored compute times are those of a device that is alone
    on its node: the known slowdown by the other devices is divided out. ``layout``: (cores of each rank, ranks per
    node) of a run on CPUs, and ``machine_nodes``: its nodes that shared the cores of one machine. Its compute times are
    stored with both instead. ``used_cores``: CPUs that each of its ranks kept busy; None: all of its cores.
    ``start_s``: seconds of its start; None: not measured.
    """
    if device not in devices(report):
        return before
    slowdown = _contention(before).slowdown(place.node_devices) if place and not layout else 1.0
    cores, ranks, machine_nodes = (*layout, machine_nodes) if layout else (None, 1, 1)
    place = place and replace(place, cores=cores, machine_nodes=machine_nodes)
    ranks_on = [r for r in report.ranks if r.device == device and r.share > 0]
    steady = [Measured(r.share, _computing_s(r, cores) / slowdown, STEADY_STEPS) for r in ranks_on]
    known = learned(before)
    stored_s = {(p.batch, p.cores, p.ranks, p.machine_nodes): p.compute_s for p in known.points}
    at = [(stored_s.get((each.batch, cores, ranks, machine_nodes)), each.compute_s) for each in steady]
    repeats = repeats_after(known.repeats, [(old, new) for old, new in at if old is not None and new > 0])
    after = learn(
        known,
        steady=steady,
        probes=[Measured(p.batch, p.compute_s, PROBE_STEPS) for p in report.probes if p.device == device],
        link_latency_s=report.link_latency_s,
        link_bandwidth_Bps=report.link_bandwidth_Bps,
        expected_s=_expected(model, device, cores),
        fetch_s=_fetched(report, device),
        computing_W=_computing_watts(report, device, ranks * (used_cores or cores or 1) if layout else None),
        cores=cores,
        ranks=ranks,
        machine_nodes=machine_nodes,
        start_s=start_s,
    )
    comparable = [p for p in after.points if (p.cores, p.machine_nodes) == (cores, machine_nodes)]
    scaling, constants, measure = _scaled(before, model, device, report, place, comparable)
    return DLProfileStatus(
        compute=tuple(
            ComputePoint(
                batch=p.batch,
                seconds=p.compute_s,
                observations=p.observations,
                cores=p.cores,
                ranks_per_node=p.ranks,
                machine_nodes=p.machine_nodes,
            )
            for p in after.points
        ),
        scaling=scaling,
        constants=constants,
        next_measurement=measure,
        noise_scale=_updated_noise(before, report, data),
        repeats=None if repeats is None else RepeatedRuns(runs=repeats.runs, deviation=repeats.deviation),
        fetch_seconds_per_sample=after.fetch_s,
        start_seconds=None if after.start_s is None else round(after.start_s, 3),
        computing_watts=None if after.computing_W is None else round(after.computing_W, 2),
        link_latency_seconds=after.link_latency_s,
        link_bandwidth_bytes_per_second=after.link_bandwidth_Bps,
        memory=before.memory,
        split_steps=before.split_steps,
        observed_jobs=before.observed_jobs + 1,
        updated=now,
    )


def _computing_s(measure: RankMeasure, cores: int | None) -> float:
    """Return the computing seconds of a measured step without delays by input. ``cores``: CPUs of the rank, or None."""
    if cores is None:
        return measure.compute_s
    return input_data.undelayed_s(measure.compute_s, measure.data_s, measure.fetch_s, cores)


def _updated_noise(before: DLProfileStatus, report: Report, data: str | None) -> NoiseScale | None:
    if report.noise is None or data is None:
        return before.noise_scale
    found = noise_after(_noise(before), NoiseOf(data, report.noise.samples, report.noise.steps))
    if found is None:
        return None
    return NoiseScale(data=found.data, samples=found.samples, steps=found.steps, runs=found.runs)


def _fetched(report: Report, device: str) -> float | None:
    """Return the seconds to read and prepare one sample for a batch, as the median over the ranks on ``device``.

    Return None if no rank reported this time.
    """
    said = [r.fetch_s / r.share for r in report.ranks if r.device == device and r.share > 0 and r.fetch_s > 0]
    return median(said) if said else None


def _computing_watts(report: Report, device: str, pod_cores: float | None) -> float | None:
    """Return the power of one GPU, or of one CPU, while it computes, as the median over the ranks that measured it.

    The measured power is the mean of a step. While a device waits, it is assumed to draw the power that predictions
    assume. ``pod_cores``: CPUs that the ranks of a pod keep busy together, if the device is a class of CPU nodes; None
    for GPUs. Return None if no rank could read a counter.
    """
    known = catalogue.gpu_or_assumed(device) if pod_cores is None else catalogue.cpu(device, 1.0)
    waiting_W, units = energy.device_watts(known, 0.0), 1.0 if pod_cores is None else pod_cores
    found = []
    for rank in report.ranks:
        step_s = rank.compute_s + rank.wait_s + rank.comm_s + rank.data_s
        if rank.device == device and rank.power_W is not None and rank.compute_s > 0:
            busy = rank.compute_s / step_s
            if busy >= MIN_BUSY:
                found.append((rank.power_W / units - (1 - busy) * waiting_W) / busy)
    return max(0.0, median(found)) if found else None


def _scaled(
    before: DLProfileStatus,
    model: str,
    device: str,
    report: Report,
    place: Place | None,
    points: Sequence[LearnedPoint],
) -> tuple[tuple[ScalingPoint, ...], ScalingConstants | None, NextMeasurement | None]:
    """Return the profile's measured multi-device steps, the constants fitted to them, and the next measurement.

    The next measurement (a number of nodes, devices per node and local batch size) is the one whose step time would
    improve the constants most; None if no more are needed. Include the run of ``report`` if all planned ranks ran, on
    devices of one type and with equally many on each node. Otherwise, return the values in ``before``. ``place``: the
    planned placement of this run; None if it has no such form. ``points``: compute times on one device, with as many
    cores, and as many nodes on one machine, as in this run. Only steps with as many enter the constants.
    """
    ranks = [r for r in report.ranks if r.share > 0]
    if not points or place is None or not ranks or not report.step_s or {r.device for r in ranks} != {device}:
        return before.scaling, before.constants, before.next_measurement
    if len(ranks) != place.devices:
        return before.scaling, before.constants, before.next_measurement
    curve = _curve(model, device, points, place.cores)
    step_s = input_data.step_without_input_s(report.step_s, ranks, place.cores)
    new = StepPoint(place, max(r.share for r in ranks), step_s)
    kept = remembered(learned(before).steps, new, curve.seconds)
    reference_s = exp(fmean(log(p.compute_s) for p in points))
    same = [s for s in kept if (s.place.cores, s.place.machine_nodes) == (place.cores, place.machine_nodes)]
    found = next_place(same, curve.seconds, reference_s)
    measure = found and NextMeasurement(nodes=found[0].nodes, node_devices=found[0].node_devices, batch=found[1])
    return tuple(map(_scaling_point, kept)), _constants(learn_scaling(same, curve.seconds, reference_s)), measure


def _scaling_point(point: StepPoint) -> ScalingPoint:
    return ScalingPoint(
        nodes=point.place.nodes,
        node_devices=point.place.node_devices,
        devices=point.place.devices,
        collective=point.place.collective,
        sharded=point.place.sharded,
        cores=point.place.cores,
        machine_nodes=point.place.machine_nodes,
        batch=point.batch,
        seconds=point.step_s,
        observations=point.observations,
    )


def _constants(found: Scaling | None) -> ScalingConstants | None:
    if found is None:
        return None
    c = found.constants
    inter_s = found.reference_s * exp(c.log_inter)
    return ScalingConstants(
        sharing=max(-MAX_EXPONENT, min(c.sharing, MAX_EXPONENT)),
        crowding=max(-MAX_EXPONENT, min(c.crowding, MAX_EXPONENT)),
        inter_node_seconds=min(inter_s, MAX_S),
        intra_node_seconds=min(found.reference_s * exp(c.log_intra), MAX_S),
        latency_seconds=min(inter_s * exp(c.log_latency), MAX_S),
        overlap_gamma=min(1 + exp(c.log_gamma), MAX_GAMMA),
        compute_deviation=min(found.compute_deviation, MAX_EXPONENT),
        communication_deviation=min(found.communication_deviation, MAX_EXPONENT),
    )


def _curve(model: str, device: str, points: Sequence[LearnedPoint], cores: int | None) -> Curve:
    """Return the compute seconds of a step on one device over the local batch size, as a curve through ``points``.

    Outside the range of the measured points, the curve has the shape that the device catalogue predicts for the model.
    If the catalogue predicts none, for example for a training script, this shape is a line through the origin.
    ``cores``: CPUs of the rank; None: a GPU, or unknown.
    """
    pairs = [(p.batch, p.compute_s) for p in points]
    return calibrated(_catalogue(model, device, cores) or Curve((0.0,), (1e-9,), pairs[-1][1] / pairs[-1][0]), pairs)


def _expected(model: str, device: str, cores: int | None) -> Callable[[int], float] | None:
    """Return a function from a batch size to the compute time in seconds that the device catalogue gives for ``model``.

    ``model``: a profile key, which names model and dataset. Return None for training scripts, and if the dataset of the
    key is not built in.
    """
    return curve.seconds if (curve := _catalogue(model, device, cores)) else None


def _catalogue(model: str, device: str, cores: int | None) -> Curve | None:
    model, precision, recomputes = parts_of_key(model)
    name, *rest = model.split(".")
    dataset = next((part for part in rest if not part.startswith(IMAGE_PREFIX)), "")
    if name not in MODELS or (dataset and dataset not in DATASETS):
        return None
    # A run on CPUs has stored its cores. Any other device is a GPU, also one that the catalogue does not know.
    chip = catalogue.gpu_or_assumed(device) if cores is None else catalogue.cpu(device, float(cores))
    workload = in_precision(builtin(name, dataset or None), precision)
    if recomputes and workload.checkpointed_nbytes is not None:
        workload = recomputing(workload)
    return catalogue_curve(workload, chip, float(cores or 1))
