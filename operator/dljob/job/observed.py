"""An immutable snapshot of one job: pods, StatefulSets, claims, plan and report.

``kube`` builds it from its caches, ``reconcile`` decides on it, and ``status`` and ``render`` read it. It holds only
what decisions depend on, so that ten thousand pods fit into little memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dljob.cluster import ClusterView
from dljob.planner import Learned

JOB_LABEL = "dljob.dev/job"
GROUP_LABEL = "dljob.dev/group"
SPEC_ANNOTATION = "dljob.dev/spec"
"""Annotation of StatefulSets: ``StoredPlan.revision`` of the plan that their pods run."""
DATASET_CONTAINER = "dataset"
"""Name of the init container that fetches and verifies a job's data."""
APPLIED_ANNOTATION = "dljob.dev/applied"
"""Annotation of all owned objects: digest of the applied manifest. A restarted operator does not apply it again."""


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

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


@dataclass(frozen=True)
class Stuck:
    """The kubelet's reason why a container does not run."""

    reason: str
    message: str
    image: str = ""


@dataclass(frozen=True)
class Fetching:
    """State of the dataset's init container until it succeeds."""

    exit_code: int | None = None
    """Exit code of the last run, if it failed."""
    message: str = ""
    """Last log line of the failed run."""


@dataclass(frozen=True)
class PodSeen:
    name: str
    uid: str
    group: str
    node: str | None = None
    ready: bool = False
    restarts: int = 0
    stuck: Stuck | None = None
    unschedulable: str | None = None
    """The scheduler's message, if no node fits."""
    fetching: Fetching | None = None
    deleting: bool = False


@dataclass(frozen=True)
class SetSeen:
    name: str
    group: str
    replicas: int
    spec_digest: str
    applied: str = ""
    problem: str | None = None
    """Reason why its pods could not be created, from a warning event."""


@dataclass(frozen=True)
class ClaimSeen:
    name: str
    phase: str
    access_modes: tuple[str, ...]
    storage_class: str | None = None
    problem: str | None = None
    """The provisioner's warning."""
    applied: str = ""


@dataclass(frozen=True)
class ClassSeen:
    name: str
    default: bool = False


@dataclass(frozen=True)
class Rejected:
    """An object of the job that the API server rejected."""

    kind: str
    name: str
    message: str


@dataclass(frozen=True)
class Observed:
    job: JobSeen
    sets: tuple[SetSeen, ...] = ()
    pods: tuple[PodSeen, ...] = ()
    claims: Mapping[str, ClaimSeen] = field(default_factory=dict)
    """Claims of the job's namespace by name."""
    classes: tuple[ClassSeen, ...] | None = None
    """Storage classes; None if the operator may not read them."""
    plan: Mapping[str, str] | None = None
    """Data of the ConfigMap ``<job>-plan``; None if this job has none."""
    report: str | None = None
    """Text of the report; None if there is none."""
    leftovers: tuple[str, ...] = ()
    """Objects with this job's names that belong to another owner, such as 'StatefulSet digits-cpu'."""
    lost_nodes: Mapping[str, datetime] = field(default_factory=dict)
    """Nodes that are gone or NotReady, with the time when that began."""
    view: ClusterView | None = None
    """The cluster; set if ``reconcile.needs_view`` returned True."""
    learned: Mapping[tuple[str, str], Learned] = field(default_factory=dict)
    rejected: Rejected | None = None
