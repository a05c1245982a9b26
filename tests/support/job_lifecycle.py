"""A job in typical states of its life cycle."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from dlcontract import Outcome, RunPhase
from dljob.api import Condition, DLJobStatus
from dljob.job.observed import Observed
from dljob.reconcile import Desired, Scale, reconcile
from dljob.status import find
from support.builders import CONFIG, NOW, Json, after, report, seen, settled

DOWN = (Scale("digits-cpu", 0, "uid-digits-cpu"),)
OUTCOME = Outcome(steps=75, seconds=37.5, loss=0.1, accuracy=0.9733, checkpoint="step-75", report="report.html")


def step(observed: Observed, seconds: float = 0.0) -> Desired:
    """Reconcile once, ``seconds`` after the job was created."""
    return reconcile(observed, CONFIG, NOW + timedelta(seconds=seconds))


def started(spec: Json | None = None, **more: Any) -> Observed:
    """Return a job whose pods of the first plan are ready."""
    first = seen(spec, **more)
    return settled(after(first, step(first)))


def training(spec: Json | None = None, **changes: Any) -> Observed:
    """Return a job whose first report was reconciled."""
    observed = started(spec)
    observed = replace(observed, report=report(observed, **changes))
    return after(observed, step(observed))


def done(phase: RunPhase = RunPhase.SUCCEEDED, spec: Json | None = None, **changes: Any) -> Observed:
    """Return a job whose last report is written but not reconciled yet."""
    observed = training(spec)
    return replace(observed, report=report(observed, phase, **changes))


def gone(observed: Observed) -> Observed:
    """Return the job after its pods were stopped, reported that, and were deleted."""
    leaving = after(observed, step(observed))
    return replace(settled(leaving), report=report(leaving, RunPhase.STOPPED))


def status(desired: Desired) -> DLJobStatus:
    assert desired.status is not None
    return desired.status


def condition_of(desired: Desired, kind: str) -> Condition:
    found = find(status(desired).conditions, kind)
    assert found is not None, f"no condition {kind} among {[c.type for c in status(desired).conditions]}"
    return found


def verdict(desired: Desired, kind: str) -> tuple[str, str]:
    """Return status and reason of a condition."""
    condition = condition_of(desired, kind)
    return condition.status.value, condition.reason


def kinds(desired: Desired) -> list[str]:
    return [manifest["kind"] for manifest in desired.objects]


def nothing_done(desired: Desired) -> bool:
    """Return True if nothing in the cluster changes, except perhaps the status."""
    return not (desired.objects or desired.scales or desired.deletes or desired.secret or desired.delete_job)
