"""Activation checkpointing: blocks of the model keep only their inputs and compute their forward pass again.

It needs less memory and more time. So it pays only where memory limits a plan: if no plan fits without it, or if larger
local batches allow fewer micro-batches or fewer devices. With Auto, ``plan`` searches with and without it.

Times with and without it must have the same basis, or the comparison would be between a measurement and a data sheet.
If only one of the two was measured on a device, the other is estimated from it (``with_estimates``). The same holds for
the precisions that a job with precision Auto compares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import hypot

from dlcontract import Precision
from dljob.calibrate.learned import Learned
from dljob.cluster import catalogue
from dljob.perf.fit.curve import Curve
from dljob.perf.step.compute import calibrated, catalogue_curve, scatter
from dljob.perf.step.step import SPREAD
from dljob.perf.workload.workload import Workload, in_precision, recomputing
from dljob.planner.candidates.options import Option
from dljob.planner.candidates.precision import units
from dljob.planner.types import Choice, Infeasible, Request
from dljob.planner.types.request import PRECISIONS

RATIO_SPREAD = 0.1
"""Assumed standard deviation of log(real / predicted) of the ratio of the times with and without activation
checkpointing. The ratio of operations is between 1.2 and 1.34 in all models of the layer tables."""
PRECISION_SPREAD = 0.25
"""Assumed standard deviation of log(real / predicted) of the ratio of the times in two precisions. First predictions
have 0.47 in float32 and 0.35 in float16 (benchmarks/perfmodel/published_precision.py), partly with the same causes."""

Constants = Mapping[tuple[str, str], Learned]
_Keyed = tuple[str, Workload]
"""The name under which measurements of a workload are stored (``request.key``), and the workload."""


def impossible(request: Request, workload: Workload) -> Infeasible | None:
    """Return ``Infeasible`` if the user requests activation checkpointing, but the model has no known blocks."""
    if request.recomputation != "Always" or workload.checkpointed_nbytes is not None:
        return None
    return Infeasible(
        "BadWorkload",
        "spec.activationCheckpointing",
        f"found Always with the model {workload.name}, whose blocks the planner does not know; expected a model with "
        "blocks: choose Never, or set spec.model.hints.checkpointedActivationBytesPerSample",
    )


def variants(request: Request, workload: Workload) -> list[Workload]:
    """Return the workloads for which to search plans: without and with activation checkpointing, or only one of them.

    The last one needs the least memory.
    """
    if request.recomputation == "Never" or request.no_recomputation_reason is not None:
        return [workload]
    if workload.checkpointed_nbytes is None:
        return [workload]
    if request.recomputation == "Always":
        return [recomputing(workload)]
    saves = workload.checkpointed_nbytes < workload.activation_nbytes
    return [workload, recomputing(workload)] if saves else [workload]


def cannot_pay(request: Request, plain: Workload, options: Sequence[Option], learned: Constants, step_s: float) -> bool:
    """Return True if no plan with activation checkpointing has a step shorter than ``step_s``.

    ``plain``: the workload without it. ``options``: those of a search without it, none of which was left out.
    ``step_s``: the best step that the search has found. ``learned``: measured constants by (``request.key``, device).
    With measurements of the model, return False: they need not be consistent.

    A rank with activation checkpointing computes for longer. So the same plan without it has a shorter step, if it fits
    into memory. It does not fit only if the share of some rank exceeds what the rank can hold at once. This rank then
    computes for longer than with what it can hold. If even that takes ``step_s``, memory limits no faster plan.
    """
    keys = {request.key(plain.precision, again) for again in (False, True)}
    if request.minimize != "Time" or any(name in keys for name, _ in learned):
        return False
    held = [option.single or option for option in options]
    return all(o.largest_batch >= request.global_batch or o.curve.seconds(o.largest_batch) >= step_s for o in held)


def of_choice(workload: Workload, choice: Choice) -> Workload:
    """Return the workload as the plan's ranks compute it. ``workload``: in float32 without activation checkpointing."""
    typed = in_precision(workload, choice.precision)
    return recomputing(typed) if choice.recomputes else typed


def with_estimates(request: Request, workload: Workload, learned: Constants) -> Constants:
    """Return ``learned``, plus estimates for devices on which only some of the compared workloads were measured.

    Jobs that leave the choice of the precision to the planner compare precisions. Jobs that ask for activation
    checkpointing compare times with and without it. ``learned``: measured constants by (``request.key``, device). The
    estimate of a computing time is the measured one, multiplied by the ratio of the times that the catalogue predicts
    for the two workloads. Communication stays as measured. Measured steps of strategy Sharded count for each compared
    workload, together with the one that they were measured with. Warnings (``Learned.doubts``) stay with the profile
    that they are about. Return ``learned`` unchanged for jobs that compare neither.
    """
    recomputes = request.recomputation != "Never" and workload.checkpointed_nbytes is not None
    typed = {each: in_precision(workload, each) for each in PRECISIONS}
    found = dict(learned)
    if request.precision is None:
        for again in (False, True) if recomputes else (False,):
            variants = {each: recomputing(half) if again else half for each, half in typed.items()}
            _estimate_precisions(found, {each: (request.key(each, again), one) for each, one in variants.items()})
    if recomputes:
        for precision, plain in typed.items():
            one, other = (request.key(precision), plain), (request.key(precision, True), recomputing(plain))
            for device in {device for _, device in found}:
                _estimate(found, device, one, other, RATIO_SPREAD)
                _estimate(found, device, other, one, RATIO_SPREAD)
    compared = [(each, typed[each]) for each in (PRECISIONS if request.precision is None else (request.precision,))]
    keyed = [(request.key(each), one) for each, one in compared]
    if recomputes:
        keyed += [(request.key(each, True), recomputing(one)) for each, one in compared]
    _share_split_steps(found, keyed)
    return found


def _share_split_steps(found: dict[tuple[str, str], Learned], compared: Sequence[_Keyed]) -> None:
    """Add to each compared workload the steps of strategy Sharded that were measured with the others."""
    for device in {device for _, device in found}:
        known = {key: found.get((key, device), Learned()).split_steps for key, _ in compared}
        for key, _ in compared:
            others = tuple(
                replace(point, workload=one)
                for name, one in compared
                for point in known[name]
                if name != key and point.strategy == "Sharded" and point.workload is None
            )
            if others:
                before = found.get((key, device), Learned())
                found[key, device] = replace(before, split_steps=(*others, *before.split_steps))


def _estimate_precisions(found: dict[tuple[str, str], Learned], compared: Mapping[Precision, _Keyed]) -> None:
    """Add estimates for the precisions in which a GPU has units but was not measured.

    There is none for float16 where bfloat16 is as fast by the data sheet: it would never be preferred.
    """
    for device in {device for _, device in found if catalogue.gpu(device) is not None}:
        able = units(device, True)
        measured = [each for each in able if found.get((compared[each][0], device), Learned()).points]
        for target in able:
            if measured and not (target == "FP16" and "BF16" in able):
                _estimate(found, device, compared[measured[0]], compared[target], PRECISION_SPREAD)


def _estimate(
    found: dict[tuple[str, str], Learned], device: str, measured: _Keyed, other: _Keyed, spread: float
) -> None:
    """Add constants for ``other`` to ``found``, if only ``measured`` was measured on the device."""
    known, before = (found.get((key, device), Learned()) for key, _ in (measured, other))
    if known.points and not before.points:
        estimated = _estimated(known, device, measured[1], other[1], spread)
        found[other[0], device] = replace(
            estimated, doubts=before.doubts, noise=before.noise or known.noise, split_steps=before.split_steps
        )


def _estimated(known: Learned, device: str, measured: Workload, other: Workload, spread: float) -> Learned:
    """Return constants for the workload ``other`` from those of the workload ``measured`` on the same device.

    ``spread``: standard deviation of log(real / predicted) of the ratio of the two computing times.
    """

    def sheet(workload: Workload, cores: int | None) -> Curve:
        chip = catalogue.gpu(device) or catalogue.cpu(device, float(cores or 1))
        return catalogue_curve(workload, chip, float(cores or 1))

    def ratio(batch: int, cores: int | None) -> float:
        return sheet(other, cores).seconds(batch) / sheet(measured, cores).seconds(batch)

    pairs = [(point.batch, point.compute_s) for point in known.points]
    alone = {
        cores: calibrated(
            sheet(measured, cores), [(p.batch, p.compute_s) for p in known.points if p.cores == cores] or pairs
        )
        for cores in {step.place.cores for step in known.steps}
    }
    return replace(
        known,
        points=tuple(replace(p, compute_s=p.compute_s * ratio(p.batch, p.cores)) for p in known.points),
        steps=tuple(
            replace(
                step,
                step_s=step.step_s
                + (ratio(step.batch, step.place.cores) - 1)
                * min(step.step_s, alone[step.place.cores].seconds(step.batch)),
            )
            for step in known.steps
        ),
        repeats=None,  # of the other profile, where they count already
        compute_spread=hypot(known.compute_spread or hypot(SPREAD["profile"], scatter(pairs)), spread),
    )
