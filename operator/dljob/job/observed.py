"""What the operator sees of one job, as a frozen snapshot: pods, sets, claims, plan and report.

``kube`` makes it from its caches; ``reconcile`` decides on it; ``status`` and ``render`` read it. Only what a
decision depends on is here, so that a cluster of ten thousand pods fits in little memory.
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
"""On StatefulSets: digest of the part of the spec that the template came from."""
DATASET_CONTAINER = "dataset"
"""The init container that fetches and checks a job's data."""
APPLIED_ANNOTATION = "dljob.dev/applied"
"""On every owned object: digest of the manifest that was applied, so that a restart applies nothing again."""


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
    """Why a container does not run, in the kubelet's words."""

    reason: str
    message: str
    image: str = ""


@dataclass(frozen=True)
class Fetching:
    """The dataset's init container, until it has ended well."""

    exit_code: int | None = None
    """Of its last run, where that failed."""
    message: str = ""
    """The last line that run said."""


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
    """The scheduler's message, when it found no node."""
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
    """Why it does not make its pods, where it complained."""


@dataclass(frozen=True)
class ClaimSeen:
    name: str
    phase: str
    access_modes: tuple[str, ...]
    storage_class: str | None = None
    problem: str | None = None
    """What the provisioner complained of."""
    applied: str = ""


@dataclass(frozen=True)
class ClassSeen:
    name: str
    default: bool = False


@dataclass(frozen=True)
class Refused:
    """An object of the job that the API server did not take."""

    kind: str
    name: str
    message: str


@dataclass(frozen=True)
class Observed:
    job: JobSeen
    sets: tuple[SetSeen, ...] = ()
    pods: tuple[PodSeen, ...] = ()
    claims: Mapping[str, ClaimSeen] = field(default_factory=dict)
    """Of the job's namespace, by name."""
    classes: tuple[ClassSeen, ...] | None = None
    """Storage classes; None: the operator may not read them."""
    plan: Mapping[str, str] | None = None
    """Data of the ConfigMap ``<job>-plan``; None: there is none of this job."""
    report: str | None = None
    """Text of the report; None: none was written."""
    leftovers: tuple[str, ...] = ()
    """Objects with this job's names that belong to another owner, such as 'StatefulSet digits-cpu'."""
    lost_nodes: Mapping[str, datetime] = field(default_factory=dict)
    """Nodes that are gone or NotReady, and since when."""
    view: ClusterView | None = None
    """Present when ``reconcile.needs_view`` asked for it."""
    learned: Mapping[tuple[str, str], Learned] = field(default_factory=dict)
    refused: Refused | None = None
