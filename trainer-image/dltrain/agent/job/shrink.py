"""A plan for the pods that are left, when others were lost and the job is elastic. Pure."""

from collections.abc import Collection

from dlcontract import Plan, Role
from dltrain.batch.shares import apportion


def shrink_plan(plan: Plan, pods: Collection[str]) -> Plan | None:
    """The plan on ``pods`` alone: their ranks numbered anew, the batch among them in proportion to their shares.

    None where the job cannot do with them: too few ranks, a parameter server (whose slices are laid out for the
    plan's ranks), parts of the model on each, or a program that is not ours and may not resume with fewer.
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
