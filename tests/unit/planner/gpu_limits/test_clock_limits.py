"""Tests of plans for GPUs whose nodes have a label with their highest clock."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.calibrate.learned import LearnedPoint
from dljob.cluster.prices import Prices
from dljob.planner import Decision, Learned, Request
from dljob.planner.types import FixedChoice
from support.planner_questions import A100, RESNET, decided, rejected, view

NODE: dict[str, Any] = {"device": A100, "devices": 1, "cpu": 16, "memory": "256Gi"}
SLOW, SLOWER = {**NODE, "clockLimit": 1050}, {**NODE, "clockLimit": 600}
CLOCKED = f"{A100}@1050MHz"
ALONE = replace(RESNET, total_steps=10**4, nodes_max=1)


def on(node: dict[str, Any], request: Request = ALONE, **learned: Learned) -> Decision:
    return decided(request, view(node), {("resnet50", name): found for name, found in learned.items()})


def devices(found: Decision) -> list[str]:
    return [group.device for group in found.chosen.groups]


def joules(found: Decision) -> float:
    assert found.chosen.prediction.energy_J is not None
    return found.chosen.prediction.energy_J


@pytest.mark.parametrize(("minimize", "device"), [("Time", A100), ("Energy", CLOCKED), ("Carbon", CLOCKED)])
def test_objective_chooses_between_clocks(minimize: Any, device: str) -> None:
    found = decided(replace(ALONE, minimize=minimize), view(NODE, SLOW))
    assert devices(found) == [device]


def test_cost_chooses_the_lower_clock_if_energy_is_expensive() -> None:
    cheap, dear = (Prices({A100: 0.01}, usd_per_kwh=usd) for usd in (0.001, 1.0))
    found = [devices(decided(replace(ALONE, minimize="Cost", prices=each), view(NODE, SLOW))) for each in (cheap, dear)]
    assert found == [[A100], [CLOCKED]]


def test_deadline_decides_between_the_clocks() -> None:
    """Energy is least at the lower clock. A plan that would be late at this clock runs at the highest."""
    slow_s, fast_s = (on(node).chosen.prediction.total_p90_s for node in (SLOW, NODE))
    assert fast_s < slow_s
    cluster = view(NODE, SLOW)
    for deadline_s, device in ((20 + 1.05 * slow_s, CLOCKED), (20 + (slow_s + fast_s) / 2, A100)):
        found = decided(replace(ALONE, minimize="Energy", deadline_s=deadline_s), cluster)
        assert devices(found) == [device]
        assert found.warning is None and found.chosen.prediction.total_p90_s <= deadline_s - 20


def test_very_low_clock_costs_energy() -> None:
    """Static power and the hosts draw for longer: below the optimum, a lower clock needs more energy."""
    request = replace(ALONE, minimize="Energy")
    assert joules(on(SLOW, request)) < min(joules(on(NODE, request)), joules(on(SLOWER, request)))
    assert devices(decided(request, view(SLOW, SLOWER))) == [CLOCKED]


def test_measurement_belongs_to_its_clock_and_predicts_others() -> None:
    measured = Learned(points=(LearnedPoint(512, 0.1), LearnedPoint(256, 0.051)))
    under, free = on(SLOW, **{CLOCKED: measured}), on(NODE, **{CLOCKED: measured})
    assert under.chosen.prediction.basis == "profile" and free.chosen.prediction.basis == "catalogue"
    assert under.chosen.prediction.compute_s == pytest.approx(0.1, rel=0.01)
    assert 0.075 < free.chosen.prediction.compute_s < 0.1
    backwards = on(SLOW, **{A100: Learned(points=(LearnedPoint(512, 0.1), LearnedPoint(256, 0.051)))})
    assert 0.1 < backwards.chosen.prediction.compute_s < 0.135


def test_both_limits_are_one_device_type() -> None:
    both = {**SLOW, "powerLimit": 150}
    found = on(both)
    assert devices(found) == [f"{CLOCKED}@150W"]
    slowest = max(on(each).chosen.prediction.total_s for each in (SLOW, {**NODE, "powerLimit": 150}))
    assert found.chosen.prediction.total_s == pytest.approx(slowest, rel=1e-3)


@pytest.mark.parametrize("clock", ["0", "abc", "1411", "5000"])
def test_wrong_label_leaves_its_node_out_with_one_doubt(clock: str) -> None:
    good, bad = {**NODE, "count": 2}, {**NODE, "name": "bad", "labels": {"dljob.dev/clock-limit": clock}}
    found = decided(ALONE, view(good, bad))
    doubts = [refusal for refusal in found.refusals if "clock-limit" in refusal.reason]
    assert [refusal.summary for refusal in doubts] == [f"1 x {A100}"]
    assert f"label dljob.dev/clock-limit of node bad: found '{clock}'" in doubts[0].reason
    assert f"node bad: found '{clock}'" in rejected(ALONE, view(bad)).message


@pytest.mark.parametrize(("name", "expected"), [("a100", CLOCKED), ("a100@1050MHz", CLOCKED)])
def test_spec_names_the_product_or_the_clock(name: str, expected: str) -> None:
    found = decided(replace(ALONE, minimize="Energy", devices=(name,)), view(NODE, SLOW))
    assert devices(found) == [expected]
    only = decided(replace(ALONE, minimize="Time", devices=("a100@1050MHz",)), view(NODE, SLOW))
    assert devices(only) == [CLOCKED]


def test_power_advice_for_clocked_gpus_comes_true() -> None:
    """A clock already saves energy, so that fewer power limits pay; those that do have the advised effect."""
    clocked = {**NODE, "clockLimit": 1380}  # above the clock that a busy GPU holds: no effect
    request = replace(ALONE, minimize="Energy", fixed=(FixedChoice(f"{A100}@1380MHz", 1, 1, None),))
    found = on(clocked, request)
    assert f"on {A100}@1380MHz (now 400 W)" in (found.power_advice or "")
    advised = next(each for each in found.power_limits if each.advised)
    limit = advised.limits.removesuffix(" W")
    fixed = (FixedChoice(f"{A100}@1380MHz@{limit}W", 1, 1, None),)
    followed = on({**clocked, "powerLimit": int(limit)}, replace(request, fixed=fixed))
    assert joules(followed) == pytest.approx(advised.prediction.energy_J or 0, rel=0.02)
