"""Scaling curve of a job: the best plan for each number of nodes."""

from collections.abc import Mapping
from dataclasses import replace

from dljob.calibrate.learned import Learned
from dljob.cluster import ClusterView
from dljob.planner.candidates.pools import eligible
from dljob.planner.plan import plan
from dljob.planner.search.enumeration import grid
from dljob.planner.types import Choice, Decision, Request


def scaling(
    request: Request, view: ClusterView, learned: Mapping[tuple[str, str], Learned]
) -> list[tuple[int, Choice]]:
    """Return (number of nodes, best candidate with exactly so many nodes) for several numbers of nodes.

    The numbers are 1, 2, 3, 4, 6, 8, 12, … up to the number of nodes that the job can use, but at most one node per
    sample. ``learned``: measured constants by (model or training script, device). Skip numbers without a plan. Return
    an empty list for a job whose times cannot be predicted (a field is in ``request.missing``). Ignore the deadline and
    the groups that the user fixes.
    """
    if request.missing:
        return []
    available = sum(pool.nodes for pool in eligible(request, view).pools)
    points = []
    for nodes in grid(min(available, request.global_batch)) if available else []:
        asked = replace(request, nodes_min=nodes, nodes_max=nodes, fixed=(), deadline_s=None, asks_unsupported=False)
        found = plan(asked, view, learned)
        if isinstance(found, Decision):
            points.append((nodes, found.chosen))
    return points
