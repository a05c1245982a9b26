"""The learning rate's factor for a batch."""

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
def test_factor_of_a_batch(rule: str | None, base: int, batch: int, factor: float) -> None:
    assert scaling(rule, base, batch).factor == factor


def observed(made: Scaling, shares: list[int], mean: float, deviation: float, steps: int = 2000) -> Scaling:
    """Steps of gradients drawn as theory has it: 50 numbers, each sample's about ``mean`` with ``deviation``."""
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
    """Whatever the shares: the gain of the formula with the true figures (Johnson et al. 2020, equation 3)."""
    made = observed(scaling("AdaScale", 8, 64), shares, mean, deviation)
    noise, signal = 50 * deviation**2, 50 * mean**2
    assert made.factor == pytest.approx((noise / 8 + signal) / (noise / 64 + signal), rel=0.1)


def test_adascale_between_its_limits() -> None:
    assert observed(scaling("AdaScale", 8, 64), [32, 32], 0.0, 1.0).factor > 7, "mere noise: linear"
    assert observed(scaling("AdaScale", 8, 64), [32, 32], 1.0, 0.0).factor == pytest.approx(1), "no noise: no gain"


@given(
    base=st.integers(1, 100),
    batch=st.integers(2, 1000),
    squares=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 8)), max_size=20),
)
def test_the_gain_is_never_outside_of_1_and_linear(
    base: int, batch: int, squares: list[tuple[float, float, int]]
) -> None:
    made = scaling("AdaScale", base, batch)
    for within, together, ranks in squares:
        made.observe(within, together, ranks)
        assert min(1, batch / base) <= made.factor <= max(1, batch / base)
    again = scaling("AdaScale", base, batch)
    again.load(made.state())
    assert again.factor == made.factor
