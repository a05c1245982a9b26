"""Laws of sharded sampling: each sample once per epoch, batches that no split changes, and as little movement as possible."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dltrain.batch.sampling import Sampler
from dltrain.batch.sharding import ShardedSampler, assign, begin_of, shard_of
from dltrain.batch.shares import apportion
from support.trainer.plans import make_plan

SHARES = st.lists(st.integers(1, 20), min_size=1, max_size=5)
CHANGED = st.lists(st.integers(0, 20), min_size=5, max_size=5).filter(any)


def sampler_of(samples: int, shares: list[int], *, ranks_per_node: int = 1, seed: int = 3) -> ShardedSampler:
    plan = make_plan(shares=tuple(shares), global_batch=sum(shares), seed=seed)
    ranks = tuple(r.model_copy(update={"pod": f"pod-{r.rank // ranks_per_node}"}) for r in plan.ranks)
    return ShardedSampler.sharded(plan.model_copy(update={"ranks": ranks}), samples)


@given(samples=st.integers(1, 500), data=st.data())
def test_shards_are_equal_contiguous_ranges(samples: int, data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, samples))
    edges = [begin_of(shard, shards, samples) for shard in range(shards + 1)]
    assert edges[0] == 0 and edges[-1] == samples
    assert {b - a for a, b in pairwise(edges)} <= {samples // shards, -(-samples // shards)}
    found = shard_of(np.arange(samples), shards, samples)
    assert [int(shard) for shard in found] == [s for s in range(shards) for _ in range(edges[s], edges[s + 1])]


@given(samples=st.integers(5, 300), shares=SHARES, per_node=st.integers(1, 3), epoch=st.integers(0, 2))
def test_epoch_contains_every_sample_once(samples: int, shares: list[int], per_node: int, epoch: int) -> None:
    sampler = sampler_of(samples, shares, ranks_per_node=per_node)
    full = Sampler(samples, sampler.batch, 3)
    assert sampler.steps_per_epoch == full.steps_per_epoch
    seen: list[int] = []
    for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch):
        parts = [sampler.part(step, shares, rank) for rank in range(len(shares))]
        assert {(part.epoch, part.last, part.batch) for part in parts} == {
            (epoch, full.part(step, [1], 0).last, full.part(step, [1], 0).batch)
        }
        assert abs(sum(part.weight for part in parts) - 1) < 1e-9
        for rank, part in enumerate(parts):
            own = set(sampler.owned(shares)[rank])
            assert set(shard_of(part.indices, sampler.batch, samples).tolist()) <= own, "only its own shards"
            if part.weight:
                assert round(part.weight * part.batch) == len(part.indices)
                seen += part.indices.tolist()
    assert sorted(seen) == list(range(samples))


@given(samples=st.integers(5, 300), a=SHARES, changes=CHANGED, step=st.integers(0, 99))
def test_batch_does_not_depend_on_the_split(samples: int, a: list[int], changes: list[int], step: int) -> None:
    sampler, b = sampler_of(samples, a), (changes[: len(a)] if any(changes[: len(a)]) else a)

    def of_step(shares: list[int]) -> list[int]:
        parts = [sampler.part(step, shares, rank) for rank in range(len(shares))]
        return sorted(int(i) for part in parts if part.weight for i in part.indices)

    assert of_step(a) == of_step(b)
    other = sampler_of(samples, [sum(a)])
    assert of_step(a) == sorted(other.part(step, [sum(a)], 0).indices.tolist()), "nor on the number of nodes"


@given(shares=SHARES, changes=CHANGED, per_node=st.integers(1, 3))
def test_change_moves_only_the_surplus(shares: list[int], changes: list[int], per_node: int) -> None:
    sampler = sampler_of(400, shares, ranks_per_node=per_node)
    now = changes[: len(shares)] if any(changes[: len(shares)]) else shares
    counts = apportion(sampler.batch, now)
    for node, had in enumerate(sampler.home):
        wanted = sum(count for count, at in zip(counts, sampler.nodes, strict=True) if at == node)
        has = sampler.owned_by_node(now, node)
        assert len(has) == wanted
        assert len(set(has) - set(had)) == max(0, wanted - len(had)), "it fetches what it lacks, and nothing else"
    assert sorted(shard for shards in sampler.owned(now) for shard in shards) == list(range(sampler.batch))


@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any), data=st.data())
def test_assignment_keeps_what_nodes_have(counts: list[int], data: st.DataObject) -> None:
    total = sum(counts)
    holder = data.draw(st.lists(st.integers(-1, len(counts) - 1), min_size=total, max_size=total))
    held = [[shard for shard in range(total) if holder[shard] == node] for node in range(len(counts))]
    found = assign(counts, held)
    assert sorted(shard for shards in found for shard in shards) == list(range(total))
    assert [len(shards) for shards in found] == counts
    for shards, before in zip(found, held, strict=True):
        assert len(set(shards) & set(before)) == min(len(shards), len(before))


def test_data_that_two_nodes_have_stays_with_one_of_them() -> None:
    assert assign([2, 2], [[0, 1, 2, 3], [0, 1]]) == ((2, 3), (0, 1))
    assert assign([2, 2], [[7], []]) == ((0, 1), (2, 3)), "shards of another batch size are no shards"


def test_planned_shards_are_contiguous_and_the_order_is_fixed() -> None:
    sampler = sampler_of(24, [3, 5])
    assert sampler.home == ((0, 1, 2), (3, 4, 5, 6, 7))
    drawn = [sampler.part(step, (3, 5), 0).indices.tolist() for step in range(6)]
    assert drawn[0] == [1, 4, 6], "the order must not change between releases, or resumed jobs would repeat samples"
    assert drawn[:3] != drawn[3:], "each epoch has another order"
