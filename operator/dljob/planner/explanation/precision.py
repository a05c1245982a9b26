"""Reasons for the precision of a plan."""

from collections.abc import Sequence

from dljob.cluster import catalogue
from dljob.planner.candidates.precision import NAMES, preferred, units
from dljob.planner.explanation.explain import worse
from dljob.planner.search import objective
from dljob.planner.types import Choice, Request


def precision_reason(request: Request, chosen: Choice, choices: Sequence[Choice]) -> str | None:
    """Return a text with the precision of a plan and its reason; None if the spec does not ask for 16 bits or Auto.

    ``choices``: all plans that were evaluated.
    """
    if request.float32_reason is not None:
        return f"FP32: {request.float32_reason}"
    if request.precision is not None:
        return None if request.precision == "FP32" else f"{chosen.precision}, as spec.precision requests"
    if chosen.splits_model:
        return "FP32: model parallelism computes in float32"
    if chosen.precision != preferred(request, chosen):
        return f"{chosen.precision}: {_why_not_preferred(request, chosen, choices)}"
    if chosen.precision == "FP32":
        lacking = [g.device for g in chosen.groups if units(g.device, g.is_gpu) == ("FP32",)]
        if not lacking:
            return "FP32: not all devices have units for bfloat16, and the job cannot scale losses, as FP16 needs"
        return f"FP32: {', '.join(dict.fromkeys(lacking))} is not known to have units for 16-bit numbers"
    speeds = []
    for label in dict.fromkeys(group.device for group in chosen.groups):
        device = catalogue.gpu_or_assumed(label)
        fast, slow = device.matrix_FLOPs(chosen.precision), device.fp32_FLOPs
        speeds.append(f"{label} multiplies matrices at up to {fast / 1e12:.3g} TFLOP/s instead of {slow / 1e12:.3g}")
    scaled = "; losses are scaled, because not all devices have bfloat16" if chosen.precision == "FP16" else ""
    return f"{chosen.precision}: {', '.join(speeds)}{scaled}"


def _why_not_preferred(request: Request, chosen: Choice, choices: Sequence[Choice]) -> str:
    """Return why a plan has another precision than the preferred one of its devices."""
    half = [c for c in choices if c.precision not in ("FP32", chosen.precision)]
    if not half:
        return "in 16 bits, the job does not fit into memory"
    best = min(half, key=lambda choice: objective.score(request, choice.prediction))
    return f"the best plan in {NAMES[best.precision]} is not better ({worse(request, best, chosen)}): {best.summary}"
