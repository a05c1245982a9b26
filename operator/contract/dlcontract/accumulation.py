"""The division of a batch into micro-batches, and among replicas of a model. Operator and trainer both use it.

The planner chooses the number of micro-batches (``planner.candidates.accumulation``). It rises where local batch sizes
have grown, such as after a loss of ranks.
"""

from collections.abc import Sequence

MICRO_BATCH_GROWTH = 1.25
"""Factor by which a rank's micro-batch may exceed its planned size, before a step gets more micro-batches.

Rebalancing changes local batch sizes by some per cent, which the margin of the predicted memory covers. The loss of
ranks changes them by more."""


def micro_batches_of(planned: int, planned_shares: Sequence[int], shares: Sequence[int]) -> int:
    """Return the number of micro-batches of each step with the local batch sizes ``shares``.

    ``planned``: number of micro-batches in the plan, for its local batch sizes ``planned_shares``. The result is at
    least ``planned``. It is larger if local batch sizes have grown, such as after a loss of ranks, so that no rank's
    micro-batch exceeds its planned size by more than the factor ``MICRO_BATCH_GROWTH``. Without gradient accumulation
    (``planned`` is 1), the result is 1.
    """
    if planned == 1:
        return 1
    limits = [int(MICRO_BATCH_GROWTH * -(-share // planned)) for share in planned_shares]
    needed = [-(-share // limit) for share, limit in zip(shares, limits, strict=True) if limit]
    return max(planned, *needed)


def replica_batches(global_batch: int, replicas: int) -> tuple[int, ...]:
    """Return each replica's part of a global batch. The parts differ by at most one sample, the larger ones first."""
    each, more = divmod(global_batch, replicas)
    return (each + 1,) * more + (each,) * (replicas - more)
