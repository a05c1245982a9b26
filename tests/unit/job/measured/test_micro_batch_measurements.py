"""Tests of what profiles learn from runs with gradient accumulation."""

import pytest

from dlcontract import RankMeasure, Report
from dljob.job.profiles import of_micro_batches
from support.trainer.plans import make_plan


def report(*measures: RankMeasure) -> Report:
    return Report.model_construct(ranks=measures)


def test_times_are_those_of_one_micro_batch() -> None:
    plan = make_plan(shares=[12, 24], global_batch=36, micro_batches=4)
    before = report(
        RankMeasure(rank=0, device="cpu", share=12, compute_s=2.0, fetch_s=0.4),
        RankMeasure(rank=1, device="cpu", share=24, compute_s=4.0, fetch_s=0.8),
    )
    found = of_micro_batches(before, plan, plan.micro_batches).ranks
    assert [(m.share, m.compute_s, m.fetch_s) for m in found] == [
        (3, 0.5, pytest.approx(0.1)),
        (6, 1.0, pytest.approx(0.2)),
    ]


@pytest.mark.parametrize(("share", "k", "largest"), [(9, 8, 2), (17, 16, 2), (5, 4, 2), (3, 2, 2)])
def test_largest_micro_batch_takes_its_part_of_the_time(share: int, k: int, largest: int) -> None:
    """Fixed bug: the mean time of unequal micro-batches was stored as that of the largest."""
    plan = make_plan(shares=[share], global_batch=share, micro_batches=k)
    (found,) = of_micro_batches(
        report(RankMeasure(rank=0, device="cpu", share=share, compute_s=float(share))), plan, k
    ).ranks
    assert (found.share, found.compute_s) == (largest, pytest.approx(largest))


def test_survivors_of_a_loss_have_more_micro_batches() -> None:
    plan = make_plan(shares=[12, 12], global_batch=24, micro_batches=2)
    alone = report(RankMeasure(rank=0, device="cpu", share=24, compute_s=8.0))
    (found,) = of_micro_batches(alone, plan, plan.micro_batches).ranks
    assert (found.share, found.compute_s) == (6, 2.0)


def test_a_run_without_accumulation_is_reported_as_it_is() -> None:
    plan = make_plan(2, global_batch=24)
    before = report(RankMeasure(rank=0, device="cpu", share=12, compute_s=2.0))
    assert of_micro_batches(before, plan, plan.micro_batches) is before
