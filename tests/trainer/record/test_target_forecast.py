"""Tests of the predicted step at which a metric reaches its target."""

import random
from collections.abc import Callable
from math import exp, log

import pytest

from dlcontract import TargetForecast, Until
from dltrain.protocol.rank_messages import Evaluated
from dltrain.record.stopping_rule import StoppingRule
from dltrain.record.target_forecast import forecast

LAST = 800
CURVES: dict[str, tuple[Callable[[float], float], Until, float]] = {
    "power": (lambda s: 2 * s**-0.5 + 0.3, Until(metric="loss", at_most=0.36), 1111),
    "slow power": (lambda s: 3 * s**-0.3 + 0.1, Until(metric="loss", at_most=0.35), 3949),
    "hyperbola": (lambda s: 50 / s + 0.5, Until(metric="loss", at_most=0.53), 1667),
    "exponential": (lambda s: 0.95 - 0.85 * exp(-s / 600), Until(metric="accuracy", at_least=0.9), 1700),
    "logarithm": (lambda s: 0.2 + 0.08 * log(s), Until(metric="accuracy", at_least=0.8), 1808),
}


def values(
    curve: Callable[[float], float], count: int, noise: float = 0.002, seed: int = 1
) -> list[tuple[float, float]]:
    draw = random.Random(seed)
    steps = [k * LAST / count for k in range(1, count + 1)]
    return [(step, curve(step) + draw.gauss(0, noise)) for step in steps]


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("count", [20, 500])
def test_interval_contains_the_step_of_the_target(name: str, count: int) -> None:
    curve, until, truth = CURVES[name]
    found = [forecast(values(curve, count, seed=seed), until) for seed in range(20)]
    made = [one for one in found if one is not None]
    assert len(made) >= 19
    right = [one for one in made if one.earliest_step <= truth <= one.latest_step]
    assert len(right) >= 18, [one for one in made if one not in right]
    errors = sorted(abs(one.step - truth) / truth for one in made)
    assert errors[len(errors) // 2] < 0.05


@pytest.mark.parametrize("seed", range(10))
def test_no_forecast_without_a_curve_that_reaches_the_target(seed: int) -> None:
    until = Until(metric="accuracy", at_least=0.9)
    assert forecast(values(lambda s: 0.8 - 0.7 * exp(-s / 200), 20, seed=seed), until) is None, "it saturates below"
    assert forecast(values(lambda _: 0.5, 50, 0.1, seed), until) is None, "noise"
    assert forecast(values(lambda s: 0.9 - 0.0005 * s, 50, seed=seed), until) is None, "it falls"
    assert forecast([(s, 0.5) for s in range(1, 50)], until) is None
    curve, target, _ = CURVES["exponential"]
    assert forecast(values(curve, 11, seed=seed), target) is None, "too few values"


def test_target_that_noise_has_hidden_so_far_is_near() -> None:
    found = forecast(values(lambda s: 2 * s**-0.5 + 0.3, 50), Until(metric="loss", at_most=0.372))
    assert found is not None and found.earliest_step == LAST and found.step < 1.05 * LAST


def test_rule_shows_the_last_and_the_best_value_and_the_forecast() -> None:
    rule = StoppingRule(Until(metric="accuracy", at_least=0.9))
    assert rule.progress() is None
    curve, _, truth = CURVES["exponential"]
    for step in range(40, 801, 40):
        rule.record(Evaluated(rank=0, step=step, accuracy=curve(step)))
    found = rule.progress()
    assert found is not None and found.value == found.best == curve(800) and found.forecast is not None
    assert found.forecast.earliest_step <= truth <= found.forecast.latest_step
    rule.record(Evaluated(rank=0, step=840, accuracy=0.5))
    later = rule.progress()
    assert later is not None and (later.value, later.best) == (0.5, curve(800))
    assert isinstance(later.forecast, TargetForecast | None)
