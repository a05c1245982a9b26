"""Plans on nodes that do not exist yet: the pods stay pending, so that an autoscaler of the cluster adds the nodes."""

from collections.abc import Collection, Mapping

from dljob.cluster import ClusterView
from dljob.cluster.templates import NodeTemplates
from dljob.planner import Decision, Infeasible, Learned, Request
from dljob.planner.plan import plan


def plan_on_new_nodes(
    request: Request,
    existing: ClusterView,
    learned: Mapping[tuple[str, str], Learned],
    templates: NodeTemplates,
    not_provided: Collection[str] = (),
) -> tuple[Decision, ClusterView] | None:
    """Plan a job on the existing nodes together with all nodes that an autoscaler can add (``templates``).

    Call it for a job that the existing nodes cannot run. Return the plan, and a view of all these nodes. Return None if
    the job cannot run on them either, or if the autoscaler can add no node. ``learned``: measured constants by (model
    key, device type). ``not_provided``: device types of new nodes that the autoscaler did not provide for the last
    plan. The plan uses new nodes of these types only if no other plan is possible.
    """
    if not_provided and (found := plan_on_new_nodes(request, existing, learned, templates.without(not_provided))):
        return found
    view = templates.scaled_up(existing)
    if view is existing:
        return None
    decision = plan(request, view, learned)
    return None if isinstance(decision, Infeasible) else (decision, view)


def missing_nodes(request: Request, decision: Decision, existing: ClusterView) -> int:
    """Return the number of the plan's pods for which ``existing`` has no node with enough free resources; at least 1.

    An autoscaler must add this number of nodes, because each node runs at most one pod of a job.
    """
    missing = 0
    for group, planned_nbytes in zip(decision.chosen.groups, decision.chosen.pods_nbytes, strict=True):
        fits = [
            node
            for node in existing.nodes
            if node.device == group.device
            and node.left_out is None
            and node.free_devices >= group.ranks_per_node
            and node.free_cpu > 0.99 * (request.cpu_per_pod or group.cpu_per_pod)
            and node.free_memory_nbytes >= (request.memory_per_pod_nbytes or planned_nbytes)
        ]
        missing += max(0, group.nodes - len(fits))
    return max(1, missing)


def waiting_text(new_nodes: int, *, asks: bool = False) -> str:
    """Return the text with which the job's condition Planned says that pods wait for an autoscaler.

    ``new_nodes``: number of pods that need nodes that do not exist yet. ``asks``: True if a ProvisioningRequest asks
    the autoscaler for the nodes, before the pods exist.
    """
    pods = "1 pod needs a node that does" if new_nodes == 1 else f"{new_nodes} pods need nodes that do"
    if asks:
        return (
            f"{pods} not exist yet; a ProvisioningRequest asks an autoscaler for them, and the pods start when it is "
            "provisioned, or the job is planned again after the start time-out (spec.scheduling.startTimeout)"
        )
    return (
        f"{pods} not exist yet; pending pods wait until an autoscaler adds nodes, at most for the start time-out "
        "(spec.scheduling.startTimeout)"
    )
