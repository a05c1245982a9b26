"""Conditions: what a reconcile found becomes metav1.Conditions with honest times, and the phase derives from them."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from dljob.api import Condition, ConditionStatus, Phase

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
MAX_MESSAGE = 2048
"""Longer messages are cut: a status is read by people, and stored on every change."""

RECOVERING = ("Relaunching", "PodsLost")
"""Reasons of Running=False in which a job that ran is on its way back."""


@dataclass(frozen=True)
class Verdict:
    """What one part of a reconcile has to say; becomes the condition of that type."""

    type: str
    status: ConditionStatus
    reason: str
    message: str


def merge(
    previous: Iterable[Condition], verdicts: Iterable[Verdict], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Previous conditions with the verdicts' laid over them, in order of first appearance.

    The transition time moves only when the status of a condition does, as metav1.Condition demands.
    """
    result = {condition.type: condition for condition in previous}
    for verdict in verdicts:
        old = result.get(verdict.type)
        unchanged = old is not None and old.status is verdict.status
        result[verdict.type] = Condition(
            type=verdict.type,
            status=verdict.status,
            reason=verdict.reason,
            message=_cut(verdict.message),
            observed_generation=generation,
            last_transition_time=old.last_transition_time if unchanged and old else now.replace(microsecond=0),
        )
    return tuple(result.values())


def _cut(message: str) -> str:
    """The beginning and the end: a log's last line says most."""
    if len(message) <= MAX_MESSAGE:
        return message
    half = MAX_MESSAGE // 2 - 3
    return f"{message[:half]} ... {message[-half:]}"


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == kind), None)


def is_true(conditions: Iterable[Condition], kind: str) -> bool:
    found = find(conditions, kind)
    return found is not None and found.status is TRUE


def phase(conditions: tuple[Condition, ...]) -> Phase:
    """One word for the conditions."""
    for kind, word in (("Failed", Phase.FAILED), ("Complete", Phase.COMPLETE), ("Suspended", Phase.SUSPENDED)):
        if is_true(conditions, kind):
            return word
    if is_true(conditions, "Running"):
        return Phase.RUNNING
    running, planned, volume = (find(conditions, kind) for kind in ("Running", "Planned", "VolumeReady"))
    if running is not None and running.reason in RECOVERING:
        return Phase.RECOVERING
    if running is not None and running.reason != "NotStarted":
        return Phase.STARTING
    if planned is None or planned.status is not TRUE:
        return Phase.PENDING
    if planned.reason == "PlanOnly":
        return Phase.PLANNED
    return Phase.PENDING if volume is not None and volume.status is FALSE else Phase.STARTING
