"""Tests of predicted time, power and energy under clock limits: laws, and published measurements."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import catalogue
from dljob.cluster.catalogue import Device
from dljob.perf.resources import energy, power
from dljob.perf.step.compute import catalogue_curve
from dljob.perf.workload.workload import builtin

names = st.sampled_from(catalogue.gpu_names())
parts = st.floats(0.08, 1.0)


def at(device: Device, part: float) -> Device:
    return replace(device, clock_limit_MHz=part * device.max_clock_MHz)


def demand(device: Device, part: float) -> float:
    return device.idle_power_W + part * (device.peak_power_W - device.idle_power_W)


def test_catalogue_has_the_clock_of_every_gpu() -> None:
    assert all(800 <= catalogue.gpu_or_assumed(name).max_clock_MHz <= 4000 for name in catalogue.gpu_names())


@given(names, st.floats(0, 1))
def test_limit_at_the_maximum_clock_is_no_limit(name: str, part: float) -> None:
    device = catalogue.gpu_or_assumed(name)
    watts = demand(device, part)
    assert power.under_clock(at(device, 1.0), watts) == pytest.approx((1.0, watts))
    assert power.slowed(at(device, 1.0)).fp32_FLOPs == pytest.approx(device.fp32_FLOPs)
    for busy in (0.0, 0.5, 1.0):
        assert energy.device_watts(power.limited(at(device, 1.0)), busy) == pytest.approx(
            energy.device_watts(device, busy)
        )


@given(names, parts, parts, st.floats(0, 1))
def test_lower_clock_is_never_faster_and_never_draws_more(name: str, a: float, b: float, part: float) -> None:
    device = catalogue.gpu_or_assumed(name)
    low, high = (power.under_clock(at(device, each), demand(device, part)) for each in sorted((a, b)))
    assert low.seconds >= high.seconds - 1e-12 >= 1 - 1e-9
    assert device.idle_power_W - 1e-9 <= low.power_W <= high.power_W + 1e-9
    for busy in (0.0, 0.5, 1.0):
        watts = [energy.device_watts(power.limited(at(device, each)), busy) for each in sorted((a, b))]
        assert watts[0] <= watts[1] + 1e-9


@given(names, parts)
def test_time_is_at_most_inversely_proportional_to_the_clock(name: str, part: float) -> None:
    device = catalogue.gpu_or_assumed(name)
    assert power.under_clock(at(device, part)).seconds <= max(1.0, energy.HELD_CLOCK / part) + 1e-9


@given(names, st.floats(0, 1))
def test_energy_has_one_minimum(name: str, part: float) -> None:
    """From the minimum, energy rises to both sides. A job near idle power is best at the highest clock."""
    device = catalogue.gpu_or_assumed(name)
    found = [power.under_clock(at(device, n / 200), demand(device, part)) for n in range(20, 201)]
    used = [each.seconds * each.power_W for each in found]
    best = used.index(min(used))
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(used[: best + 1]))
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(used[best:]))


@pytest.mark.parametrize("name", ["a100", "v100", "h100-sxm5-80gb", "a40", "mi300x"])
def test_minimum_of_a_typical_job_saves_energy_between_half_and_nine_tenths_of_the_clock(name: str) -> None:
    device = catalogue.gpu_or_assumed(name)
    used = {n: (each := power.under_clock(at(device, n / 100))).seconds * each.power_W for n in range(20, 101)}
    best = min(used, key=lambda n: used[n])
    assert 50 <= best <= 90 and 0.6 * used[100] < used[best] < 0.85 * used[100]


@given(names, parts, st.floats(0.01, 0.35))
def test_power_limit_acts_only_above_its_demand_and_a_clock_always(name: str, part: float, load: float) -> None:
    """A job that draws less than the lowest usual power limit feels none, but every job feels its clock."""
    device = catalogue.gpu_or_assumed(name)
    watts = min(demand(device, load), 0.39 * device.peak_power_W)
    if watts <= device.idle_power_W:
        return
    limited = replace(device, power_limit_W=power.LOWEST_PART * device.peak_power_W)
    assert power.under_both(limited, watts) == pytest.approx((1.0, watts), rel=1e-6)
    clocked = power.under_both(at(device, part), watts)
    if part < energy.HELD_CLOCK - 1e-3:
        assert clocked.seconds > 1 and clocked.power_W < watts
    both = power.under_both(replace(limited, clock_limit_MHz=at(device, part).clock_limit_MHz), watts)
    assert both == pytest.approx(clocked), "the power limit has no effect beside the clock"


@given(names, parts, st.floats(0.4, 1.0), st.floats(0, 1))
def test_both_limits_are_at_least_as_strict_as_each(name: str, part: float, limit: float, load: float) -> None:
    device = catalogue.gpu_or_assumed(name)
    watts, limit_W = demand(device, load), limit * device.peak_power_W
    alone = [power.under_both(each, watts) for each in (at(device, part), replace(device, power_limit_W=limit_W))]
    both = power.under_both(replace(at(device, part), power_limit_W=limit_W), watts)
    assert both.seconds == max(each.seconds for each in alone)
    assert both.power_W == min(each.power_W for each in alone)


def test_clock_slows_down_kernels_but_not_the_host() -> None:
    device, work = catalogue.gpu_or_assumed("a100"), builtin("resnet50", None)
    free, slow = (catalogue_curve(work, each) for each in (device, at(device, 0.5)))
    ratio = power.under_clock(at(device, 0.5)).seconds
    assert slow.seconds(512) == pytest.approx(ratio * free.seconds(512), rel=0.01)
    assert slow.seconds(1) == pytest.approx(free.seconds(1)), "a step of many small kernels waits for its host"


def test_device_without_a_known_clock_has_no_limit() -> None:
    unknown = replace(catalogue.gpu_or_assumed("NVIDIA-X9000"), clock_limit_MHz=500.0)
    assert power.under_clock(unknown, 50.0) == pytest.approx((1.0, 50.0))


PUBLISHED = {
    # (device, demand in W, part of the maximum clock, measured time and energy relative to the maximum clock)
    "layer of GPT-3 175B, A100 SXM, 1290 of 1410 MHz": ("a100-sxm4-80gb", 478, 0.915, 1.045, 0.903),
    "layer of GPT-3 175B, A100 SXM, 1200 MHz": ("a100-sxm4-80gb", 478, 0.851, 1.111, 0.807),
    "layer of GPT-3 175B, A100 SXM, 1050 MHz": ("a100-sxm4-80gb", 478, 0.745, 1.255, 0.734),
    "layer of BLOOM, A40, 1410 of 1740 MHz": ("a40", 294, 0.810, 1.044, 0.954),
    "layer of BLOOM, A40, 1200 MHz": ("a40", 294, 0.690, 1.119, 0.819),
    "heaviest stage of BLOOM-3B, A100 PCIe, 1185 of 1410 MHz": ("a100-pcie-80gb", 293, 0.842, 1.014, 0.966),
    "heaviest stage of BLOOM-3B, A100 PCIe, 1060 MHz": ("a100-pcie-80gb", 293, 0.750, 1.091, 0.885),
    "heaviest stage of GPT-3 XL, A100 PCIe, 1060 MHz": ("a100-pcie-80gb", 294, 0.750, 1.086, 0.902),
    "heaviest stage of GPT-3 2.7B, A40, 1140 of 1740 MHz": ("a40", 287, 0.655, 1.137, 0.791),
    "heaviest stage of BLOOM-3B, A40, 1160 MHz": ("a40", 281, 0.667, 1.131, 0.761),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_points(name: str) -> None:
    """The largest error of these points is 13 % in time and 20 % in energy (Perseus, SOSP 2024: sosp24_data)."""
    label, watts, part, seconds, joules = PUBLISHED[name]
    found = power.under_clock(at(catalogue.gpu_or_assumed(label), part), watts)
    assert found.seconds == pytest.approx(seconds, rel=0.13)
    assert found.seconds * found.power_W / watts == pytest.approx(joules, rel=0.2)
