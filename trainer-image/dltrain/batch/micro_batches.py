"""Divide a rank's part of a batch into micro-batches, whose gradients are accumulated.

All ranks have equally many micro-batches in a step, so that layers and losses that communicate (SyncBatchNorm,
``t.gather``) communicate equally often. The number follows from the plan, the local batch sizes and the size of the
step's batch, so ranks need not agree on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dlcontract import Plan, micro_batches_of
from dltrain.batch.sampling import Part
from dltrain.batch.shares import apportion


def divide(part: Part, count: int) -> list[Part]:
    """Divide a rank's part of a batch into ``count`` micro-batches, the larger ones first.

    Their sizes differ by at most one sample, and their weights sum to the weight of ``part``. If there are fewer
    samples than micro-batches, the remaining micro-batches contain the part's first sample, with weight 0. Only the
    last micro-batch can be the last of its epoch.
    """
    if count == 1:
        return [part]
    total, begin, found = len(part.indices), 0, []
    for number in range(count):
        size = total // count + (number < total % count)
        weight, last = part.weight * size / total if total else 0.0, part.last and number == count - 1
        chosen = (begin, begin + size) if size else (0, 1)
        found.append(part.slice(*chosen, weight=weight, last=last))
        begin += size
    return found


@dataclass(frozen=True)
class MicroBatches:
    """The numbers of micro-batches of a training's steps.

    ``accumulates``: False if the script takes each step's batch as a whole.
    """

    plan: Plan
    accumulates: bool = True

    def most(self, shares: Sequence[int]) -> int:
        """Return the number of micro-batches of a step with a complete batch. ``shares``: the local batch sizes."""
        if not self.accumulates or self.plan.splits_model:
            return 1  # a pipeline divides batches itself
        return micro_batches_of(self.plan.micro_batches, [rank.share for rank in self.plan.ranks], shares)

    def largest(self, shares: Sequence[int], rank: int) -> int:
        """Return the number of samples in the largest micro-batch of ``rank``; 0 for a parameter server.

        ``shares``: local batch sizes.
        """
        return -(-shares[rank] // self.most(shares))

    def count(self, shares: Sequence[int], samples: int) -> int:
        """Return the number of micro-batches of a step with ``samples`` samples over all ranks.

        The last step of an epoch may have fewer samples, and then has only as many micro-batches as it needs for
        micro-batches of the usual size. With a sharded dataset, it has as many as any step: the samples that are left
        are not in proportion to ``shares``.
        """
        most = self.most(shares)
        if most == 1 or samples >= sum(shares) or self.plan.dataset.sharded:
            return most
        sizes = apportion(samples, shares)
        return min(most, max(-(-size // -(-share // most)) for size, share in zip(sizes, shares, strict=True) if share))

    def of_step(self, part: Part, shares: Sequence[int]) -> list[Part]:
        """Return the micro-batches of ``part``, this rank's part of a step's batch. ``shares``: local batch sizes."""
        return divide(part, self.count(shares, part.batch))
