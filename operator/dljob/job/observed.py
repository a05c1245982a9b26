"""An immutable snapshot of one job: pods, StatefulSets, persistent volume claims, plan and report.

The package ``kube`` builds the snapshot from its caches, ``reconcile`` decides what to change, and ``status`` and
``render`` read it. The snapshot contains only what decisions depend on, so that ten thousand pods need little memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dljob.cluster import ClusterView
from dljob.cluster.node_selector import NodeSelector
from dljob.faults import LeftOut
from dljob.job.queue import QueueSeen
from dljob.planner import Learned
from dljob.scheduling import NO_LIMITS, Charge, NamespaceLimits, Overdraft
from dljob.scheduling.assignment.reasons import Resting, RoomFor

JOB_LABEL = "dljob.dev/job"
GROUP_LABEL = "dljob.dev/group"
SPEC_ANNOTATION = "dljob.dev/spec"
"""Annotation of a StatefulSet. Its value is the revision (``StoredPlan.revision``) of the plan that the pods run."""
TRAINER_CONTAINER = "trainer"
"""Name of the container of the agent and the ranks."""
SIGKILLED = 128 + 9
"""Exit code of a process that SIGKILL has ended, and of a container whose first process it has ended."""
DATASET_CONTAINER = "dataset"
"""Name of the init container that fetches and verifies a job's data."""
SOURCE_CONTAINER = "source"
"""Name of the init container that fetches the files of ``spec.trainer.source``, and of their volume."""
APPLIED_ANNOTATION = "dljob.dev/applied"
"""Annotation of all objects that a job owns. Its value is a digest of the manifest that the operator applied.

With it, a restarted operator knows that it need not apply an unchanged manifest again."""
LOOK_LABEL = "dljob.dev/look"
"""Label of the look pod of a job, which looks at its data. The pod also has ``JOB_LABEL``, but no ``GROUP_LABEL``."""
LOOK_CONTAINER = "look"
DIGEST_ANNOTATION = "dljob.dev/look-digest"
"""Annotation of a look pod: digest of its spec. A pod with another digest than that of the job's spec is replaced."""
SUPPORT_ANNOTATION = "dljob.dev/support"
"""Annotation of the plan's ConfigMap: digest of the manifests of the job's objects that the operator does not watch."""
SIGNATURE_ANNOTATION = "dljob.dev/signature"
"""Annotation of the plan's ConfigMap: the operator's signature of the plan (``job.plan.authentic``)."""

Conditions = tuple[tuple[str, str], ...]
"""Sorted (type, status) of a node's or a pod's conditions."""


@dataclass(frozen=True)
class JobSeen:
    name: str
    namespace: str
    uid: str
    generation: int
    created: datetime
    spec: Mapping[str, Any]
    status: Mapping[str, Any] = field(default_factory=dict)
    deleting: bool = False
    may_override: bool = False
    """True if the job has the annotation ``dljob.dev/overrides: all``. ``OverridePolicy`` says when it counts."""
    spec_problem: str | None = None
    """Message that says that the spec is too long or too deeply nested, so that ``spec`` is empty; None otherwise."""
    queue: str = ""
    """LocalQueue of Kueue that the job's label names. Empty without the label, and if the installation ignores it."""
    queue_priority: str = ""
    """WorkloadPriorityClass of Kueue that the job's label names; empty without the label."""

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


def queued_elsewhere(job: JobSeen) -> bool:
    """Return True if Kueue decides when the job may run. The operator's own order and time-outs do not apply to it."""
    return bool(job.queue)


@dataclass(frozen=True)
class Stuck:
    """The kubelet's reason and message why a container of a pod does not run. ``image``: image of this container."""

    reason: str
    message: str
    image: str = ""


@dataclass(frozen=True)
class Fetching:
    """State of an init container that fetches something, while it runs or after its last run failed.

    ``container``: its name, ``DATASET_CONTAINER`` or ``SOURCE_CONTAINER``.
    """

    exit_code: int | None = None
    """Exit code of the last run that ended, if it failed; None if no run has ended yet."""
    message: str = ""
    """Last log line of this failed run; empty if ``exit_code`` is None or if there is no log."""
    container: str = DATASET_CONTAINER

    @property
    def what(self) -> str:
        """Return what the container fetches, for messages: 'the dataset' or 'the files of trainer.source'."""
        return "the dataset" if self.container == DATASET_CONTAINER else "the files of trainer.source"


@dataclass(frozen=True)
class Eviction:
    """A pod that the kubelet evicted from its node: the kubelet's ``message``, and when (RFC 3339; empty: unknown)."""

    pod: str
    uid: str
    node: str
    message: str
    at: str = ""


@dataclass(frozen=True)
class Rejection:
    """A pod that the kubelet of its node has rejected, so that none of its containers started.

    ``reason``, ``message``: those of the kubelet. ``created``: when the pod was created.
    """

    pod: str
    uid: str
    node: str
    reason: str
    message: str
    created: datetime


@dataclass(frozen=True)
class Unscheduled:
    """A pod that waits for its scheduler, and that no scheduler has tried to place yet.

    ``since``: when the pod was created. ``scheduler``: the name of the scheduler that the pod waits for.
    """

    since: datetime
    scheduler: str


@dataclass(frozen=True, slots=True)
class PodSeen:
    name: str
    uid: str
    group: str
    node: str | None = None
    ready: bool = False
    restarts: int = 0
    stuck: Stuck | None = None
    unschedulable: str | None = None
    """The scheduler's message why no node fits; None if the pod has a node or the scheduler has not tried yet."""
    fetching: Fetching | None = None
    fetched_s: float | None = None
    """Seconds in which the init container fetched or verified the data; None before, and without such a container."""
    running_since: datetime | None = None
    """When the container of the agent and the ranks started; None if it does not run."""
    memory_killed_at: str = ""
    """When the kernel last ended this container because it reached its memory limit; empty if it has not."""
    deleting: bool = False
    fenced: bool = False
    """True if the pod is force-deleted already and remains only because of a finalizer."""
    set: str = ""
    """Name of the StatefulSet that controls the pod; empty if none does."""
    set_uid: str = ""
    conditions: Conditions = ()
    """The pod's conditions, except those of its start (``STARTUP_CONDITIONS``)."""
    charge: Charge | None = None
    """Amounts that the pod uses up of the quotas of its namespace; None if the pod has ended."""
    eviction: Eviction | None = None
    """Why the kubelet has evicted the pod; None if it has not."""
    rejection: Rejection | None = None
    """Why the kubelet has rejected the pod; None if it has not."""
    unscheduled: Unscheduled | None = None
    """Set until a scheduler has tried to place the pod."""


@dataclass(frozen=True)
class SetSeen:
    name: str
    group: str
    replicas: int
    spec_digest: str
    applied: str = ""
    uid: str = ""
    made_replicas: int = 0
    """Number of existing pods that the StatefulSet controller reports (``status.replicas``)."""
    reconciled: bool = True
    """True if the StatefulSet controller has processed the current spec."""
    problem: str | None = None
    """Reason why the pods of the StatefulSet could not be created, from a warning event; None if there is no event."""


@dataclass(frozen=True)
class ClaimSeen:
    name: str
    phase: str
    access_modes: tuple[str, ...]
    storage_class: str | None = None
    problem: str | None = None
    """Message of a warning event about the claim, such as the volume provisioner's; None if there is no warning."""
    applied: str = ""
    volume: str = ""
    """Name of its PersistentVolume; empty if it has none yet."""


@dataclass(frozen=True)
class ProvisioningSeen:
    """A ProvisioningRequest: with it, a job asks an autoscaler for nodes. ``digest``: digest of what it asks for."""

    name: str
    uid: str
    created: datetime
    digest: str = ""
    conditions: Mapping[str, tuple[bool, str, str]] = field(default_factory=dict)
    """Type of each condition → True if its status is True, its reason and its message."""
    deleting: bool = False
    applied: str = ""


@dataclass(frozen=True)
class ClassSeen:
    name: str
    default: bool = False
    provisioner: str = ""
    topologies: NodeSelector | None = None
    """The nodes on which volumes of this class can be mounted (``allowedTopologies``); None: the class does not say."""


@dataclass(frozen=True)
class Rejected:
    """An object of the job that the operator could not write: it was rejected, or its name is in use (``taken``).

    ``message``: reason of the API server, or which object has the name.
    """

    kind: str
    name: str
    message: str
    taken: bool = False
    """True if an object of this name has another owner. False if the API server rejected the operator's object."""
    being_deleted: bool = False
    """True if that object belongs to an earlier DLJob of the job's name, so that Kubernetes deletes it soon."""


@dataclass(frozen=True)
class Outlook:
    """The forecast of when a waiting job starts and ends. A time that cannot be predicted is None.

    ``earliest``, ``start`` and ``latest``: 10th percentile, median and 90th percentile of the time of its start.
    ``finish_p90``: 90th percentile of the time of its end.
    """

    earliest: datetime | None
    start: datetime | None
    latest: datetime | None
    finish_p90: datetime | None

    def meets(self, finish_by: datetime | None) -> bool | None:
        """Return True if the 90th percentile of the job's end is not after ``finish_by``, and False if it is.

        Return None if the end is unknown or if there is no deadline (``finish_by`` is None).
        """
        return None if finish_by is None or self.finish_p90 is None else self.finish_p90 <= finish_by


NO_OUTLOOK = Outlook(None, None, None, None)
"""The forecast of a job about which nothing can be predicted."""


@dataclass(frozen=True)
class Preemption:
    """The reason why a running job is preempted: a waiting job of a higher priority needs its devices.

    ``by``: name of the waiting job; empty if it is in another namespace, whose job names are not disclosed.
    ``priority``: priority of the waiting job. ``own``: priority of the running job.
    """

    by: str
    priority: int
    own: int


@dataclass(frozen=True)
class LookSeen:
    """The look pod of a job, which looks at the data for ``spec.task``. ``digest``: value of ``DIGEST_ANNOTATION``."""

    name: str
    uid: str
    digest: str
    phase: str
    deleting: bool = False
    problem: str = ""
    """Why the pod does not run or has failed, in the words of Kubernetes or of the container's last line of output."""
    container: str = ""
    """Name of the container with the problem; empty if it is not one container's."""
    reason: str = ""
    """Why the pod has failed as a whole, such as NodeShutdown; empty if a container failed."""
    node: str = ""
    """Name of its node; empty before it has one."""
    rejection: Rejection | None = None
    """Set if the kubelet of its node has rejected the pod."""
    eviction: Eviction | None = None
    """Set if the kubelet of its node has evicted the pod."""
    set: str = ""
    """Always empty, as of every pod without a StatefulSet."""


@dataclass(frozen=True)
class Observed:
    job: JobSeen
    sets: tuple[SetSeen, ...] = ()
    pods: tuple[PodSeen, ...] = ()
    claims: Mapping[str, ClaimSeen] = field(default_factory=dict)
    """Persistent volume claims in the job's namespace, by name."""
    classes: tuple[ClassSeen, ...] | None = None
    """Storage classes; None if the operator may not read them."""
    volumes: Mapping[str, NodeSelector] = field(default_factory=dict)
    """Name → nodes that can mount it, for each PersistentVolume of a claim in ``claims`` that limits the nodes."""
    plan: Mapping[str, str] | None = None
    """Data of the ConfigMap ``<job>-plan``; None if this job has none. An edited plan is not included."""
    plan_edit: str | None = None
    """Why the ConfigMap's data are not a plan of the operator (``authentic.Edit``); None if they are.

    ``plan`` is then the plan that this operator used last, or None if it has used none since it started."""
    plan_record: str | None = None
    """New value of ``status.planRecord``, by which the operator recognizes ``plan``; None: it does not change."""
    report: str | None = None
    """Text of the report (JSON) that the job's coordinator writes; None if there is none or if it is too long."""
    report_problem: str | None = None
    """Message that says that the report is too long, and is therefore not read; None otherwise."""
    look: LookSeen | None = None
    """The job's look pod; None if there is none."""
    suggestion: str | None = None
    """Text of the suggestion (JSON) that the look pod has written; None if there is none or if it is too long."""
    suggestion_problem: str | None = None
    """Message that says why the suggestion is not read; None otherwise."""
    leftovers: tuple[str, ...] = ()
    """Objects with this job's names that belong to another owner, such as 'StatefulSet digits-cpu'."""
    being_deleted: tuple[str, ...] = ()
    """Objects with this job's names that belong to an earlier DLJob of its name, which no longer exists.

    The garbage collector deletes them soon."""
    lost_nodes: Mapping[str, datetime] = field(default_factory=dict)
    """Nodes that are gone or NotReady, with the time when that began."""
    failed_nodes: Mapping[str, datetime] = field(default_factory=dict)
    """Those of ``lost_nodes`` that nobody has drained, shut down or removed: they have failed by themselves."""
    node_conditions: Mapping[str, Conditions] = field(default_factory=dict)
    """Name → conditions of the nodes on which the job's pods run, or on which ranks failed lately."""
    machine_nodes: int = 1
    """Largest number of nodes of the job's pods on one machine (label ``dljob.dev/machine``). They share its cores."""
    usable_cpus: Mapping[str, float] = field(default_factory=dict)
    """Name → CPUs that the job's pods can keep busy, for each node on which they run. Nodes on one machine share its
    cores. A node is missing if it is gone or reports no CPUs."""
    closed_nodes: tuple[str, ...] = ()
    """The nodes of the cluster that take no pods, each with the reason, such as 'n1 (cordoned)'."""
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)
    """Nodes that new plans of this job must not use, because of repeated faults."""
    evictions: tuple[Eviction, ...] = ()
    """The last evictions of the job's pods, also of pods that are gone. A restarted operator knows no earlier ones."""
    look_evictions: tuple[Eviction, ...] = ()
    """The last evictions of look pods, as ``evictions``."""
    rejections: tuple[Rejection, ...] = ()
    """The last pods that kubelets rejected, also pods that are gone. A restarted operator knows no earlier ones."""
    provisioning: ProvisioningSeen | None = None
    """The request with which the job has asked an autoscaler for nodes; None if there is none."""
    provisioning_readable: bool = True
    """True if the operator may read such requests."""
    overdrawn: tuple[Overdraft, ...] = ()
    """Quotas of the namespace that were lowered below what the job's pods and others use."""
    limits: NamespaceLimits = NO_LIMITS
    """What quotas and limit ranges of the namespace leave for a new plan of this job. Set only for planning."""
    view: ClusterView | None = None
    """The nodes of the cluster; None unless the job must be planned with it, see ``reconcile.needs_view``."""
    learned: Mapping[tuple[str, str], Learned] = field(default_factory=dict)
    rejected: Rejected | None = None
    queue: QueueSeen = field(default_factory=QueueSeen)
    """The job's Workload and what belongs to it, if the job is or was in a queue of Kueue."""
    place: tuple[int, int] | None = None
    """The job's place among all jobs that wait for devices, from 1, and their number; None if it does not wait."""
    outlook: Outlook | None = None
    """The forecast of a job that waits for devices; None if it is not made yet, or if the job does not wait."""
    preemption: Preemption | None = None
    """Set while the job must release its devices for another job and has not begun to stop; None otherwise."""
    room_for: RoomFor | None = None
    """The other jobs for which the job must move to other or fewer devices; None if it moves for itself or not at all.

    They gain more from its present devices than the job itself does."""
    resting: Resting | None = None
    """Set while devices stay free that this running job could use if it did not rest after a move; None otherwise."""
    lacks_priority_class: str = ""
    """PriorityClass that the job names and that does not exist; empty if it exists, or if that is unknown."""
    capacity_grew: bool = False
    """True if a better plan may be possible for this running job. Planning sets it for one job at a time."""

    @property
    def ready_pods(self) -> tuple[PodSeen, ...]:
        return tuple(pod for pod in self.pods if pod.ready and not pod.deleting)
