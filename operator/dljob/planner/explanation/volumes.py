"""Explain that too few nodes can mount the volumes of a job: which claims limit the nodes, and to which ones."""

from dataclasses import replace

from dljob.cluster import ClusterView
from dljob.planner.candidates.pools import eligible, excluded, wanted
from dljob.planner.types import Infeasible, Request
from dljob.planner.types.storage import VolumeLimit


def too_few_for_volumes(request: Request, view: ClusterView) -> Infeasible | None:
    """Return why too few nodes can mount the job's volumes, even if they are busy; None if enough can.

    Return None also if there would be too few nodes without the volumes, unless none of these can mount them.
    """
    if not request.volumes:
        return None
    free_to_choose = replace(request, volumes=())
    able = [node for node in view.nodes if excluded(node, free_to_choose) is None]
    groups: list[tuple[tuple[str, ...], int]] = [((each.device,), each.nodes) for each in request.fixed]
    for devices, needed in groups or [(request.devices, max(1, request.nodes_min))]:
        nodes = [node for node in able if not devices or wanted(node.device, devices)]
        limits = [each for each in request.volumes if not all(each.nodes.matches(node) for node in nodes)]
        fitting = [node for node in nodes if all(each.nodes.matches(node) for each in limits)]
        if limits and len(fitting) < needed and (len(nodes) >= needed or not fitting):
            return _conflict(request, view, limits, len(nodes), len(fitting), needed)
    return None


def _conflict(
    request: Request, view: ClusterView, limits: list[VolumeLimit], able: int, fit: int, needed: int
) -> Infeasible:
    """Return the error. ``able``: number of nodes that can run the job apart from its volumes. ``fit``: those that
    can mount these too.
    """
    first, *others = limits
    listed = [f"{first.subject}, which needs nodes with {first.nodes}"]
    listed += [f"{each.subject} ({each.field}), which needs nodes with {each.nodes}" for each in others]
    fewer = ""
    if 0 < fit < needed:
        fewer = ", lower the nodes of spec.planning.groups" if request.fixed else ", lower spec.nodes.min"
    other = "claims whose volumes are in one place" if others else "a claim whose volume other nodes can mount"
    return Infeasible(
        "VolumeNodeConflict",
        first.field,
        f"found {', and '.join(listed)}: of the {able} nodes that can run the job otherwise, {fit} match; expected at "
        f"least {needed}. Add nodes that match{fewer}, or use {other}",
        transient=True,
        refusals=eligible(request, view).refusals,
    )
