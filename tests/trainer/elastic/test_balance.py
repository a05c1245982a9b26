"""Shares that follow measured speeds: where they end up, and that a wrong guess is taken back."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dltrain.batch.shares import Speed, balanced
from dltrain.elastic.balance import Balance

Computing = Callable[[Sequence[int]], list[float]]
"""Shares → seconds of computing by rank."""


def drive(balance: Balance, computing: Computing, steps: int, wait_s: float = 0.001) -> list[tuple[int, ...]]:
    """The shares after each change within so many steps; the step ends with its slowest rank."""
    changes = []
    for _ in range(steps):
        computed = computing(balance.shares)
        if (shares := balance.add(computed, [0.0] * len(computed), max(computed) + wait_s)) is not None:
            changes.append(shares)
    return changes


@given(
    st.lists(st.floats(0.002, 0.05), min_size=2, max_size=6),
    st.floats(0, 0.05),
    st.integers(8, 64),
)
@settings(max_examples=60, deadline=None)
def test_it_comes_within_a_tenth_of_the_optimum(per_sample_s: list[float], fixed_s: float, each: int) -> None:
    speeds = [Speed(fixed_s, s) for s in per_sample_s]
    batch = each * len(speeds)

    def computing(shares: Sequence[int]) -> list[float]:
        return [speed.step_s(share) for speed, share in zip(speeds, shares, strict=True)]

    balance = Balance([each] * len(speeds), [batch] * len(speeds))
    drive(balance, computing, 20 * 60)
    assert sum(balance.shares) == batch and min(balance.shares) >= 1
    least_s = max(computing(balanced(speeds, batch)))
    coarse_s = max(per_sample_s)  # shares are whole samples
    assert max(computing(balance.shares)) <= 1.1 * least_s + coarse_s


@pytest.mark.parametrize("seed", range(5))
def test_equal_ranks_keep_equal_shares(seed: int) -> None:
    """Noise of some per cent is no reason to move."""
    random_ = random.Random(seed)
    balance = Balance([40, 40, 40], [120] * 3)
    noisy = drive(balance, lambda shares: [0.003 * s * random_.gauss(1, 0.05) for s in shares], 4000)
    assert noisy == []


def test_a_trial_that_makes_steps_longer_is_taken_back_and_tried_ever_less() -> None:
    """A rank that is fast only as long as it mostly waits: under a quota, as its budget lasts."""

    def computing(shares: Sequence[int]) -> list[float]:
        return [0.002 * shares[0], 0.001 * shares[1] if shares[1] <= 40 else 0.05 * shares[1]]

    balance = Balance([80, 40], [120, 120])
    changes = drive(balance, computing, 20 * 300)
    assert changes, "it looks worth a trial"
    assert balance.shares == (80, 40)
    assert changes[1::2] == [(80, 40)] * len(changes[1::2]), "each trial is taken back"
    assert len(changes) < 40


def test_a_rank_that_slows_down_gives_samples_away() -> None:
    balance = Balance([50, 50], [100, 100])
    assert drive(balance, lambda shares: [0.01 * s for s in shares], 400) == []
    drive(balance, lambda shares: [0.01 * shares[0], 0.04 * shares[1]], 1000)
    assert balance.shares[0] >= 75


def test_under_a_quota_the_cpu_time_decides() -> None:
    """A rank with a fifth of a CPU that waits half of each step computes at full speed, and could not do more."""
    rates, per_sample_s = (0.8, 0.2, 0.2), 0.001

    def demanded(shares: Sequence[int]) -> list[float]:
        return [per_sample_s * share / rate for share, rate in zip(shares, rates, strict=True)]

    balance = Balance([80, 80, 80], [240] * 3)
    for _ in range(400):
        needed = demanded(balance.shares)
        balance.add([0.5 * s for s in needed[:1]] + [per_sample_s * s for s in balance.shares[1:]], needed, max(needed))
    assert balance.shares == (160, 40, 40)


def test_limits_and_servers_hold() -> None:
    balance = Balance([50, 50, 0], [60, 100, 0])
    changes = drive(balance, lambda shares: [0.001 * shares[0], 0.01 * shares[1], 0.0], 1000)
    assert changes and balance.shares == (60, 40, 0)


def test_all_ranks_decide_alike() -> None:
    one, other = (Balance([10, 90], [100, 100]) for _ in range(2))
    assert drive(one, lambda s: [0.01 * n for n in s], 500) == drive(other, lambda s: [0.01 * n for n in s], 500) != []
