"""The precision of a plan: the number format in which its devices compute forward and backward pass.

All ranks of a plan have the same precision, because one loss scale is valid for all gradients. If the planner chooses,
``plan`` searches once for each precision for which some device has units. The preferred precision of a set of devices
is the first of ``PREFERRED`` for which all of them have units. A plan in another precision is a candidate only if it
beats the best plan in preferred ones. CPUs and GPUs that are not in the catalogue count as without units for 16 bits.
"""

from collections.abc import Iterable, Mapping, Sequence

from dlcontract import Precision
from dljob.calibrate.learned import Learned
from dljob.cluster import catalogue
from dljob.planner.candidates.pools import Pool, wanted
from dljob.planner.types import Choice, Infeasible, Refusal, Request

PREFERRED: tuple[Precision, ...] = ("BF16", "FP16", "FP32")
"""The order in which the planner chooses: bfloat16 has the range of float32, so it needs no loss scaling."""
NAMES = {"FP32": "float32", "BF16": "bfloat16", "FP16": "float16"}


def units(label: str, is_gpu: bool) -> tuple[Precision, ...]:
    """Return the precisions for which a device is known to have units, in the order of ``PREFERRED``."""
    if not is_gpu:
        return ("FP32",)
    device = catalogue.gpu_or_assumed(label)
    return tuple(each for each in PREFERRED if device.matrix_FLOPs(each))


def preferred(request: Request, choice: Choice) -> Precision:
    """Return the preferred precision of a plan's devices: the first for which all of them have units.

    FP16 is left out if the job cannot scale losses.
    """
    return _possible(request, ((group.device, group.is_gpu) for group in choice.groups))[0]


def of_groups(request: Request, pools: Sequence[Pool]) -> list[Precision]:
    """Return the precisions in which to consider a plan whose groups the user fixes."""
    if request.precision is not None:
        return [request.precision]
    return _possible(request, ((pool.device, pool.is_gpu) for pool in _asked(request, pools)))


def _possible(request: Request, devices: Iterable[tuple[str, bool]]) -> list[Precision]:
    """Return the precisions in which ranks on these devices can compute, in the order of ``PREFERRED``.

    ``devices``: (device type, True for a GPU) of each device.
    """
    found = [units(*device) for device in devices]
    able = [each for each in PREFERRED if all(each in precisions for precisions in found)]
    return [each for each in able if each != "FP16" or request.may_scale_loss]


def _asked(request: Request, pools: Sequence[Pool]) -> list[Pool]:
    """Return the pool of each group that the user fixes, if the pool exists; without such groups, all pools."""
    names = [choice.device for choice in request.fixed]
    found = [next((pool for pool in pools if wanted(pool.device, [name])), None) for name in names]
    return [pool for pool in found if pool is not None] if names else list(pools)


def searched(
    request: Request, pools: Sequence[Pool], learned: Mapping[tuple[str, str], Learned]
) -> list[tuple[Precision, list[Pool]]]:
    """Return the precisions for which to search plans, each with the pools whose devices can compute in it.

    Without a precision of the user, these are all for which some pool has units, except FP16 if it cannot be better
    than BF16: all its pools have both, whose data sheets state the same peaks, and no run has measured FP16.
    ``learned``: measured constants by (``request.key``, device).
    """
    if request.precision is not None:
        return [(request.precision, [pool for pool in pools if _able(pool, request.precision)])]
    found = []
    for precision in PREFERRED:
        able = [pool for pool in pools if precision in _possible(request, [(pool.device, pool.is_gpu)])]
        if precision == "FP16":
            keys = [request.key("FP16", again) for again in (False, True)]
            known = [learned.get((key, pool.device), Learned()) for key in keys for pool in able]
            measured = not all(each.is_of_other_workloads for each in known)
            if not measured and all("BF16" in units(pool.device, pool.is_gpu) for pool in able):
                continue
        if able:
            found.append((precision, able))
    return found


def gets(request: Request, pool: Pool, precision: Precision) -> bool:
    """Return True if ``precision`` is the user's or, without one, the preferred one of the devices of ``pool``."""
    return (request.precision or _possible(request, [(pool.device, pool.is_gpu)])[0]) == precision


def _able(pool: Pool, precision: Precision) -> bool:
    """Return True if the pool's device can compute in ``precision``, which the user requests.

    The result is True for GPUs that are not in the catalogue, because the trainer checks them. CPUs compute in bfloat16
    with or without units for it. The result is False for CPUs and FP16: matrix products take them 20 to 30 times as
    long as in float32 (benchmarks/training/precision.py, on an AMD EPYC).
    """
    if not pool.is_gpu:
        return precision != "FP16"
    return pool.assumed or precision in units(pool.device, True)


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
