"""Laws of an administrator's energy settings: what they change in devices, predictions and plans."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import catalogue
from dljob.cluster.energy import ASSUMED_ENERGY, DAY_S, HOUR_S, CarbonIntensity, EnergySettings
from dljob.perf.resources import energy
from dljob.planner import Decision
from support.planner_questions import A100, DIGITS, RESNET, decided, view

DIRTY_BY_DAY = CarbonIntensity(tuple(600.0 if 6 <= hour < 18 else 100.0 for hour in range(24)), assumed=False)
J_PER_KWH = 3.6e6
NODES = view({"count": 8, "cpu": 16, "memory": "64Gi"})


@given(
    st.lists(st.floats(0, 1000), min_size=24, max_size=24), st.floats(0, 3 * DAY_S), st.floats(0, 10 * DAY_S),
    st.floats(0, 10 * DAY_S),
)  # fmt: skip
def test_carbon_of_two_parts_is_that_of_the_whole(by_hour: list[float], begin_s: float, a_s: float, b_s: float) -> None:
    carbon, power_W = CarbonIntensity(tuple(by_hour)), 1000.0
    parts = carbon.grams(power_W * a_s, begin_s, a_s) + carbon.grams(power_W * b_s, begin_s + a_s, b_s)
    whole = carbon.grams(power_W * (a_s + b_s), begin_s, a_s + b_s)
    moment_g = 2 * power_W * max(by_hour) / J_PER_KWH  # Each mean is over a second more.
    assert whole == pytest.approx(parts, rel=1e-6, abs=moment_g)


@given(st.floats(0, 1000), st.floats(0, DAY_S), st.floats(0, 10 * DAY_S))
def test_equal_hours_are_a_constant(g_per_kwh: float, begin_s: float, seconds: float) -> None:
    by_hour, constant = CarbonIntensity((g_per_kwh,) * 24), CarbonIntensity((g_per_kwh,))
    assert by_hour.grams(1e6, begin_s, seconds) == pytest.approx(constant.grams(1e6, begin_s, seconds), rel=1e-6)


def test_carbon_follows_the_hours() -> None:
    assert DIRTY_BY_DAY.grams(J_PER_KWH, 0.0, HOUR_S) == pytest.approx(100)
    assert DIRTY_BY_DAY.grams(J_PER_KWH, 12 * HOUR_S, HOUR_S) == pytest.approx(600)
    assert DIRTY_BY_DAY.grams(J_PER_KWH, 5 * HOUR_S, 2 * HOUR_S) == pytest.approx(350, rel=1e-3)
    assert DIRTY_BY_DAY.grams(J_PER_KWH, 12 * HOUR_S, 0.0) == pytest.approx(600)
    both = DIRTY_BY_DAY.grams(np.array([J_PER_KWH, J_PER_KWH]), 23 * HOUR_S, np.array([HOUR_S, 5 * DAY_S]))
    assert both == pytest.approx([100, 350], rel=1e-2)


def test_figures_apply_to_the_device_that_they_name() -> None:
    device = catalogue.gpu_or_assumed(A100)
    assert ASSUMED_ENERGY.device(device, A100, 1.0) is device
    found = EnergySettings({"a100-sxm4-40gb": 10.0}, 0.0, 1.0)
    assert energy.rank_watts(found.device(device, A100, 1.0), 0.0) == pytest.approx(
        10 + energy.WAITING_PART * (device.peak_power_W - 10)
    )
    assert energy.rank_watts(found.device(device, A100, 1.0), 1.0) < energy.rank_watts(device, 1.0)
    part = f"{A100}-MIG-3g.20gb"
    assert found.device(catalogue.gpu_or_assumed(part), part, 1.0).idle_power_W == pytest.approx(10 * 3 / 7)
    cpus = EnergySettings({"cpu": 1.0}).device(catalogue.cpu("cpu", 4), "cpu", 4.0)
    assert cpus.idle_power_W == 4.0
    hot = EnergySettings({"cpu": 1e5}).device(catalogue.cpu("cpu", 4), "cpu", 4.0)
    assert hot.idle_power_W == hot.peak_power_W, "an idle device draws at most its peak power"


def energy_of(found: Decision) -> float:
    assert found.chosen.prediction.energy_J is not None
    return found.chosen.prediction.energy_J


def test_energy_of_a_plan_is_proportional_to_the_overhead() -> None:
    lean, wasteful = (decided(replace(DIGITS, energy=EnergySettings(pue=pue)), NODES) for pue in (1.0, 2.0))
    assert energy_of(wasteful) == pytest.approx(2 * energy_of(lean))


def test_least_carbon_is_least_energy_if_the_intensity_is_constant() -> None:
    least = decided(replace(RESNET, minimize="Energy"), NODES)
    found = decided(replace(RESNET, minimize="Carbon"), NODES)
    assert found.chosen.summary == least.chosen.summary
    assert found.chosen.prediction.carbon_g == pytest.approx(energy_of(least) / J_PER_KWH * 473)
    assert least.chosen.prediction.carbon_g is None, "it was not asked for, and no intensity is known"
    known = decided(replace(RESNET, energy=EnergySettings(carbon=DIRTY_BY_DAY)), NODES)
    assert known.chosen.prediction.carbon_g is not None


def test_hour_of_the_start_decides_which_plan_has_the_least_carbon() -> None:
    """More nodes need more energy, but end before the electricity becomes dirty."""
    request = replace(RESNET, minimize="Carbon", energy=EnergySettings(carbon=DIRTY_BY_DAY))
    night, dawn = (decided(replace(request, begin_s=hour * HOUR_S), NODES).chosen.prediction for hour in (18, 4))
    assert night.total_s > 2 * HOUR_S >= dawn.total_s, "at four, two hours are left"
    assert night.energy_J is not None and dawn.energy_J is not None and night.energy_J < dawn.energy_J
    assert night.carbon_g == pytest.approx(night.energy_J / J_PER_KWH * 100)
