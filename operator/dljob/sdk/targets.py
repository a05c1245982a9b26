"""States that a caller can wait for, and what a job that has not reached one waits for."""

from collections.abc import Mapping
from typing import Any, Literal

from dljob.api import ConditionStatus, DLJobStatus, Phase

Target = Literal["Planned", "Running", "Suspended", "Complete"]
TARGETS: tuple[Target, ...] = ("Planned", "Running", "Suspended", "Complete")
_STAGES = (
    "Accepted", "DataInspected", "PriorityClassFound", "WithinQuota", "Planned", "Admitted", "VolumeReady", "PodsReady",
)  # fmt: skip
"""Types of conditions in the order in which a job reaches them."""
_PHASES = {
    "Running": (Phase.RUNNING, Phase.COMPLETE),
    "Suspended": (Phase.SUSPENDED,),
    "Complete": (Phase.COMPLETE,),
}


def current(body: Mapping[str, Any], status: DLJobStatus) -> bool:
    """Return True if the operator wrote the status for the current spec of the job."""
    return status.observed_generation >= int(body["metadata"].get("generation") or 0)


def reached(status: DLJobStatus, target: Target) -> bool:
    """Return True if a job with this status has reached the state. A complete job also counts as Running.

    After a change of the spec, the status shows the old plan until the operator has made the new one. The condition
    Planned says for which spec the plan is. A job that has ended gets no other plan.
    """
    if target == "Planned":
        ended = status.phase in (Phase.COMPLETE, Phase.FAILED)
        return status.plan is not None and (ended or _is_planned(status))
    return status.phase in _PHASES[target]


def _is_planned(status: DLJobStatus) -> bool:
    return any(
        each.type == "Planned"
        and each.status is ConditionStatus.TRUE
        and each.observed_generation >= status.observed_generation
        for each in status.conditions
    )


def awaited(status: DLJobStatus) -> str:
    """Return what a job waits for, from its first condition that is not true, and its progress."""
    if not status.conditions and not status.observed_generation:
        return "no operator has seen the job; check that dljob is installed and manages the namespace"
    found = {each.type: each for each in status.conditions}
    for name in _STAGES:
        if name in found and found[name].status is not ConditionStatus.TRUE:
            return f"phase {status.phase.value}, not {name} ({found[name].reason}): {found[name].message}"
    if (progress := status.progress) is not None:
        of = f"/{progress.steps}" if progress.steps is not None else ""
        left = f", {status.remaining} left" if status.remaining else ""
        return f"phase {status.phase.value}, step {progress.step}{of}{left}"
    return f"phase {status.phase.value}"
