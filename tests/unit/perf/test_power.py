"""Tests of predicted time and energy under power limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.perf.resources.power import LimitPoint, under_limits

seconds, watts = st.floats(0.1, 1e4), st.floats(20.0, 400.0)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[LimitPoint, LimitPoint]:
    low_W = draw(st.floats(80.0, 200.0))
    high_W = low_W + draw(st.floats(10.0, 300.0))
    power = draw(st.floats(30.0, 400.0))
    fast = draw(seconds)
    return (
        LimitPoint(low_W, fast * draw(st.floats(1.0, 3.0)), power * draw(st.floats(0.4, 0.99))),
        LimitPoint(high_W, fast, power),
    )


@given(pairs())
def test_curve_passes_through_both_measurements(pair: tuple[LimitPoint, LimitPoint]) -> None:
    low, high = pair
    time_s, power_W = under_limits(low, high, np.array([low.limit_W, high.limit_W]))
    assert power_W[0] == pytest.approx(low.power_W)
    assert time_s[0] == pytest.approx(
        low.seconds if low.seconds > high.seconds else (low.seconds * high.seconds) ** 0.5
    )
    assert time_s[1] == pytest.approx(high.seconds, rel=1e-6) or power_W[1] < high.power_W


@given(pairs())
def test_higher_limit_is_never_slower_and_never_saves_power(pair: tuple[LimitPoint, LimitPoint]) -> None:
    low, high = pair
    time_s, power_W = under_limits(low, high, np.linspace(low.limit_W, high.limit_W, 30))
    assert np.all(np.diff(time_s) <= 1e-9 * time_s[0])
    assert np.all(np.diff(power_W) >= -1e-9 * power_W[-1])


@given(pairs(), st.floats(0.1, 10.0))
def test_time_scales_with_its_unit(pair: tuple[LimitPoint, LimitPoint], k: float) -> None:
    scaled = [LimitPoint(p.limit_W, k * p.seconds, p.power_W) for p in pair]
    limits = np.linspace(pair[0].limit_W, pair[1].limit_W, 5)
    assert under_limits(scaled[0], scaled[1], limits)[0] == pytest.approx(k * under_limits(*pair, limits)[0])


def test_limit_above_the_consumption_changes_nothing() -> None:
    time_s, power_W = under_limits(LimitPoint(100, 10.0, 41.0), LimitPoint(250, 10.2, 40.0), np.array([125.0, 200.0]))
    assert time_s == pytest.approx([(10.0 * 10.2) ** 0.5] * 2)
    assert power_W == pytest.approx([(41.0 * 40.0) ** 0.5] * 2)


@pytest.mark.parametrize("field, value", [("seconds", 0.0), ("power_W", float("nan")), ("limit_W", -5.0)])
def test_invalid_measurements_are_rejected(field: str, value: float) -> None:
    with pytest.raises(ValueError, match="expected finite numbers above 0"):
        LimitPoint(**{"limit_W": 100.0, "seconds": 1.0, "power_W": 90.0, field: value})


def test_limits_in_wrong_order_are_rejected() -> None:
    with pytest.raises(ValueError, match="lower limit first"):
        under_limits(LimitPoint(200, 1.0, 90.0), LimitPoint(100, 1.0, 90.0), np.array([150.0]))
