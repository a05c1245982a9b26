"""Read the stage of a job's admission, and what Kueue has admitted, from the job's Workload."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from dljob.api import DLJobSpec, PlanningMode
from dljob.api.spec.planning import FixedGroup
from dljob.job.plan.stored import StoredPlan
from dljob.job.queue import Placement, QueueAdmission, QueueSeen, WorkloadSeen


class Stage(StrEnum):
    """Stage of a job in a queue of Kueue. The values are reasons of the condition Admitted."""

    NO_KUEUE = "NoKueue"
    """The operator cannot use Kueue."""
    ABSENT = "WorkloadAbsent"
    """There is no Workload, or it is being deleted."""
    OVER = "WorkloadFinished"
    """Somebody other than the operator has finished the Workload."""
    EVICTED = "Evicted"
    """Kueue takes the quota back. The operator must stop the pods, and then release the quota."""
    INACTIVE = "Deactivated"
    """``spec.active`` of the Workload is false."""
    WAITING = "Queued"
    CHECKING = "AdmissionChecks"
    """Quota is reserved, and admission checks are not done yet."""
    ADMITTED = "AdmittedByKueue"


@dataclass(frozen=True)
class Turn:
    stage: Stage
    message: str
    reserved: bool = False
    """True if quota is reserved for the Workload."""


@dataclass(frozen=True)
class Within:
    """The limits of an admission with fewer pods than the plan has. The job must be planned again within these limits.

    ``node_selector`` and ``tolerations``: those that Kueue adds to the pods.
    """

    groups: tuple[tuple[str, int, int], ...]
    """Device type, number of nodes and ranks per node of each group."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()

    def narrow(self, spec: DLJobSpec) -> DLJobSpec:
        """Return the spec with the admitted groups as fixed choices, so that the planner keeps within these limits.

        Kueue's node selector and tolerations are added.
        """
        groups = tuple(FixedGroup(device=name, nodes=nodes, ranks_per_node=ranks) for name, nodes, ranks in self.groups)
        scheduling = spec.scheduling
        selector = {**scheduling.node_selector, **self.node_selector}
        update = {"node_selector": selector, "tolerations": (*scheduling.tolerations, *self.tolerations)}
        planning = spec.planning.model_copy(update={"mode": PlanningMode.FIXED, "groups": groups})
        return spec.model_copy(update={"planning": planning, "scheduling": scheduling.model_copy(update=update)})


class Problem(NamedTuple):
    """Why a job cannot start although Kueue has admitted it. ``reason``: reason of the condition Admitted."""

    reason: str
    message: str


@dataclass(frozen=True)
class Admitted:
    """What Kueue has admitted. ``counts``: number of admitted pods of each group, by the name of the group.

    ``problem``: why the job cannot start nevertheless; None if it can.
    """

    admission: QueueAdmission
    counts: Mapping[str, int]
    problem: Problem | None = None


def turn(seen: QueueSeen) -> Turn:
    """Return how far Kueue's admission of a job is, and a message for the job's condition Admitted."""
    found = seen.workload
    if not seen.api_version:
        return Turn(Stage.NO_KUEUE, seen.problem)
    if found is None or found.deleting:
        return Turn(Stage.ABSENT, "the job's Workload does not exist yet, or is being deleted")
    name, reserved = f"Workload {found.name}", found.is_true("QuotaReserved")
    if found.is_true("Finished"):
        return Turn(Stage.OVER, f"{name} has the condition Finished, but the job has not ended", reserved)
    if found.is_true("Evicted") and (reserved or found.cluster_queue is not None):
        return Turn(Stage.EVICTED, f"Kueue evicts {name}: {_words(found, 'Evicted')}", reserved=True)
    if not found.active:
        text = (
            f"{name}: found spec.active: false; expected true. Set it to true, or change the job's spec, to queue the "
            "job again"
        )
        return Turn(Stage.INACTIVE, text, reserved)
    if found.is_true("Admitted"):
        return Turn(Stage.ADMITTED, f"Kueue admitted {name} to ClusterQueue {found.cluster_queue}", reserved)
    if reserved:
        waits = [f"{item.get('name')}: {item.get('message') or item.get('state')}" for item in _open_checks(found)]
        text = f"{name} has quota in ClusterQueue {found.cluster_queue} and waits for admission checks"
        return Turn(Stage.CHECKING, f"{text}: {'; '.join(waits)}" if waits else text, reserved)
    why = _words(found, "QuotaReserved") or "Kueue has not considered the Workload yet"
    return Turn(Stage.WAITING, f"{name} waits in LocalQueue {found.queue}: {why}")


def _words(found: WorkloadSeen, kind: str) -> str:
    condition = found.condition(kind) or {}
    return ": ".join(str(part) for part in (condition.get("reason"), condition.get("message")) if part)[:500]


def _open_checks(found: WorkloadSeen) -> list[Mapping[str, Any]]:
    return [item for item in found.checks if item.get("state") != "Ready"]


def admitted(seen: QueueSeen) -> Admitted:
    """Return what Kueue has admitted for a job whose stage is ``ADMITTED``; do not call it in another stage."""
    found = seen.workload
    assert found is not None
    placements: dict[str, Placement] = {}
    counts: dict[str, int] = {}
    problem: Problem | None = None
    for name, pod_set in found.pod_sets.items():
        assigned = found.assignments.get(name)
        count = None if assigned is None else assigned.count
        counts[name] = pod_set.count if count is None else count
        selector: dict[str, str] = {}
        tolerations: list[Mapping[str, Any]] = []
        labels: dict[str, str] = {}
        annotations: dict[str, str] = {}
        for flavor_name in assigned.flavors if assigned is not None else ():
            flavor = seen.flavors.get(flavor_name)
            if flavor is None:
                text = (
                    f"Workload {found.name}: found ResourceFlavor {flavor_name!r} in its admission; expected one that "
                    "exists. Create the ResourceFlavor, or evict the Workload"
                )
                problem = problem or Problem("FlavorNotFound", text)
                continue
            selector |= flavor.node_labels
            tolerations += [item for item in flavor.tolerations if item not in tolerations]
        if assigned is not None and assigned.topology:
            text = (
                f"Workload {found.name}: found an assignment of nodes (topology-aware scheduling); expected none, "
                "because dljob does not follow it. Use a ResourceFlavor without topologyName"
            )
            problem = problem or Problem("TopologyNotSupported", text)
        for update in _updates(found, name):
            selector |= update.get("nodeSelector") or {}
            labels |= update.get("labels") or {}
            annotations |= update.get("annotations") or {}
            tolerations += [item for item in update.get("tolerations") or () if item not in tolerations]
        placements[name] = Placement(
            node_selector=selector,
            tolerations=tuple(dict(item) for item in tolerations),
            labels=labels,
            annotations=annotations,
        )
    admission = QueueAdmission(workload=found.uid, cluster_queue=found.cluster_queue or "", placements=placements)
    return Admitted(admission, counts, problem)


def _updates(found: WorkloadSeen, name: str) -> list[Mapping[str, Any]]:
    return [
        update
        for check in found.checks
        if check.get("state") == "Ready"
        for update in check.get("podSetUpdates") or ()
        if update.get("name") == name
    ]


def within(seen: QueueSeen, accepted: StoredPlan | None, digest: str | None) -> Within | None:
    """Return the limits within which a job must be planned again, because Kueue admitted fewer pods than its plan has.

    ``digest``: digest of the job's spec. Return None if Kueue admitted the plan's pods, if the job has no plan or is
    not admitted, if the plan or the Workload is of another spec, if the Workload has other groups than the plan, or if
    the job cannot start with the admission (``Admitted.problem``).
    """
    if accepted is None or seen.workload is None or turn(seen).stage is not Stage.ADMITTED:
        return None
    if not accepted.spec_digest == seen.workload.digest == digest:
        return None
    found = admitted(seen)
    groups = {group.name: group for group in accepted.groups}
    if found.problem is not None or found.counts.keys() != groups.keys():
        return None
    if all(found.counts[name] == group.nodes for name, group in groups.items()):
        return None
    placements = found.admission.placements.values()
    selector = {key: value for item in placements for key, value in item.node_selector.items()}
    return Within(
        tuple((group.device, found.counts[name], group.ranks_per_node) for name, group in groups.items()),
        selector,
        tuple(toleration for item in placements for toleration in item.tolerations),
    )
