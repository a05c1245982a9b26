"""Select a rank's samples by a pure function of (seed, step, local batch sizes), so that loaders have no state.

Property tests verify two laws. The steps of an epoch use every sample once. For any local batch sizes (shares), the
ranks' parts of a step are disjoint and together form the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlcontract import Plan
from dltrain.batch.shares import apportion


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """Return the indices of all samples in the order of an epoch, with shape (samples,).

    The samples are sorted by random numbers: the raw output of the Philox generator with the key (seed, epoch).
    ``Generator.permutation`` is not used, because its results may change between numpy releases.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(samples)
    return np.argsort(keys, kind="stable")


@dataclass(frozen=True)
class Part:
    """The part of a step's batch that one rank computes."""

    epoch: int
    indices: NDArray[np.int64]
    """Indices of the samples in the dataset.

    A worker, a rank that computes gradients, has at least one sample, which has ``weight`` 0 if the batch is too short.
    """
    weight: float
    """Weight of the mean gradient over ``indices`` in the all-reduce: this rank's samples divided by ``batch``."""
    batch: int
    """Global batch size of the step."""
    last: bool
    """True if the step is the last of its epoch."""
    draws: NDArray[np.int64] | None = None
    """The number in the epoch of each sample, if an epoch may contain a sample several times; otherwise None."""

    def slice(self, begin: int, end: int, **changes: Any) -> "Part":
        """Return the part with the samples from ``begin`` up to ``end``, and with other ``changes``."""
        draws = None if self.draws is None else self.draws[begin:end]
        return replace(self, indices=self.indices[begin:end], draws=draws, **changes)


@dataclass(frozen=True)
class Sampler:
    """Split ``samples`` samples into batches of ``batch`` samples. The last batch of an epoch holds the remainder.

    With ``drop_last``, an epoch leaves out the remainder. The order of the samples differs in each epoch, so each
    epoch leaves out different samples.
    """

    samples: int
    batch: int
    seed: int
    drop_last: bool = False

    @classmethod
    def planned(cls, plan: Plan, samples: int, *, drop_last: bool = False) -> "Sampler":
        """Create the sampler for a dataset of ``samples`` samples, with the plan's global batch size and seed.

        If the plan's batch is larger than the dataset, a batch is the whole dataset. ``drop_last``: True to leave out
        the samples at the end of an epoch that do not fill a batch.
        """
        return cls(samples, min(plan.global_batch, samples), plan.seed, drop_last)

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    def steps(self, plan: Plan) -> int:
        """Return the number of steps of the whole training.

        This is the plan's number of steps or, if the plan contains epochs instead, their number times the steps per
        epoch.
        """
        return plan.steps or (plan.epochs or 0) * self.steps_per_epoch

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the indices of an epoch's samples in their order."""
        return permutation(self.seed, epoch, self.samples)

    def batch_of(self, epoch: int, index: int) -> NDArray[np.int64]:
        """Return the samples of batch ``index`` of an epoch."""
        return self.order(epoch)[index * self.batch : (index + 1) * self.batch]

    def part(self, step: int, shares: Sequence[int], rank: int) -> Part:
        """Return the samples that ``rank`` computes in ``step``, counted from 0 across epochs.

        ``shares``: the local batch sizes of all ranks. A rank with share 0 gets no sample. If the batch is too short to
        give every other rank a sample, a rank that would have none gets the first sample of the batch with weight 0.
        Every rank that computes gradients therefore runs the same code in every step.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        batch = self.batch_of(epoch, index)
        parts = apportion(len(batch), shares)
        begin = sum(parts[:rank])
        mine = batch[begin : begin + parts[rank]]
        if not len(mine) and shares[rank]:
            mine = batch[:1]
        return Part(epoch, mine, parts[rank] / len(batch), len(batch), index == self.steps_per_epoch - 1)


def once_together(samples: int, largest: Sequence[int], rank: int) -> list[Part]:
    """Return the batches of ``rank`` as ``once`` does, but equally many on all ranks.

    ``largest``: the maximum number of samples in a batch of each rank. It is exceeded if batches of one sample were too
    many. Raise ValueError if there are fewer samples than ranks.
    """
    if samples < len(largest):
        raise ValueError(f"found {samples} samples for {len(largest)} ranks; expected at least one for each rank")
    sizes = [max(1, size) for size in largest]
    while (count := -(-samples // sum(sizes))) * len(sizes) > samples:
        sizes = [size + 1 for size in sizes]
    # Each of the ``count`` batches of a rank has a sample. The others are divided in proportion to what still fits.
    rest = samples - count * len(sizes)
    parts = [count + more for more in apportion(rest, [size - 1 for size in sizes])] if rest else [count] * len(sizes)
    mine = np.arange(sum(parts[:rank]), sum(parts[: rank + 1]))
    return [
        Part(0, batch, 1.0, len(batch), number == count - 1) for number, batch in enumerate(np.array_split(mine, count))
    ]


def once(samples: int, shares: Sequence[int], rank: int, largest: int | None = None) -> list[Part]:
    """Return the batches of ``rank`` when all ranks together go through all samples once, as for an evaluation.

    The ranks divide the samples, in their order in the dataset, in proportion to ``shares``, the local batch sizes. A
    batch has at most ``largest`` samples (default: ``shares[rank]``). The list is empty if the rank gets no samples.
    """
    parts, size = apportion(samples, shares), max(1, shares[rank] if largest is None else largest)
    mine = np.arange(sum(parts[:rank]), sum(parts[: rank + 1]))
    batches = [mine[begin : begin + size] for begin in range(0, len(mine), size)]
    return [Part(0, batch, 1.0, len(batch), batch is batches[-1]) for batch in batches]
