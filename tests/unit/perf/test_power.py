"""Tests of predicted time and energy under power limits."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import catalogue
from dljob.perf.resources import power
from dljob.perf.resources.power import LOWEST_PART, LimitPoint, best_limit, under_limits
from support.planner_questions import A100, RESNET, decided, view

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


@given(st.sampled_from(["a100", "v100", "h100-sxm5-80gb", "p100"]), st.floats(1.001, 3.0), st.floats(1.001, 3.0))
def test_advice_saves_more_energy_with_a_larger_allowed_slowdown(label: str, a: float, b: float) -> None:
    device = catalogue.gpu_or_assumed(label)
    few, many = (power.advised(device, s) for s in sorted((a, b)))
    for found, slowdown in zip((few, many), sorted((a, b)), strict=True):
        if found is not None:
            assert found.seconds_ratio <= slowdown and found.energy_ratio < 1
            assert LOWEST_PART * device.peak_power_W <= found.limit_W < device.peak_power_W
    assert (few.energy_ratio if few else 1.0) >= (many.energy_ratio if many else 1.0) - 1e-9
    assert power.advised(device, 1.0) is None, "no slowdown is allowed"
    assert power.advised(catalogue.gpu_or_assumed("t4"), a) is None, "its range is only 60 to 70 W"


@pytest.mark.parametrize(
    ("deadline_s", "minimize", "advises"),
    [
        pytest.param(None, "Energy", True, id="minimize energy"),
        pytest.param(None, "Time", False, id="minimize time"),
        pytest.param(1e6, "Energy", True, id="loose deadline"),
        pytest.param(60.0, "Energy", False, id="tight deadline"),
    ],
)
def test_plan_that_minimizes_energy_advises_a_power_limit(
    deadline_s: float | None, minimize: Any, advises: bool
) -> None:
    cluster = view({"device": A100, "devices": 1, "cpu": 16, "memory": "256Gi"})
    request = replace(RESNET, minimize=minimize, deadline_s=deadline_s, total_steps=10**4)
    advice = decided(request, cluster).power_advice
    assert (advice is not None) == advises
    if advice is not None:
        assert re.fullmatch(rf"\d+ W on {A100} \(of 400\): typically \d+ % less energy for 1?\d % more .*", advice)


def test_best_limit_saves_energy_within_the_allowed_slowdown() -> None:
    low, high = LimitPoint(100, 20.0, 98.0), LimitPoint(250, 10.0, 218.0)
    limits = np.array([100.0, 125.0, 150.0, 175.0, 200.0, 225.0, 250.0])
    free, tight = best_limit(low, high, limits), best_limit(low, high, limits, slowdown=1.1)
    assert 100 < free < tight <= 250
    assert best_limit(low, high, limits, slowdown=1.0) == 250


@pytest.mark.parametrize("field, value", [("seconds", 0.0), ("power_W", float("nan")), ("limit_W", -5.0)])
def test_invalid_measurements_are_rejected(field: str, value: float) -> None:
    with pytest.raises(ValueError, match="expected finite numbers above 0"):
        LimitPoint(**{"limit_W": 100.0, "seconds": 1.0, "power_W": 90.0, field: value})


def test_limits_in_wrong_order_are_rejected() -> None:
    with pytest.raises(ValueError, match="lower limit first"):
        under_limits(LimitPoint(200, 1.0, 90.0), LimitPoint(100, 1.0, 90.0), np.array([150.0]))
