"""Types of a job in a queue of Kueue: its Workload as the API server shows it, and what Kueue has admitted.

Kueue decides when a job may run, but does not know DLJobs. The operator therefore creates a Workload object for the
job, which asks Kueue for quota. Kueue writes its decision to the status of this object.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from dljob.api.overrides import UNSAFE_ANNOTATIONS

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of a DLJob: name of the LocalQueue in its namespace."""
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
"""Label of a DLJob: name of a WorkloadPriorityClass."""
MAX_ADMITTED_ITEMS = 64
"""Maximum number of labels, annotations or tolerations that Kueue may add to the pods of one group."""


class Placement(BaseModel):
    """What Kueue adds to the pods of one group (the pods on one type of device).

    It comes from the ResourceFlavors that Kueue assigned, and from its admission checks.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    node_selector: Annotated[dict[str, str], Field(max_length=MAX_ADMITTED_ITEMS)] = {}
    tolerations: Annotated[tuple[dict[str, Any], ...], Field(max_length=MAX_ADMITTED_ITEMS)] = ()
    labels: Annotated[dict[str, str], Field(max_length=MAX_ADMITTED_ITEMS)] = {}
    annotations: Annotated[dict[str, str], Field(max_length=MAX_ADMITTED_ITEMS)] = {}

    @field_validator("annotations")
    @classmethod
    def _safe(cls, annotations: dict[str, str]) -> dict[str, str]:
        """Leave out annotations that select a security profile: users of ConfigMaps can edit a stored plan."""
        return {name: value for name, value in annotations.items() if not name.startswith(UNSAFE_ANNOTATIONS)}


class QueueAdmission(BaseModel):
    """An admission by Kueue, stored in the plan whose pods run under it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    workload: Annotated[str, Field(description="UID of the Workload.")]
    cluster_queue: str
    placements: Annotated[
        dict[str, Placement],
        Field(
            description="Group of pods (by its name) -> what Kueue adds to these pods: node selector, tolerations, "
            "labels, annotations."
        ),
    ]


@dataclass(frozen=True)
class PodSetSeen:
    """A podSet of a Workload. ``count``: number of pods that the job asks for.

    ``min_count``: smallest number of pods that Kueue may admit instead; None: Kueue must admit all.
    """

    count: int
    min_count: int | None = None


@dataclass(frozen=True)
class Assignment:
    """Kueue's assignment to a podSet: a number of pods, and ResourceFlavors. ``flavors``: their names, sorted.

    ``count``: number of admitted pods; None: as many as the podSet asks for.
    """

    count: int | None
    flavors: tuple[str, ...] = ()
    topology: bool = False
    """True if Kueue also chose nodes (topology-aware scheduling)."""


@dataclass(frozen=True)
class WorkloadSeen:
    """The Workload of a job. ``version``: its resourceVersion, for writes that must not overwrite Kueue's."""

    name: str
    uid: str
    version: str
    generation: int
    queue: str
    digest: str
    """``spec_digest`` of the spec for which the operator wrote the Workload."""
    active: bool = True
    deleting: bool = False
    conditions: tuple[Mapping[str, Any], ...] = ()
    pod_sets: Mapping[str, PodSetSeen] = field(default_factory=dict)
    cluster_queue: str | None = None
    """ClusterQueue whose quota is reserved; None without a reservation."""
    assignments: Mapping[str, Assignment] = field(default_factory=dict)
    checks: tuple[Mapping[str, Any], ...] = ()
    """Entries of ``status.admissionChecks``."""

    def condition(self, kind: str) -> Mapping[str, Any] | None:
        return next((item for item in self.conditions if item.get("type") == kind), None)

    def is_true(self, kind: str) -> bool:
        found = self.condition(kind)
        return found is not None and found.get("status") == "True"


@dataclass(frozen=True)
class Flavor:
    """The node labels and tolerations of a ResourceFlavor, which Kueue expects the pods of the job to have.

    Pods select nodes with these labels.
    """

    node_labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class KueueAccess:
    """The API of Kueue that the operator uses, and why it cannot use it.

    ``api_version``: API version of the Workload; empty if the operator cannot use Kueue, for the reason ``problem``.
    ``problems``: namespace → reason, for each namespace whose Workloads the operator cannot read, unlike those of
    others.
    """

    api_version: str = ""
    problem: str = ""
    problems: Mapping[str, str] = field(default_factory=dict)

    def of(self, namespace: str) -> tuple[str, str]:
        """Return (API version, problem) for the jobs in a namespace, as in ``QueueSeen``."""
        problem = self.problems.get(namespace) if self.api_version else None
        return ("", problem) if problem else (self.api_version, self.problem)


@dataclass(frozen=True)
class QueueSeen:
    """What the operator knows of Kueue for one job.

    ``api_version``: API version of the Workload, such as ``kueue.x-k8s.io/v1beta2``; empty if the operator cannot use
    Kueue, for the reason ``problem``.
    """

    api_version: str = ""
    problem: str = ""
    workload: WorkloadSeen | None = None
    flavors: Mapping[str, Flavor] = field(default_factory=dict)
    """Name → ResourceFlavor, for those that Kueue assigned to the job's pods. One that does not exist is left out."""
    priority: int | None = None
    """Value of the priority class that the Workload names; None without a class, or if it does not exist."""
