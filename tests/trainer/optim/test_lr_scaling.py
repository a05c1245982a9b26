"""Tests of learning-rate scaling with the global batch size."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlcontract import OptimizerRef
from dltrain.optim.lr_scaling import Scaling


def scaling(rule: str | None, base: int, batch: int) -> Scaling:
    return Scaling(OptimizerRef(scaling=rule, base_batch=base if rule else None), batch)


@pytest.mark.parametrize(
    ("rule", "base", "batch", "factor"),
    [(None, 0, 64, 1), ("Linear", 32, 256, 8), ("Linear", 64, 16, 0.25), ("SquareRoot", 16, 64, 2), ("AdaScale", 16, 64, 2)],
)  # fmt: skip
def test_scaling_rule_gives_factor_for_batch(rule: str | None, base: int, batch: int, factor: float) -> None:
    assert scaling(rule, base, batch).factor == factor


def with_observed_gradients(
    made: Scaling, shares: list[int], mean: float, deviation: float, steps: int = 2000
) -> Scaling:
    """Observe random gradients of 50 elements; each sample's gradient has mean ``mean`` and deviation ``deviation``."""
    draw, batch = np.random.default_rng(0), sum(shares)
    for _ in range(steps):
        gradients = [mean + deviation / sqrt(b) * draw.standard_normal(50) for b in shares]
        within = sum(b / batch * float(g @ g) for b, g in zip(shares, gradients, strict=True))
        whole = sum(b / batch * g for b, g in zip(shares, gradients, strict=True))
        made.observe(within, float(whole @ whole), len(shares))
    return made


@pytest.mark.parametrize("shares", [[32, 32], [10, 54], [1, 3, 20, 40]])
@pytest.mark.parametrize(("mean", "deviation"), [(1.0, 1.0), (0.1, 1.0), (0.1, 0.05)])
def test_adascale_measures_noise_and_signal(shares: list[int], mean: float, deviation: float) -> None:
    """Compare the gain with equation 3 of Johnson et al. (2020) for the true noise and signal."""
    made = with_observed_gradients(scaling("AdaScale", 8, 64), shares, mean, deviation)
    noise, signal = 50 * deviation**2, 50 * mean**2
    assert made.factor == pytest.approx((noise / 8 + signal) / (noise / 64 + signal), rel=0.1)


def test_adascale_is_linear_for_pure_noise_and_constant_without_noise() -> None:
    assert with_observed_gradients(scaling("AdaScale", 8, 64), [32, 32], 0.0, 1.0).factor > 7, (
        "pure noise: linear scaling"
    )
    assert with_observed_gradients(scaling("AdaScale", 8, 64), [32, 32], 1.0, 0.0).factor == pytest.approx(1), (
        "no noise: no gain"
    )


@given(
    base=st.integers(1, 100),
    batch=st.integers(2, 1000),
    squares=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 8)), max_size=20),
)
def test_adascale_factor_stays_between_1_and_linear_scaling(
    base: int, batch: int, squares: list[tuple[float, float, int]]
) -> None:
    made = scaling("AdaScale", base, batch)
    for within, together, ranks in squares:
        made.observe(within, together, ranks)
        assert min(1, batch / base) <= made.factor <= max(1, batch / base)
    again = scaling("AdaScale", base, batch)
    again.load(made.state())
    assert again.factor == made.factor
