"""The precision of a plan: the number format in which its devices compute forward and backward pass.

All ranks of a plan have the same precision, because one loss scale is valid for all gradients. If the planner chooses,
a set of devices gets the first of ``PREFERRED`` for which all of them have units. CPUs and GPUs that are not in the
catalogue count as without such units. ``plan`` searches once for each precision that some set of devices gets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dlcontract import Precision
from dljob.cluster import catalogue
from dljob.planner.candidates.pools import Pool, wanted
from dljob.planner.types import Choice, Decision, Infeasible, Refusal, Request

PREFERRED: tuple[Precision, ...] = ("BF16", "FP16", "FP32")
"""The order in which the planner chooses: bfloat16 has the range of float32, so it needs no loss scaling."""
NAMES = {"FP32": "float32", "BF16": "bfloat16", "FP16": "float16"}


def _units(label: str, is_gpu: bool) -> tuple[Precision, ...]:
    """Return the precisions for which a device is known to have units, in the order of ``PREFERRED``."""
    if not is_gpu:
        return ("FP32",)
    device = catalogue.gpu_or_assumed(label)
    return tuple(each for each in PREFERRED if device.matrix_FLOPs(each))


def _common(request: Request, devices: Iterable[tuple[str, bool]]) -> Precision:
    """Return the precision that the planner chooses for ranks on these devices.

    ``devices``: (device type, True for a GPU) of each device. The choice is the first precision in ``PREFERRED`` for
    which all devices have units, without FP16 if the job cannot scale losses.
    """
    units = [_units(*device) for device in devices]
    fitting = [each for each in PREFERRED if all(each in found for found in units)]
    return next(each for each in fitting if each != "FP16" or request.may_scale_loss)


def of_choice(request: Request, choice: Choice) -> Precision:
    """Return the precision in which the devices of a plan compute: the user's or, without one, the planner's choice."""
    return request.precision or _common(request, ((group.device, group.is_gpu) for group in choice.groups))


def of_groups(request: Request, pools: Sequence[Pool]) -> Precision:
    """Return the precision of a plan whose groups the user fixes."""
    return request.precision or _common(request, ((pool.device, pool.is_gpu) for pool in _asked(request, pools)))


def _asked(request: Request, pools: Sequence[Pool]) -> list[Pool]:
    """Return the pool of each group that the user fixes, if the pool exists; without such groups, all pools."""
    names = [choice.device for choice in request.fixed]
    found = [next((pool for pool in pools if wanted(pool.device, [name])), None) for name in names]
    return [pool for pool in found if pool is not None] if names else list(pools)


def searched(request: Request, pools: Sequence[Pool]) -> list[tuple[Precision, list[Pool]]]:
    """Return the precisions for which to search plans, each with the pools whose devices can compute in it.

    Without a precision of the user, these are the precisions that the planner chooses for at least one pool alone.
    """
    if request.precision is not None:
        return [(request.precision, [pool for pool in pools if _able(pool, request.precision)])]
    found = []
    for precision in PREFERRED:
        able = [pool for pool in pools if precision in _units(pool.device, pool.is_gpu)]
        if any(_common(request, [(pool.device, pool.is_gpu)]) == precision for pool in able):
            found.append((precision, able))
    return found


def gets(request: Request, pool: Pool, precision: Precision) -> bool:
    """Return True if a plan that uses only the devices of ``pool`` computes in ``precision``."""
    return (request.precision or _common(request, [(pool.device, pool.is_gpu)])) == precision


def _able(pool: Pool, precision: Precision) -> bool:
    """Return True if the pool's device can compute in ``precision``, which the user requests.

    The result is True for GPUs that are not in the catalogue, because the trainer checks them. CPUs compute in bfloat16
    with or without units for it. The result is False for CPUs and FP16: matrix products take them 20 to 30 times as
    long as in float32 (benchmarks/training/precision.py, on an AMD EPYC).
    """
    if not pool.is_gpu:
        return precision != "FP16"
    return pool.assumed or precision in _units(pool.device, True)


def refusals(request: Request, pools: Iterable[Pool]) -> list[Refusal]:
    """Return the device types that cannot compute in the precision that the user requests."""
    wanted = request.precision
    return [
        Refusal(pool.device, f"has no units for {NAMES[wanted]}, which spec.precision {wanted} requests")
        for pool in pools
        if wanted is not None and not _able(pool, wanted)
    ]


def no_device(request: Request, pools: Sequence[Pool]) -> Infeasible | None:
    """Return ``Infeasible`` if no device that the job may use can compute in the precision that the user requests.

    With fixed groups, all their devices must be able to.
    """
    pools = _asked(request, pools)
    refused = refusals(request, pools)
    if not refused or (len(refused) < len(pools) and not request.fixed):
        return None
    names = ", ".join(refusal.summary for refusal in refused)
    return Infeasible(
        "NoSuchDevice",
        "spec.precision",
        f"found {request.precision} with the device types {names}, which have no units for "
        f"{NAMES[request.precision or 'FP32']}; expected Auto or a precision of these devices: change spec.precision, "
        "allow other devices, or wait until other nodes are free",
        transient=True,
        refusals=tuple(refused),
    )


def in_float32(request: Request, found: Decision | Infeasible) -> Request | None:
    """Return the request in float32 if the planner chooses the precision and no plan fits into memory; otherwise None.

    ``found``: the result for ``request``. The job may fit in float32: models with group or layer norms keep more bytes
    in 16 bits than in float32, and 16-bit copies of all parameters.
    """
    if request.precision is not None or isinstance(found, Decision) or found.reason != "DoesNotFit":
        return None
    return replace(request, precision="FP32", float32_reason="in 16 bits, the job does not fit into memory")


def reason(request: Request, chosen: Choice) -> str | None:
    """Return a text with the precision of a plan and its reason; None if the spec does not ask for 16 bits or Auto."""
    if request.float32_reason is not None:
        return f"FP32: {request.float32_reason}"
    if request.precision is not None:
        return None if request.precision == "FP32" else f"{chosen.precision}, as spec.precision requests"
    labels = list(dict.fromkeys(group.device for group in chosen.groups))
    if chosen.splits_model:
        return "FP32: model parallelism computes in float32"
    if chosen.precision == "FP32":
        lacking = [g.device for g in chosen.groups if _units(g.device, g.is_gpu) == ("FP32",)]
        if not lacking:
            return "FP32: not all devices have units for bfloat16, and the job cannot scale losses, as FP16 needs"
        return f"FP32: {', '.join(dict.fromkeys(lacking))} is not known to have units for 16-bit numbers"
    speeds = []
    for label in labels:
        device = catalogue.gpu_or_assumed(label)
        fast, slow = device.matrix_FLOPs(chosen.precision), device.fp32_FLOPs
        speeds.append(f"{label} multiplies matrices at up to {fast / 1e12:.3g} TFLOP/s instead of {slow / 1e12:.3g}")
    scaled = "; losses are scaled, because not all devices have bfloat16" if chosen.precision == "FP16" else ""
    return f"{chosen.precision}: {', '.join(speeds)}{scaled}"
