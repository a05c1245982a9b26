"""Tests of rebalancing: shares follow measured speeds, and a change that slows the step is undone."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dltrain.batch.shares import Speed, balanced
from dltrain.elastic.balance import Balance

Computing = Callable[[Sequence[int]], list[float]]
"""Maps shares to the compute time of each rank in seconds."""


def drive(balance: Balance, computing: Computing, steps: int, wait_s: float = 0.001) -> list[tuple[int, ...]]:
    """Return the shares after each change within ``steps``. The slowest rank determines the step time."""
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
def test_rebalanced_step_time_is_within_10_percent_of_the_optimum(
    per_sample_s: list[float], fixed_s: float, each: int
) -> None:
    speeds = [Speed(fixed_s, s) for s in per_sample_s]
    batch = each * len(speeds)

    def computing(shares: Sequence[int]) -> list[float]:
        return [speed.step_s(share) for speed, share in zip(speeds, shares, strict=True)]

    balance = Balance([each] * len(speeds), [batch] * len(speeds))
    drive(balance, computing, 20 * 60)
    assert sum(balance.shares) == batch and min(balance.shares) >= 1
    optimum_s = max(computing(balanced(speeds, batch)))
    granularity_s = max(per_sample_s)  # shares are whole samples
    assert max(computing(balance.shares)) <= 1.1 * optimum_s + granularity_s


@pytest.mark.parametrize("seed", range(5))
def test_equal_ranks_keep_equal_shares(seed: int) -> None:
    """Noise of a few per cent must not change the shares."""
    random_ = random.Random(seed)
    balance = Balance([40, 40, 40], [120] * 3)
    noisy = drive(balance, lambda shares: [0.003 * s * random_.gauss(1, 0.05) for s in shares], 4000)
    assert noisy == []


def test_change_that_slows_the_step_is_undone_and_retried_less_often() -> None:
    """Rank 1 is fast only while it mostly waits, as under a CPU quota that it has not used up."""

    def computing(shares: Sequence[int]) -> list[float]:
        return [0.002 * shares[0], 0.001 * shares[1] if shares[1] <= 40 else 0.05 * shares[1]]

    balance = Balance([80, 40], [120, 120])
    changes = drive(balance, computing, 20 * 300)
    assert changes, "the change seems to pay off"
    assert balance.shares == (80, 40)
    assert changes[1::2] == [(80, 40)] * len(changes[1::2]), "each change is undone"
    assert len(changes) < 40


def test_share_of_a_straggler_shrinks() -> None:
    balance = Balance([50, 50], [100, 100])
    assert drive(balance, lambda shares: [0.01 * s for s in shares], 400) == []
    drive(balance, lambda shares: [0.01 * shares[0], 0.04 * shares[1]], 1000)
    assert balance.shares[0] >= 75


def test_cpu_time_decides_under_a_quota() -> None:
    """A rank with 0.2 CPUs that waits half of each step computes at full speed, but has no time to spare."""
    rates, per_sample_s = (0.8, 0.2, 0.2), 0.001

    def demanded(shares: Sequence[int]) -> list[float]:
        return [per_sample_s * share / rate for share, rate in zip(shares, rates, strict=True)]

    balance = Balance([80, 80, 80], [240] * 3)
    for _ in range(400):
        needed = demanded(balance.shares)
        balance.add([0.5 * s for s in needed[:1]] + [per_sample_s * s for s in balance.shares[1:]], needed, max(needed))
    assert balance.shares == (160, 40, 40)


def test_limits_are_respected_and_servers_get_no_samples() -> None:
    balance = Balance([50, 50, 0], [60, 100, 0])
    changes = drive(balance, lambda shares: [0.001 * shares[0], 0.01 * shares[1], 0.0], 1000)
    assert changes and balance.shares == (60, 40, 0)


def test_all_ranks_make_the_same_decision() -> None:
    one, other = (Balance([10, 90], [100, 100]) for _ in range(2))
    assert drive(one, lambda s: [0.01 * n for n in s], 500) == drive(other, lambda s: [0.01 * n for n in s], 500) != []
