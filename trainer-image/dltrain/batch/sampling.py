"""Which samples a rank computes at a step: a pure function of (seed, step, shares), so that no loader has state.

Laws, held by property tests: an epoch's steps take every sample once;
ranks' parts of a step are disjoint and make up the batch, for any shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dlcontract import Plan
from dltrain.batch.shares import apportion


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """The order of an epoch: samples sorted by a Philox stream keyed with (seed, epoch).

    Raw counter output instead of ``Generator.permutation``, whose stream may change between numpy releases.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(samples)
    return np.argsort(keys, kind="stable")


@dataclass(frozen=True)
class Part:
    """A rank's part of a step's batch."""

    epoch: int
    indices: NDArray[np.int64]
    """Samples to compute, at least one for a worker."""
    weight: float
    """Factor of the mean gradient over ``indices`` in the sum over ranks: samples counted here by the batch's."""
    batch: int
    """Samples of the step over all ranks."""
    last: bool
    """Whether the step ends its epoch."""


@dataclass(frozen=True)
class Sampler:
    """Batches of ``batch`` samples out of ``samples``; the last of an epoch holds what is left."""

    samples: int
    batch: int
    seed: int

    @classmethod
    def planned(cls, plan: Plan, samples: int) -> "Sampler":
        """For a dataset of so many samples, of which a batch takes all where they are fewer than it."""
        return cls(samples, min(plan.global_batch, samples), plan.seed)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch)

    def steps(self, plan: Plan) -> int:
        """Of the whole training."""
        return plan.steps or (plan.epochs or 0) * self.steps_per_epoch

    def part(self, step: int, shares: Sequence[int], rank: int) -> Part:
        """``rank``'s part of ``step`` (from 0, over epochs) when ranks hold ``shares`` of a full batch.

        A worker left without a sample in a short batch gets the batch's first one with weight 0, so that every
        worker runs the same code in every step. A rank with share 0 gets no sample.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        batch = permutation(self.seed, epoch, self.samples)[index * self.batch : (index + 1) * self.batch]
        parts = apportion(len(batch), shares)
        begin = sum(parts[:rank])
        mine = batch[begin : begin + parts[rank]]
        if not len(mine) and shares[rank]:
            mine = batch[:1]
        return Part(epoch, mine, parts[rank] / len(batch), len(batch), index == self.steps_per_epoch - 1)


def once(samples: int, shares: Sequence[int], rank: int) -> list[Part]:
    """``rank``'s part of all samples, in order, in batches of its share: every sample is in one rank's, once."""
    parts, size = apportion(samples, shares), max(1, shares[rank])
    mine = np.arange(sum(parts[:rank]), sum(parts[: rank + 1]))
    batches = [mine[begin : begin + size] for begin in range(0, len(mine), size)]
    return [Part(0, batch, 1.0, len(batch), batch is batches[-1]) for batch in batches]
