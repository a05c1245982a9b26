"""Tests of the division of batches into micro-batches."""

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import micro_batches_of
from dlcontract.accumulation import MICRO_BATCH_GROWTH
from dltrain.agent.job.shrink import shrink_plan
from dltrain.batch.micro_batches import MicroBatches, divide
from dltrain.batch.sampling import Part, Sampler
from support.trainer.plans import make_plan

shares = st.lists(st.integers(1, 60), min_size=1, max_size=5)


@given(st.integers(0, 50), st.integers(1, 12), st.booleans())
def test_micro_batches_are_the_part_of_the_batch(samples: int, count: int, last: bool) -> None:
    part = Part(2, np.arange(max(1, samples)), samples / 100, 100, last)
    found = divide(part, count)
    assert len(found) == count
    assert sum(small.weight for small in found) == pytest.approx(part.weight)
    counted = [small for small in found if small.weight]
    if samples:
        assert np.concatenate([small.indices for small in counted]).tolist() == part.indices.tolist()
    sizes = [len(small.indices) if small.weight else 0 for small in found]
    assert max(sizes) - min(sizes) <= 1 and all(len(small.indices) for small in found)
    assert [small.last for small in found] == [False] * (count - 1) + [last]


@given(shares, st.integers(1, 8), st.integers(1, 300))
def test_all_ranks_have_equally_many_micro_batches_of_at_most_the_planned_size(
    sizes: list[int], planned: int, samples: int
) -> None:
    """This holds for complete batches and for the last batch of an epoch, whatever its size."""
    batch = sum(sizes)
    planned = min(planned, batch)
    plan = make_plan(shares=sizes, global_batch=batch, micro_batches=planned)
    sampler, micro = Sampler(max(samples, batch), batch, 0), MicroBatches(plan)
    for step in range(min(3, sampler.steps_per_epoch)):
        counts = set()
        for rank, share in enumerate(sizes):
            part = sampler.part(step, sizes, rank)
            parts = micro.of_step(part, sizes)
            counts.add(len(parts))
            assert max(len(small.indices) for small in parts) <= ceil(share / planned) or planned == 1
        assert len(counts) == 1 and counts.pop() <= planned


@given(shares, st.integers(2, 8), st.data())
def test_micro_batches_do_not_grow_when_local_batches_do(sizes: list[int], planned: int, data: st.DataObject) -> None:
    grown = [share + data.draw(st.integers(0, 60)) for share in sizes]
    count = micro_batches_of(planned, sizes, grown)
    assert count >= planned == micro_batches_of(planned, sizes, sizes)
    for share, before in zip(grown, sizes, strict=True):
        assert ceil(share / count) <= MICRO_BATCH_GROWTH * ceil(before / planned)


def test_without_accumulation_a_step_is_never_divided() -> None:
    assert micro_batches_of(1, [4, 4], [8, 0]) == 1
    accumulating = make_plan(2, global_batch=8, micro_batches=4)
    assert MicroBatches(accumulating, accumulates=False).most([4, 4]) == 1
    pipeline = make_plan(2, shares=[8, 8], global_batch=8, parallelism="Pipeline", micro_batches=4, min_ranks=2)
    assert MicroBatches(pipeline).most([8, 8]) == 1


def test_a_plan_that_shrinks_gets_more_micro_batches() -> None:
    plan = make_plan(3, global_batch=24, micro_batches=2)
    found = shrink_plan(plan, plan.pods[:2])
    assert found is not None
    assert ([rank.share for rank in found.ranks], found.micro_batches) == ([12, 12], 3)


def test_plans_that_cannot_accumulate_have_one_micro_batch() -> None:
    for wrong in ({"parallelism": "Tensor", "shares": [8, 8], "min_ranks": 2}, {"micro_batches": 9}):
        with pytest.raises(ValueError, match="micro_batches: found"):
            make_plan(2, **{"global_batch": 8, "micro_batches": 2} | wrong)
