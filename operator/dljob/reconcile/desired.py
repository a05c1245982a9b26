"""Data classes for the desired state of a job, which is the result of a reconcile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlcontract import Report
from dljob.api import DLJobStatus
from dljob.api.profiles.script import ObservedStructure
from dljob.calibrate import Place
from dljob.calibrate.learned import SplitPoint
from dljob.calibrate.memory import MemoryPoint
from dljob.job.plan.stored import StoredPlan
from dljob.render.config import Manifest
from dljob.status import Event, Verdict


@dataclass(frozen=True)
class Scale:
    """A new replica count for the StatefulSet ``name``, whose pod template does not change. ``uid``: its uid."""

    name: str
    replicas: int
    uid: str = ""


@dataclass(frozen=True)
class Target:
    """An object to delete. ``uid``: delete only the object with this uid; None: any with this name.

    ``force``: delete a pod without waiting for its kubelet, because the pod's node is lost.
    """

    kind: str
    name: str
    uid: str | None = None
    force: bool = False


@dataclass(frozen=True)
class RunMemory:
    """What a run of a training script has shown about the memory of a pod.

    Only plans of its own namespace use it: what a script shows about itself is its owner's.
    """

    model: str
    device: str
    namespace: str
    point: MemoryPoint


@dataclass(frozen=True)
class RunMeasurements:
    """Measurements of one run of a job, with which the operator updates the profiles of the job's model and devices.

    ``model``: key of the model, which is part of the key of each profile.
    """

    model: str
    report: Report
    devices: tuple[str, ...]
    """Device types that the report measured and the plan named."""
    place: Place | None = None
    """Placement of the run. None unless the run used one device type, with the same number of devices on each node."""
    data: str | None = None
    """Key of the dataset for which the profile stores the gradient noise scale. None: do not store the noise scale."""
    layouts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(Cores of each rank, ranks per node) of the run by device type, for CPUs."""
    used_cores: Mapping[str, float] = field(default_factory=dict)
    """CPUs that each rank can keep busy, by device type, for CPUs: at most its threads, but a part of a CPU on a small
    node, and an equal part of a machine that several nodes share."""
    machine_nodes: int = 1
    """The largest number of the run's nodes that share the cores of one machine."""
    start_s: float | None = None
    """Seconds from new pods to the first step, without fetching data. None: not measured, or disturbed by failures."""
    structure: ObservedStructure | None = None
    """Observed structure of a script that no spec describes. It is then all that the run has measured."""
    split_step: SplitPoint | None = None
    """Step of ranks that each held a part of the model. It is then all that the run has measured."""


@dataclass(frozen=True)
class WorkloadChange:
    """A change of the job's Workload, the object that asks Kueue for quota.

    Only one of ``apply``, ``delete``, ``spec`` and ``status`` is set. ``spec`` and ``status`` are JSON merge patches.
    ``uid``: uid of the Workload; empty if the Workload does not exist yet. ``version``: resourceVersion that the change
    is based on; empty: any.
    """

    name: str
    uid: str = ""
    version: str = ""
    apply: Manifest | None = None
    delete: bool = False
    spec: Mapping[str, Any] | None = None
    status: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Desired:
    """Desired state of a job.

    The controller applies the secret and the objects, then the scales, the deletes, the events and the status.
    """

    objects: tuple[Manifest, ...] = ()
    secret: str | None = None
    """Name of the Secret with the TLS keys of the job's pods, to create if it does not exist."""
    scales: tuple[Scale, ...] = ()
    deletes: tuple[Target, ...] = ()
    delete_job: bool = False
    plan: StoredPlan | None = None
    """The plan that ``objects`` contain and whose pods should run. None if no pods should run."""
    status: DLJobStatus | None = None
    events: tuple[Event, ...] = ()
    requeue_after_s: float | None = None
    measurements: RunMeasurements | None = None
    memory: RunMemory | None = None
    """What a run of a training script has shown about the memory of a pod, for its profile."""
    workload: WorkloadChange | None = None
    """Change of the job's Workload in Kueue. The controller makes it after the objects and deletes."""


@dataclass
class Draft:
    """The desired state of a job while it is built: functions add to it during one call of ``reconcile``.

    At the end, ``reconcile`` makes the ``Desired`` from it. ``verdicts`` become conditions of the job. Functions that
    wait for something add to ``requeues_s`` the seconds after which the job must be reconciled again; the smallest
    number counts.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    objects: list[Manifest] = field(default_factory=list)
    secret: str | None = None
    scales: list[Scale] = field(default_factory=list)
    deletes: list[Target] = field(default_factory=list)
    requeues_s: list[float] = field(default_factory=list)
    measurements: RunMeasurements | None = None
    memory: RunMemory | None = None
    plan: StoredPlan | None = None
    workload: WorkloadChange | None = None
    wanted: int = 0
    """Number of pods that should run now."""
    events: list[Event] = field(default_factory=list)
    """Events that are not about a change of a condition."""
    counts_anew: bool = False
    """True if evictions or ends of pods were counted that the stored plan does not record yet."""
    start_timeouts: int | None = None
    """New value of ``status.startTimeouts``; None: it does not change."""
    preemptions: int | None = None
    """New value of ``status.preemptions``; None: it does not change."""

    def clear(self) -> None:
        """Remove the plan and all objects to apply, scale and delete from the draft, so that it starts no pods.

        Verdicts, events and requeue times remain.
        """
        self.objects, self.secret, self.scales, self.deletes = [], None, [], []
        self.plan, self.wanted = None, 0

    def requeue_in(self, seconds: float) -> None:
        """Reconcile the job again after at most ``seconds``; at once if the number is not positive."""
        self.requeues_s.append(max(0.0, seconds))
