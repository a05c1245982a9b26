"""A job at well-known points of its life, reached as a cluster would reach them."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from dlcontract import Outcome, RunPhase
from dljob.api import Condition, DLJobStatus
from dljob.job.observed import Observed
from dljob.reconcile import Desired, Scale, reconcile
from dljob.status import find
from support.builders import CONFIG, NOW, Json, after, report, seen, settled

DOWN = (Scale("digits-cpu", 0),)
OUTCOME = Outcome(steps=75, seconds=37.5, loss=0.1, accuracy=0.9733, checkpoint="step-75", report="report.html")


def step(observed: Observed, seconds: float = 0.0) -> Desired:
    """One reconcile, so long after the job was first seen."""
    return reconcile(observed, CONFIG, NOW + timedelta(seconds=seconds))


def started(spec: Json | None = None, **more: Any) -> Observed:
    """All pods of the first plan are ready."""
    first = seen(spec, **more)
    return settled(after(first, step(first)))


def training(spec: Json | None = None, **news: Any) -> Observed:
    """The first report has been seen."""
    observed = started(spec)
    observed = replace(observed, report=report(observed, **news))
    return after(observed, step(observed))


def done(phase: RunPhase = RunPhase.SUCCEEDED, spec: Json | None = None, **news: Any) -> Observed:
    """The last report lies there, not seen yet."""
    observed = training(spec)
    return replace(observed, report=report(observed, phase, **news))


def gone(observed: Observed) -> Observed:
    """Pods are sent away, say so, and are gone."""
    leaving = after(observed, step(observed))
    return replace(settled(leaving), report=report(leaving, RunPhase.STOPPED))


def status(desired: Desired) -> DLJobStatus:
    assert desired.status is not None
    return desired.status


def told(desired: Desired, kind: str) -> Condition:
    found = find(status(desired).conditions, kind)
    assert found is not None, f"no condition {kind} among {[c.type for c in status(desired).conditions]}"
    return found


def verdict(desired: Desired, kind: str) -> tuple[str, str]:
    """Status and reason of a condition."""
    condition = told(desired, kind)
    return condition.status.value, condition.reason


def kinds(desired: Desired) -> list[str]:
    return [manifest["kind"] for manifest in desired.objects]


def nothing_done(desired: Desired) -> bool:
    """Whether the cluster is left as it is; a status may be written."""
    return not (desired.objects or desired.scales or desired.deletes or desired.secret or desired.delete_job)
