"""Reservations of a job: the resources of its accepted plan for which the scheduler has not placed a pod yet."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dljob.api.compact import ABSENT, brief_conditions
from dljob.api.defaults import JobDefaults
from dljob.cluster.domains import ANYWHERE, Domain
from dljob.job.observed import Observed, queued_elsewhere
from dljob.job.plan.pod_groups import PodGroup
from dljob.job.plan.stored import StoredPlan
from dljob.job.waiting import WAITS_FOR_NODES
from dljob.scheduling import Charge, Reservation, amount

REFUSED = {"PodsRejected", "ObjectRejected", "NamesTaken"}
"""Reasons of the job's condition PodsReady=False with which its pods cannot be created until a user or administrator
changes something, such as a quota or a name. Such a job reserves nothing."""


@dataclass(frozen=True)
class PlannedPods:
    """The part of a stored plan that reservations need: its number, its revision, and the resources of its pods.

    The operator holds this part in memory for all jobs. It does not hold whole plans, which may have thousands of
    ranks. ``domain``: nodes on which the pods may run.
    """

    number: int
    revision: str
    groups: tuple[PodGroup, ...]
    charges: Mapping[str, Charge] = field(default_factory=dict)
    """Amounts that count against quotas: those of one pod by group and, under the empty name, those of all other
    objects.
    """
    checkpoints: bool = False
    """True if the plan writes checkpoints, so that a job that stops can continue from the last one."""
    defaults: JobDefaults | None = None
    """The administrator's defaults when the job was planned; later changes do not apply to it."""
    domain: Domain = ANYWHERE
    grace_s: float = 0.0
    """Termination grace period of its pods in seconds."""
    asks_for_nodes: bool = False
    """True if an autoscaler is asked for the nodes of the plan before its pods are created."""
    uid: str = ""
    """The uid of the job."""

    @classmethod
    def of(cls, plan: StoredPlan) -> "PlannedPods":
        return cls(
            plan.plan.number, plan.revision, plan.groups, plan.charges or {},
            plan.plan.checkpoint.enabled, plan.defaults, plan.node_domain, plan.plan.grace_s,
            plan.provisioning_class is not None, plan.plan.uid,
        )  # fmt: skip


@dataclass(frozen=True)
class Reserved:
    """The reservations of a job, and a value (``state``) that differs if they may have changed.

    ``state`` changes with the job's plan, with the pods that the scheduler has placed, and with the replicas of the
    job's StatefulSets. None: the job reserves nothing.
    """

    reservations: tuple[Reservation, ...] = ()
    state: Hashable = None


def stored_reservation(observed: Observed, plan: PlannedPods | None, placed: Callable[[str], bool]) -> Reserved:
    """Return what a job reserves, derived from its objects on the API server.

    ``plan``: pods of its stored plan; None: the job has none, and reserves nothing. ``placed``: function that returns
    True for the uid of a pod that takes resources of a node; these pods need no reservation.

    A job that is suspended, has ended or is being deleted reserves nothing. The same holds for a job that waits in a
    queue of Kueue, and for one whose pods cannot be created until somebody changes something (``REFUSED``).
    """
    job = observed.job
    if plan is None or job.deleting or job.spec.get("suspend") or job.status.get("phase") in ("Complete", "Failed"):
        return Reserved()
    found = brief_conditions(job.status)
    (admitted, cause), (ready, refusal) = (found.get(kind, ABSENT) for kind in ("Admitted", "PodsReady"))
    if queued_elsewhere(job) and admitted != "True":
        return Reserved()
    if admitted == "False" and (cause == WAITS_FOR_NODES or plan.asks_for_nodes):
        return Reserved()  # Its nodes do not exist yet, or its pods stop.
    if ready == "False" and refusal in REFUSED:
        return Reserved()
    uids = sorted(pod.uid for pod in observed.pods if placed(pod.uid))
    wanted = {item.group: item.replicas for item in observed.sets if item.spec_digest == plan.revision}
    beside = frozenset(pod.node for pod in observed.pods if pod.node and placed(pod.uid) and not pod.deleting)
    state = (job.uid, plan.number, plan.revision, tuple(uids), tuple(sorted(wanted.items())), beside)
    counts = placed_by_group(observed, placed), wanted, created_by_group(observed)
    return Reserved(plan_reservation(plan, job.spec, *counts, beside), state)


def placed_by_group(observed: Observed, placed: Callable[[str], bool]) -> Counter[str]:
    """Return the number of the job's pods that take resources of a node, by the name of their group.

    ``placed``: function that returns True for the uid of such a pod.
    """
    return Counter(pod.group for pod in observed.pods if placed(pod.uid))


def created_by_group(observed: Observed) -> Counter[str]:
    """Return the number of the job's pods that exist and have not ended, by the name of their group.

    Quotas count these pods already.
    """
    return Counter(pod.group for pod in observed.pods if pod.charge is not None)


def plan_reservation(
    plan: PlannedPods,
    spec: Mapping[str, Any],
    placed: Mapping[str, int],
    wanted: Mapping[str, int] | None = None,
    created: Mapping[str, int] | None = None,
    beside: frozenset[str] = frozenset(),
) -> tuple[Reservation, ...]:
    """Return one reservation for each group of a plan with pods that the scheduler has not placed on a node yet.

    ``spec``: spec of the job as the API server stores it. Its ``resources`` take precedence over those of the plan, as
    they do in the pods. ``placed``: number of placed pods by group. ``wanted``: replicas of the plan's StatefulSets by
    group. For a group that it lacks, the plan's number of pods is used. Empty or None: no StatefulSet of the plan
    exists. ``created``: number of existing pods by group, which quotas count already; None: no pod exists.
    ``beside``: names of the nodes with pods of the plan, which get no other one.

    If no StatefulSet of the plan exists and the namespace has quotas, the result also contains a reservation for the
    plan's objects other than pods. They need no node, but quotas count them.
    """
    own = spec.get("resources") or {}
    cpu, memory = own.get("cpu"), own.get("memory")
    found = []
    if not wanted and "" in plan.charges:
        found.append(Reservation("", 0, 0, 0.0, 0, plan.charges[""], 1))
    for group in plan.groups:
        pods = (wanted or {}).get(group.name, group.nodes)
        missing = pods - placed.get(group.name, 0)
        charge = plan.charges.get(group.name)
        if missing > 0:
            found.append(
                Reservation(
                    group.device,
                    missing,
                    group.ranks_per_node,
                    float(amount(str(cpu))) if cpu else group.cpu_m / 1000,
                    int(amount(str(memory))) if memory else group.memory_nbytes,
                    charge,
                    max(0, pods - (created or {}).get(group.name, 0)) if charge is not None else 0,
                    plan.domain,
                    plan.uid,
                    beside,
                )
            )
    return tuple(found)
