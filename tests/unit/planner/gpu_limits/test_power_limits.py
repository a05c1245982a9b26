"""Tests of plans for GPUs whose nodes have a label with their power limit."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.api import DLJobSpec, PlanStatus
from dljob.calibrate.learned import LearnedPoint
from dljob.cluster import catalogue
from dljob.cluster.prices import Prices
from dljob.job.plan.status import plan_status
from dljob.perf.resources import energy, power
from dljob.perf.step.compute import catalogue_curve
from dljob.perf.workload.workload import builtin
from dljob.planner import Decision, Learned, Request
from dljob.planner.candidates.pools import wanted
from dljob.planner.types import FixedChoice
from support.planner_questions import A100, RESNET, T4, decided, rejected, view
from support.specs.small_specs import MINIMAL

NODE: dict[str, Any] = {"device": A100, "devices": 1, "cpu": 16, "memory": "256Gi"}
LIMITED = f"{A100}@250W"
ALONE = replace(RESNET, total_steps=10**4, nodes_max=1)


def on(limit: float | None, request: Request = ALONE, **learned: Learned) -> Decision:
    node = NODE if limit is None else {**NODE, "powerLimit": f"{limit:g}"}
    return decided(request, view(node), {("resnet50", name): found for name, found in learned.items()})


def joules(found: Decision) -> float:
    assert found.chosen.prediction.energy_J is not None
    return found.chosen.prediction.energy_J


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(catalogue.gpu_names()), st.floats(0, 1), st.floats(0, 1))
def test_lower_limit_is_never_faster_and_never_draws_more(name: str, a: float, b: float) -> None:
    device = catalogue.gpu_or_assumed(name)
    low, high = (
        replace(device, power_limit_W=device.idle_power_W + 1 + part * (device.peak_power_W - device.idle_power_W - 1))
        for part in sorted((a, b))
    )
    work = builtin("resnet50", None)
    slow, fast, free = (catalogue_curve(work, each) for each in (low, high, device))
    for batch in (1, 16, 256):
        assert slow.seconds(batch) >= fast.seconds(batch) * (1 - 1e-9) >= free.seconds(batch) * (1 - 1e-6)
    for busy in (0.0, 0.5, 1.0):
        watts = [energy.device_watts(power.limited(each), busy) for each in (low, high, device)]
        assert watts[0] <= watts[1] + 1e-6 and watts[1] <= watts[2] + 1e-6
        assert low.power_limit_W is not None and watts[0] <= low.power_limit_W + 1e-6


@pytest.mark.parametrize("name", ["a100", "v100", "h100-sxm5-80gb", "p100", "mi300x"])
def test_energy_has_an_optimum_between_the_idle_and_the_peak_power(name: str) -> None:
    device = catalogue.gpu_or_assumed(name)
    reach = range(int(device.idle_power_W) + 1, int(device.peak_power_W) + 1)
    found = [power.under_limit(replace(device, power_limit_W=float(limit))) for limit in reach]
    used = [point.seconds * point.power_W for point in found]
    best = used.index(min(used))
    assert 0 < best < len(used) - 1 and used[best] < 0.9 * used[-1]
    # A limit at the peak power has no effect.
    assert found[-1].seconds == pytest.approx(1.0)
    assert power.slowed(replace(device, power_limit_W=device.peak_power_W)).fp32_FLOPs == pytest.approx(
        device.fp32_FLOPs
    )


@pytest.mark.parametrize(("minimize", "device"), [("Time", A100), ("Energy", LIMITED), ("Carbon", LIMITED)])
def test_objective_chooses_between_limits(minimize: Any, device: str) -> None:
    cluster = view(NODE, {**NODE, "powerLimit": 250})
    found = decided(replace(ALONE, minimize=minimize), cluster)
    assert [group.device for group in found.chosen.groups] == [device]


def test_deadline_excludes_a_limit_that_is_too_slow() -> None:
    slow_s, fast_s = (on(limit).chosen.prediction.total_p90_s for limit in (150, None))
    request = replace(ALONE, minimize="Energy", deadline_s=20 + (slow_s + fast_s) / 2)
    found = decided(request, view(NODE, {**NODE, "powerLimit": 150}))
    assert [group.device for group in found.chosen.groups] == [A100]


def test_measurement_belongs_to_its_limit() -> None:
    """A profile under a limit is no measurement of the same GPU under another one, but predicts it."""
    measured = Learned(points=(LearnedPoint(512, 0.1), LearnedPoint(256, 0.051)))
    under, free = on(250, **{LIMITED: measured}), on(None, **{LIMITED: measured})
    assert under.chosen.prediction.basis == "profile" and free.chosen.prediction.basis == "catalogue"
    assert under.chosen.prediction.compute_s == pytest.approx(0.1, rel=0.01)
    assert 0.08 < free.chosen.prediction.compute_s < 0.1


def test_wrong_label_leaves_its_node_out_with_one_doubt() -> None:
    good, bad = {**NODE, "count": 2}, {**NODE, "name": "bad", "labels": {"dljob.dev/power-limit": "4000"}}
    found = decided(ALONE, view(good, bad))
    doubts = [refusal for refusal in found.refusals if "power-limit" in refusal.reason]
    assert [refusal.summary for refusal in doubts] == [f"1 x {A100}"]
    assert "node bad: found '4000'" in doubts[0].reason
    assert "node bad: found '4000'" in rejected(ALONE, view(bad)).message


@pytest.mark.parametrize(
    ("device", "name", "matches"),
    [
        (LIMITED, A100, True),
        (LIMITED, "a100", True),
        (LIMITED, "NVIDIA A100 SXM4 40GB", True),
        (LIMITED, LIMITED, True),
        (LIMITED, "a100-sxm4-40gb@250W", True),
        (LIMITED, f"{A100}@300W", False),
        (LIMITED, T4, False),
        (A100, LIMITED, False),
        ("NVIDIA-X9000@250W", "NVIDIA-X9000", True),
        ("NVIDIA-X9000@250W", "NVIDIA-X9", False),
        (f"{A100}@1200MHz", A100, True),
        (f"{A100}@1200MHz", "a100@1200MHz", True),
        (f"{A100}@1200MHz", LIMITED, False),
        (f"{A100}@1200MHz@250W", "a100", True),
        (f"{A100}@1200MHz@250W", LIMITED, True),
        (f"{A100}@1200MHz@250W", f"{A100}@1200MHz", True),
        (f"{A100}@1200MHz@250W", f"{A100}@1050MHz@250W", False),
        (A100, f"{A100}@1200MHz", False),
    ],
)
def test_name_without_a_limit_matches_all_limits(device: str, name: str, matches: bool) -> None:
    assert wanted(device, [name]) == matches


@pytest.mark.parametrize(
    ("node", "minimize", "advises"),
    [
        (NODE, "Energy", True),
        (NODE, "Carbon", True),
        (NODE, "Time", False),
        (NODE, "Cost", False),
        ({**NODE, "powerLimit": 100}, "Energy", True),
        ({**NODE, "powerLimit": 200}, "Energy", False),
        ({**NODE, "device": T4}, "Energy", False),
        ({**NODE, "device": "NVIDIA-X9000", "gpu": True}, "Energy", False),
        ({"device": "cpu", "cpu": 4, "memory": "64Gi"}, "Energy", False),
    ],
    ids=["energy", "carbon", "time", "hours are paid", "too low", "good", "narrow range", "unknown", "CPUs"],
)
def test_plan_that_minimizes_energy_advises_a_power_limit(node: dict[str, Any], minimize: Any, advises: bool) -> None:
    found = decided(replace(ALONE, minimize=minimize, global_batch=256), view(node))
    assert (found.power_advice is not None) == advises == bool(found.power_limits)


def test_advice_names_the_limit_and_its_effect() -> None:
    found = on(None, replace(ALONE, minimize="Energy"))
    pattern = rf"\d+ W on {A100} \(now 400 W\): \d+ % less energy for \d+ % more time \(.* instead of .*\)\. .*"
    assert re.fullmatch(pattern, found.power_advice or "")
    now, *others = found.power_limits
    assert now.now and now.prediction is found.chosen.prediction
    (advised,) = [each for each in others if each.advised]
    assert advised.prediction.total_s <= 1.1 * now.prediction.total_s
    assert (advised.prediction.energy_J or 0) < 0.95 * joules(found)
    assert [each.prediction.total_s for each in others] == sorted(each.prediction.total_s for each in others)


def test_too_low_limit_is_advised_to_be_raised() -> None:
    found = on(100, replace(ALONE, minimize="Energy"))
    assert "(now 100 W)" in (found.power_advice or "") and "% less time" in (found.power_advice or "")


def test_prediction_under_an_advised_limit_is_that_of_nodes_with_this_limit() -> None:
    """The advice comes true: the prediction that it shows is that of a node with the label."""
    request = replace(ALONE, minimize="Energy", total_steps=10**5, fixed=(FixedChoice(A100, 1, 1, None),))
    for each in on(None, request).power_limits[1:]:
        found = on(float(each.limits.removesuffix(" W")), request)
        assert found.chosen.prediction.total_s == pytest.approx(each.prediction.total_s, rel=0.02)
        assert joules(found) == pytest.approx(each.prediction.energy_J or 0, rel=0.02)


@settings(max_examples=15, deadline=None)
@given(st.floats(1.02, 3.0))
def test_advised_limit_is_the_best_that_meets_the_deadline(slack: float) -> None:
    request = replace(ALONE, minimize="Energy", fixed=(FixedChoice(A100, 1, 1, None),))
    p90_s = on(None, request).chosen.prediction.total_p90_s
    found = on(None, replace(request, deadline_s=20 + slack * p90_s))
    advised = [each for each in found.power_limits if each.advised]
    saving = (each for each in found.power_limits if each.prediction.total_p90_s <= slack * p90_s)
    best_J = min((each.prediction.energy_J or 0 for each in saving), default=joules(found))
    if advised:
        assert advised[0].prediction.total_p90_s <= slack * p90_s
        assert (advised[0].prediction.energy_J or 0) <= best_J * (1 + 1e-9)
    else:
        assert slack < 1.1


def test_plan_that_misses_its_deadline_has_no_advice() -> None:
    found = on(None, replace(ALONE, minimize="Energy", deadline_s=30.0))
    assert found.warning is not None and found.power_advice is None


def test_price_of_energy_makes_advice_for_the_least_cost() -> None:
    dear = replace(ALONE, minimize="Cost", prices=Prices({A100: 0.01}, usd_per_kwh=1.0))
    assert "% less cost" in (on(None, dear).power_advice or "")


def test_measured_time_and_power_change_by_the_same_factors() -> None:
    measured = Learned(points=(LearnedPoint(512, 0.2), LearnedPoint(256, 0.1)), computing_W=390.0)
    found = on(None, replace(ALONE, minimize="Energy"), **{A100: measured})
    now, *others = found.power_limits
    for each in others:
        assert each.prediction.compute_s > now.prediction.compute_s
        assert (each.prediction.energy_J or 0) < (now.prediction.energy_J or 0)


def test_several_types_of_gpus_have_one_advice_each() -> None:
    v100 = "Tesla-V100-SXM2-32GB"
    groups = (FixedChoice(A100, 1, 1, None), FixedChoice(v100, 1, 1, None))
    cluster = view({**NODE, "bandwidth": "25G"}, {**NODE, "device": v100, "bandwidth": "25G"})
    found = decided(replace(RESNET, minimize="Energy", total_steps=10**4, fixed=groups), cluster)
    now, advised = found.power_limits
    assert now.limits == f"400 W on {A100}, 300 W on {v100} (now)" and advised.advised
    assert found.power_advice is not None and (A100 in found.power_advice or v100 in found.power_advice)


def test_limit_has_no_effect_on_a_step_that_its_host_bounds() -> None:
    """Seen before: advice for a small model scaled the framework's overhead, which no limit of a GPU changes."""
    small = replace(ALONE, minimize="Energy", global_batch=64, fixed=(FixedChoice(A100, 1, 1, None),))
    now, *others = on(None, small).power_limits
    assert others
    assert [each.prediction.step_s for each in others] == pytest.approx([now.prediction.step_s] * len(others), rel=1e-3)


def test_status_shows_the_advice_within_its_bound() -> None:
    """Fixed bug: only ``dljob plan`` printed the advice."""
    job, found = DLJobSpec.model_validate(MINIMAL), on(None, replace(ALONE, minimize="Energy"))
    assert found.power_advice is not None
    assert plan_status(job, found, 1, "digest").power_advice == found.power_advice
    assert plan_status(job, on(None), 1, "digest").power_advice is None
    long = plan_status(job, replace(found, power_advice="w" * 5000), 1, "digest")
    assert PlanStatus.model_validate(long.manifest()) == long
