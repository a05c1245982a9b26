"""What a reconcile wants done, as data."""

from dataclasses import dataclass, field

from dlcontract import Report
from dljob.api import DLJobStatus
from dljob.calibrate import Place
from dljob.job.stored_plan import StoredPlan
from dljob.render.config import Manifest
from dljob.status import Event, Verdict


@dataclass(frozen=True)
class Scale:
    """Replicas of a StatefulSet, with its template left as it is."""

    name: str
    replicas: int


@dataclass(frozen=True)
class Target:
    """An object to delete; ``force``: without waiting for its kubelet, which is lost."""

    kind: str
    name: str
    uid: str | None = None
    force: bool = False


@dataclass(frozen=True)
class RunMeasurements:
    """What a run measured about one model, for the profiles of its devices."""

    model: str
    report: Report
    place: Place | None = None
    """Where it ran; None when that was not on devices of one kind, evenly."""
    data: str | None = None
    """What it trained on."""


@dataclass(frozen=True)
class Desired:
    """Done in this order: objects (what is first is needed first), secret, scales, deletes; then events and status."""

    objects: tuple[Manifest, ...] = ()
    secret: str | None = None
    """Name of the Secret to create unless it exists."""
    scales: tuple[Scale, ...] = ()
    deletes: tuple[Target, ...] = ()
    delete_job: bool = False
    plan: StoredPlan | None = None
    """The plan that ``objects`` hold, for which pods should run."""
    status: DLJobStatus | None = None
    events: tuple[Event, ...] = ()
    requeue_after_s: float | None = None
    measurements: RunMeasurements | None = None


@dataclass
class Draft:
    """A Desired in the making; lives within one call of ``reconcile``."""

    verdicts: list[Verdict] = field(default_factory=list)
    objects: list[Manifest] = field(default_factory=list)
    secret: str | None = None
    scales: list[Scale] = field(default_factory=list)
    deletes: list[Target] = field(default_factory=list)
    requeues_s: list[float] = field(default_factory=list)
    measurements: RunMeasurements | None = None
    plan: StoredPlan | None = None
    wanted: int = 0
    """Pods that should run now."""

    def requeue_in(self, seconds: float) -> None:
        self.requeues_s.append(max(0.0, seconds))
