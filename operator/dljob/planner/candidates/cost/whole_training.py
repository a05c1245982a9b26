"""Predictions of whole trainings: what a training takes beside its steps and evaluations."""

from collections.abc import Sequence

from dljob.perf.workload.workload import Workload
from dljob.planner.candidates.cost.data_fetch import Nodes, refetch_s, with_fetch
from dljob.planner.candidates.cost.interrupted import interrupted
from dljob.planner.types import Prediction, Request


def whole_training(
    found: Prediction, request: Request, workload: Workload, groups: Sequence[Nodes], part: float, writers: int = 1
) -> Prediction:
    """Add to ``found``, the prediction of all steps and evaluations of a plan, what else its training takes.

    Before the first step, the nodes fetch their data. Ranks write checkpoints. Interruptions of nodes cause restarts,
    in which a new node fetches its data.

    ``groups``: the nodes of the plan. ``part``: the largest part of the global batch that the ranks of a node compute.
    ``writers``: number of ranks that each write a part of a checkpoint.
    """
    nodes = sum(group.count for group in groups)
    calm = interrupted(found, request, workload, nodes, writers, refetch_s(request, groups, part))
    return with_fetch(calm, request, groups, part)
