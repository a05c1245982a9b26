"""Shrink the plan of an elastic job to the remaining pods. No I/O."""

from collections.abc import Collection

from dlcontract import Plan, Role
from dltrain.batch.shares import apportion


def shrink_plan(plan: Plan, pods: Collection[str]) -> Plan | None:
    """Return ``plan`` with only the ranks in ``pods``, numbered from 0 again, or None if the job cannot shrink.

    If ``pods`` contains all pods of the plan, return ``plan`` unchanged. Otherwise, the remaining ranks divide the
    global batch in proportion to their local batch sizes. The job cannot shrink with too few ranks; with a parameter
    server, whose slices are laid out for the plan's ranks; with model parallelism; or with a script for torchrun or an
    MPI program, which may not support resuming with fewer ranks.
    """
    ranks = [rank for rank in plan.ranks if rank.pod in pods]
    if len(ranks) == len(plan.ranks):
        return plan
    servers = any(rank.role is Role.SERVER for rank in plan.ranks)
    if len(ranks) < plan.min_ranks or servers or plan.splits_model or plan.model.framework != "DLTrain":
        return None
    shares = apportion(plan.global_batch, [rank.share for rank in ranks])
    placed = tuple(
        rank.model_copy(update={"rank": number, "share": share})
        for number, (rank, share) in enumerate(zip(ranks, shares, strict=True))
    )
    return plan.model_copy(update={"ranks": placed})
