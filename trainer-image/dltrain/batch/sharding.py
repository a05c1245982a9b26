"""Sharded sampling: each step takes one sample of each shard, and each node needs the data of its own shards only.

A shard is a contiguous range of training samples. There are as many shards as samples in a global batch. The samples of
a step are a pure function of seed and step, like those of ``Sampler``. They do not depend on the owners of the shards,
so shards may move between nodes at any step. Design note 0035 gives the reasons.

Property tests verify these laws: the steps of an epoch use every sample once; the batch of a step does not depend on
the split; a rank draws from its own shards only; after a change of local batch sizes, as few shards as possible move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dlcontract import Plan
from dltrain.batch.sampling import Part, Sampler
from dltrain.batch.shares import apportion

Shards = tuple[int, ...]
"""Numbers of shards, in increasing order."""


def begin_of(shard: int, shards: int, samples: int) -> int:
    """Return the number of the first sample of ``shard``. Shard ``shards`` would begin after the last sample."""
    return shard * samples // shards


def shard_of(indices: NDArray[np.int64], shards: int, samples: int) -> NDArray[np.int64]:
    """Return the shard of each sample. ``indices``: numbers of samples."""
    return ((indices + 1) * shards - 1) // samples


def assign(counts: Sequence[int], held: Sequence[Sequence[int]]) -> tuple[Shards, ...]:
    """Assign shards to nodes so that as few as possible move. Return the shards of each node.

    ``counts``: the number of shards of each node. Their sum is the number of all shards. ``held``: the shards whose
    data a node has already. If several nodes have the data of a shard, the shard goes to the one of them that lacks
    most shards. Shards that no node with room has are dealt out in their order.
    """
    total = sum(counts)
    holders: dict[int, list[int]] = {}
    for node, shards in enumerate(held):
        for shard in shards:
            if shard < total:
                holders.setdefault(shard, []).append(node)
    found: list[list[int]] = [[] for _ in counts]
    # A shard that only one node has cannot stay anywhere else, so it comes first.
    for shard in sorted(holders, key=lambda shard: (len(holders[shard]), shard)):
        free = [node for node in holders[shard] if len(found[node]) < counts[node]]
        if free:
            found[min(free, key=lambda node: (len(found[node]) - counts[node], node))].append(shard)
    owned = {shard for shards in found for shard in shards}
    rest = iter([shard for shard in range(total) if shard not in owned])
    for node, count in enumerate(counts):
        found[node] += [next(rest) for _ in range(count - len(found[node]))]
    return tuple(tuple(sorted(shards)) for shards in found)


def nodes_of(plan: Plan) -> tuple[int, ...]:
    """Return the number of the pod of each rank, because the ranks of a pod share their data."""
    numbers = {pod: number for number, pod in enumerate(plan.pods)}
    return tuple(numbers[rank.pod] for rank in plan.ranks)


@dataclass(frozen=True)
class ShardedSampler(Sampler):
    """Split a dataset into batches with one sample of each shard.

    ``nodes``: the number of each rank's node. ``home``: the shards of each node from the start of this process on,
    which a node keeps if local batch sizes change.
    """

    nodes: tuple[int, ...] = (0,)
    home: tuple[Shards, ...] = ()

    @classmethod
    def sharded(
        cls, plan: Plan, samples: int, held: Mapping[int, Sequence[int]] | None = None, *, drop_last: bool = False
    ) -> "ShardedSampler":
        """Create the sampler of a plan for a dataset of ``samples`` samples.

        ``held``: node → the shards whose data the node has; equal on all ranks. ``drop_last``: True to leave out the
        samples at the end of an epoch that do not fill a batch.
        """
        nodes, batch = nodes_of(plan), min(plan.global_batch, samples)
        counts = _of_nodes(apportion(batch, [rank.share for rank in plan.ranks]), nodes)
        home = assign(counts, [(held or {}).get(node, ()) for node in range(len(counts))])
        return cls(samples, batch, plan.seed, drop_last, nodes, home)

    def owned(self, shares: Sequence[int]) -> tuple[Shards, ...]:
        """Return the shards of each rank. ``shares``: the local batch sizes of all ranks."""
        return _owned(self, tuple(shares))

    def owned_by_node(self, shares: Sequence[int], node: int) -> Shards:
        """Return the shards of all ranks on ``node``. ``shares``: the local batch sizes of all ranks."""
        owned = self.owned(shares)
        return tuple(sorted(shard for rank, at in enumerate(self.nodes) if at == node for shard in owned[rank]))

    def part(self, step: int, shares: Sequence[int], rank: int) -> Part:
        """Return the samples that ``rank`` computes in ``step``: one of each of its shards.

        In the last step of an epoch, some shards may have no sample left. If none of the rank's shards has, the rank
        gets a sample with weight 0, as with ``Sampler``. A rank with share 0 gets no sample.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        last = index == self.steps_per_epoch - 1
        batch = min(self.batch, self.samples - index * self.batch)
        if not shares[rank]:
            return Part(epoch, np.empty(0, np.int64), 0.0, batch, last)
        order = _order(self, tuple(shares), rank, epoch)
        mine = order[index][order[index] >= 0]
        weight = len(mine) / batch
        if not len(mine):
            mine = order[0][:1]
        return Part(epoch, mine, weight, batch, last)


def _of_nodes(counts: Sequence[int], nodes: Sequence[int]) -> list[int]:
    return [sum(count for count, at in zip(counts, nodes, strict=True) if at == node) for node in range(max(nodes) + 1)]


@lru_cache(maxsize=8)
def _owned(sampler: ShardedSampler, shares: tuple[int, ...]) -> tuple[Shards, ...]:
    counts = apportion(sampler.batch, shares)
    by_node = assign(_of_nodes(counts, sampler.nodes), sampler.home)
    taken = [0] * len(by_node)
    found: list[Shards] = []
    for count, node in zip(counts, sampler.nodes, strict=True):
        found.append(by_node[node][taken[node] : taken[node] + count])
        taken[node] += count
    return tuple(found)


@lru_cache(maxsize=4)
def _order(sampler: ShardedSampler, shares: tuple[int, ...], rank: int, epoch: int) -> NDArray[np.int64]:
    """Return the samples that ``rank`` draws in each step of an epoch, with shape (steps, shards of the rank).

    It is -1 where a shard has no sample left. The order within a shard is that of random numbers: the raw output of the
    Philox generator with the key (seed, epoch) and a counter that begins at the number of the shard.
    """
    shards = sampler.owned(shares)[rank]
    found = np.full((-(-sampler.samples // sampler.batch), len(shards)), -1, np.int64)
    key = np.array([sampler.seed, epoch], dtype=np.uint64)
    for column, shard in enumerate(shards):
        begin, end = (begin_of(each, sampler.batch, sampler.samples) for each in (shard, shard + 1))
        numbers = np.random.Philox(key=key, counter=np.array([0, 0, 0, shard], np.uint64)).random_raw(end - begin)
        found[: end - begin, column] = begin + np.argsort(numbers, kind="stable")
    return found
