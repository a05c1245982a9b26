"""Nodes that plans leave out: name those with repeated faults where a job waits, and keep pods off left-out nodes."""

from collections.abc import Sequence
from dataclasses import replace

from dljob.cluster import ClusterView
from dljob.cluster.domains import Domain, Requirement
from dljob.cluster.platforms import ARCHITECTURE_LABEL, OS, OS_LABEL
from dljob.job.plan.node_terms import MAX_TERMS
from dljob.job.plan.stored import MAX_AVOIDED
from dljob.planner import Decision, Infeasible, Request, VolumeLimit
from dljob.planner.plan import plan
from dljob.reconcile.parsed import ParsedJob

MAX_NAMED = 5
"""Maximum number of nodes that the message about left-out nodes names."""


def named(parsed: ParsedJob, request: Request, view: ClusterView, found: Infeasible) -> Infeasible:
    """Return an error that names the left-out nodes, if a plan would be possible with these nodes; otherwise ``found``.

    Left-out nodes are nodes with repeated faults, which plans must not use. The job does not use them even if it must
    wait, because another failure there could end the job. ``view``: the cluster, including these nodes. ``found``:
    the error without them.
    """
    devices = {node.name: node.device for node in view.nodes}
    left_out = [item for name, item in sorted(parsed.observed.left_out.items()) if name in devices]
    if not left_out or isinstance(plan(request, view, parsed.observed.learned), Infeasible):
        return found
    listed = ", ".join(map(str, left_out[:MAX_NAMED])) + (
        f" and {len(left_out) - MAX_NAMED} more" if len(left_out) > MAX_NAMED else ""
    )
    text = (
        f"found nodes that are left out of plans because of repeated faults: {listed}; expected enough other nodes: "
        "wait until plans may use these nodes again, repair them, add nodes or lower spec.nodes.min. An "
        f"administrator can let plans use a node at once: kubectl annotate node {left_out[0].node} "
        f"dljob.dev/ignore-faults=true ({found.field}: {found.message})"
    )
    return Infeasible("NodesLeftOut", "spec.nodes", text, transient=True, refusals=found.refusals)


def avoided(parsed: ParsedJob, decision: Decision) -> tuple[str, ...] | None:
    """Return the names of the nodes that the pods must avoid; None if there is no such node.

    These are the nodes with repeated faults (``Observed.left_out``) that have a device type of the plan.
    """
    assert parsed.observed.view is not None
    devices = {group.device for group in decision.chosen.groups}
    left_out = parsed.observed.left_out
    found = [node.name for node in parsed.observed.view.nodes if node.name in left_out and node.device in devices]
    return tuple(sorted(found)[:MAX_AVOIDED]) or None


def reachable(decision: Decision, view: ClusterView, volumes: Sequence[VolumeLimit] = ()) -> Domain:
    """Return the domain of a plan without nodes on which no pod of a job can run (``Node.wrong_platform``).

    The scheduler does not know which nodes a plan has counted, and pods for CPUs would fit on a node with Windows. The
    domain is narrowed only if ``view`` has such a node of a device type of the plan.

    It is also narrowed to the nodes that can mount ``volumes``, if others have a device type of the plan. The scheduler
    places the pods there anyway. Until it has, the plan reserves nodes in its domain, and not the others.
    """
    devices = {group.device for group in decision.chosen.groups}
    wrong = [node.labels for node in view.nodes if node.wrong_platform and node.device in devices]
    systems = {labels[OS_LABEL] for labels in wrong if labels.get(OS_LABEL, OS) != OS}
    others = {labels[ARCHITECTURE_LABEL] for labels in wrong if labels.get(OS_LABEL, OS) == OS}
    unwanted = [
        Requirement(key, "NotIn", tuple(sorted(values)))
        for key, values in ((OS_LABEL, systems), (ARCHITECTURE_LABEL, others))
        if values
    ]
    domain = decision.domain.narrowed("", *unwanted) if unwanted else decision.domain
    for nodes in dict.fromkeys(each.nodes for each in volumes):
        if all(nodes.matches(node) for node in view.nodes if node.device in devices):
            continue
        terms = [
            tuple(dict.fromkeys((*mine, *theirs)))
            for mine in domain.terms or ((),)
            for theirs in nodes.requirements() or ()
        ]
        if 0 < len(terms) <= MAX_TERMS:
            domain = replace(domain, terms=tuple(terms))
    return domain
