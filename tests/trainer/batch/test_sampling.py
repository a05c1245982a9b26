"""Tests of sampling and of shares."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from dltrain.batch.sampling import Sampler, permutation
from dltrain.batch.shares import Speed, apportion, balanced, fit, worthwhile

SHARES = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)


@given(total=st.integers(0, 500), weights=SHARES)
def test_apportioned_parts_add_up_and_differ_from_exact_by_less_than_1(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    exact = [total * weight / sum(weights) for weight in weights]
    assert all(abs(part - want) < 1 for part, want in zip(parts, exact, strict=True))


@given(samples=st.integers(1, 300), shares=SHARES, seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_epoch_contains_every_sample_once(samples: int, shares: list[int], seed: int, epoch: int) -> None:
    sampler = Sampler(samples, min(sum(shares), samples), seed)
    seen: list[int] = []
    for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch):
        parts = [sampler.part(step, shares, rank) for rank in range(len(shares))]
        assert abs(sum(part.weight for part in parts) - 1) < 1e-9
        assert {part.epoch for part in parts} == {epoch}
        assert {part.last for part in parts} == {step % sampler.steps_per_epoch == sampler.steps_per_epoch - 1}
        for share, part in zip(shares, parts, strict=True):
            assert bool(len(part.indices)) == bool(share), "workers always have a sample, servers never"
            if part.weight:
                assert round(part.weight * part.batch) == len(part.indices)
                seen += part.indices.tolist()
    assert sorted(seen) == list(range(samples))


@given(samples=st.integers(1, 300), batch=st.integers(1, 64), epoch=st.integers(0, 3))
def test_drop_last_leaves_out_only_the_remainder(samples: int, batch: int, epoch: int) -> None:
    whole = Sampler(samples, min(batch, samples), 3)
    dropping = Sampler(samples, min(batch, samples), 3, drop_last=True)
    assert dropping.steps_per_epoch == samples // whole.batch > 0
    for index in range(dropping.steps_per_epoch):
        part = dropping.part(epoch * dropping.steps_per_epoch + index, [1], 0)
        same = whole.part(epoch * whole.steps_per_epoch + index, [1], 0)
        assert len(part.indices) == whole.batch and part.indices.tolist() == same.indices.tolist()
        assert part.epoch == epoch and part.last == (index == dropping.steps_per_epoch - 1)


@given(samples=st.integers(2, 300), batch=st.integers(1, 64), a=SHARES, b=SHARES)
def test_batches_do_not_depend_on_the_split(samples: int, batch: int, a: list[int], b: list[int]) -> None:
    sampler = Sampler(samples, min(batch, samples), 5)

    def samples_of_step(shares: list[int]) -> set[int]:
        parts = [sampler.part(3, shares, rank) for rank in range(len(shares))]
        return {int(i) for part in parts if part.weight for i in part.indices}

    assert samples_of_step(a) == samples_of_step(b)


def test_permutation_depends_on_seed_and_epoch_and_is_stable() -> None:
    assert permutation(1, 2, 8).tolist() == [4, 2, 0, 6, 1, 5, 7, 3]
    orders = {tuple(permutation(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


SPEEDS = st.lists(
    st.builds(Speed, st.floats(0, 0.1), st.floats(1e-6, 0.1)),
    min_size=1, max_size=5,
)  # fmt: skip


@given(speeds=SPEEDS, extra=st.integers(0, 200))
def test_balanced_shares_cannot_be_improved_by_moving_a_sample(speeds: list[Speed], extra: int) -> None:
    batch = len(speeds) + extra
    shares = balanced(speeds, batch)
    assert sum(shares) == batch and min(shares) >= 1
    times = [speed.step_s(share) for speed, share in zip(speeds, shares, strict=True)]
    slowest = times.index(max(times))
    if shares[slowest] > 1:
        others = [r for r in range(len(speeds)) if r != slowest]
        assert all(speeds[r].step_s(shares[r] + 1) >= max(times) * (1 - 1e-9) for r in others)


@given(fixed=st.floats(0, 1), slope=st.floats(1e-3, 1), x=st.integers(1, 50))
def test_fit_recovers_a_line(fixed: float, slope: float, x: int) -> None:
    line = Speed(fixed, slope)
    found = fit([(s, line.step_s(s)) for s in (x, 2 * x, 4 * x)])
    assert np.isclose(found.fixed_s, fixed, atol=1e-6 * (1 + slope * x)) and np.isclose(
        found.per_sample_s, slope, rtol=1e-6
    )


@given(speeds=SPEEDS, extra=st.integers(0, 200))
def test_balanced_shares_are_not_changed(speeds: list[Speed], extra: int) -> None:
    batch = len(speeds) + extra
    assert worthwhile(speeds, balanced(speeds, batch), batch) is None


@given(fast=st.floats(1e-5, 1e-3), times=st.floats(2, 8))
def test_slow_rank_gets_fewer_samples(fast: float, times: float) -> None:
    speeds = [Speed(0, fast), Speed(0, fast * times)]
    better = worthwhile(speeds, [60, 60], 120)
    assume(better is not None)
    assert better is not None and abs(better[0] / better[1] - times) < 0.2 * times
