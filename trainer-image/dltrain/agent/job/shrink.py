"""Shrink the plan of an elastic job to the remaining pods, for the next attempt of the ranks. No I/O."""

from collections.abc import Collection

from dlcontract import Plan, Role, micro_batches_of
from dltrain.batch.shares import apportion


def shrink_plan(plan: Plan, pods: Collection[str]) -> Plan | None:
    """Return ``plan`` with only the ranks in ``pods``, renumbered from 0, or None if the job cannot shrink.

    If ``pods`` contains all pods of the plan, return ``plan`` unchanged. Otherwise, the remaining ranks divide the
    global batch in proportion to their local batch sizes. With gradient accumulation, they get more micro-batches, so
    that these do not grow.

    A job cannot shrink below ``plan.min_ranks`` ranks. It cannot shrink at all with model parallelism or with a
    parameter server, which stores the parameters in slices for the plan's ranks. The same holds for an MPI program, and
    for a script for torchrun that is not elastic, which may not support resuming with fewer ranks.

    An elastic script needs more than half of the plan's pods, or half of them with the first pod. In a network
    partition, at most one side then starts the script, whose checkpoints have no term that would exclude the other.
    """
    ranks = [rank for rank in plan.ranks if rank.pod in pods]
    if len(ranks) == len(plan.ranks):
        return plan
    servers = any(rank.role is Role.SERVER for rank in plan.ranks)
    if len(ranks) < plan.min_ranks or servers or plan.splits_model or not plan.model.may_shrink:
        return None
    if plan.model.elastic and not _is_larger_part(plan, pods):
        return None
    batch = plan.global_batch if plan.batch_known else len(ranks)
    shares = apportion(batch, [rank.share for rank in ranks])
    placed = tuple(
        rank.model_copy(update={"rank": number, "share": share})
        for number, (rank, share) in enumerate(zip(ranks, shares, strict=True))
    )
    before = [rank.share for rank in ranks]
    micro_batches = min(micro_batches_of(plan.micro_batches, before, shares), plan.global_batch)
    return plan.model_copy(update={"ranks": placed, "global_batch": batch, "micro_batches": micro_batches})


def _is_larger_part(plan: Plan, pods: Collection[str]) -> bool:
    """Return True if ``pods`` contains more than half of the plan's pods, or half of them with the first pod."""
    twice, count = 2 * sum(pod in pods for pod in plan.pods), len(plan.pods)
    return twice > count or (twice == count and plan.pods[0] in pods)
