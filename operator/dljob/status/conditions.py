"""Turn verdicts of checks into metav1.Conditions with correct transition times, and derive the job's phase."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from dljob.api import Condition, ConditionStatus, Phase

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
MAX_MESSAGE = 2048
"""Maximum length of a condition's message in characters. ``merge`` shortens longer messages.

The limit exists because people read the messages, and because every change of the status stores them again.
"""

RECOVERING = ("Restarting", "PodsLost")
"""Reasons of the condition Running, if it is False, for a job that ran before and recovers from a fault."""


@dataclass(frozen=True)
class Verdict:
    """The result of one check in a reconcile. It becomes the job's condition of the type ``type``.

    The other fields are also those of a metav1.Condition.
    """

    type: str
    status: ConditionStatus
    reason: str
    message: str


def merge(
    previous: Iterable[Condition], verdicts: Iterable[Verdict], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """Return the previous conditions, in their order, updated by the verdicts. Conditions of new types follow them.

    A condition without a verdict stays as it is. ``generation``: generation of the spec to which the verdicts belong.
    The transition time changes only when the status of a condition changes, as metav1.Condition requires. A time in the
    future becomes ``now``: a clock was ahead and has been corrected, and waiting times that begin at this time would
    last until the clock is there again. Of several verdicts about one condition, the last one counts.
    """
    now = now.replace(microsecond=0)
    before = {
        condition.type: condition.model_copy(update={"last_transition_time": changed_at(condition, now)})
        for condition in previous
    }
    result = dict(before)
    for verdict in verdicts:
        old = before.get(verdict.type)
        unchanged = old is not None and old.status is verdict.status
        result[verdict.type] = Condition(
            type=verdict.type,
            status=verdict.status,
            reason=verdict.reason,
            message=_cut(verdict.message),
            observed_generation=generation,
            last_transition_time=old.last_transition_time if unchanged and old else now,
        )
    return tuple(result.values())


def changed_at(condition: Condition, now: datetime) -> datetime:
    """Return the time of the last change of a condition. A time in the future counts as ``now`` (see ``merge``)."""
    return min(condition.last_transition_time, now)


def _cut(message: str) -> str:
    """Return ``message``, without its middle if it has more than ``MAX_MESSAGE`` characters.

    The end stays, because it often is the last line of a log, which helps most.
    """
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
    """Return the phase of a job (one word for people and printer columns) that summarizes its conditions."""
    for kind, word in (("Failed", Phase.FAILED), ("Complete", Phase.COMPLETE), ("Suspended", Phase.SUSPENDED)):
        if is_true(conditions, kind):
            return word
    if is_true(conditions, "Running"):
        return Phase.RUNNING
    running, planned, volume = (find(conditions, kind) for kind in ("Running", "Planned", "VolumeReady"))
    admitted = find(conditions, "Admitted")
    if admitted is not None and admitted.status is FALSE and (running is None or running.reason == "NotStarted"):
        shown = planned is not None and planned.status is TRUE and planned.reason == "PlanOnly"
        return Phase.PLANNED if shown else Phase.PENDING
    if running is not None and running.reason in RECOVERING:
        return Phase.RECOVERING
    if running is not None and running.reason != "NotStarted":
        return Phase.STARTING
    if planned is None or planned.status is not TRUE:
        return Phase.PENDING
    if planned.reason == "PlanOnly":
        return Phase.PLANNED
    return Phase.PENDING if volume is not None and volume.status is FALSE else Phase.STARTING
