"""Tests of the reasons why a candidate is worse than the chosen plan."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.cluster.energy import EnergySettings
from dljob.planner import Choice, Request
from dljob.planner.explanation.explain import worse
from support.planner_questions import DIGITS, decided, view

FOUR = view({"count": 4, "cpu": 16, "memory": "16Gi"})


def chosen(request: Request = DIGITS) -> Choice:
    return decided(request, FOUR).chosen


def changed(choice: Choice, cores: float = 1.0, **factors: float) -> Choice:
    """Return a plan with so many times the cores, and fields of the prediction multiplied by ``factors``."""
    fields: dict[str, Any] = {name: getattr(choice.prediction, name) * factor for name, factor in factors.items()}
    groups = tuple(replace(group, cores=cores * group.cores) for group in choice.groups)
    return replace(choice, groups=groups, prediction=replace(choice.prediction, **fields))


def test_faster_plan_with_more_cores_is_not_called_slower() -> None:
    """Regression: 'slower: 1.9ms per step instead of 2.13ms'."""
    found = chosen()
    faster = changed(found, 2, step_s=0.95, total_s=0.95)
    text = worse(DIGITS, faster, found)
    assert text.startswith("saves too little time: ") and " CPUs or GPUs instead of " in text
    assert worse(DIGITS, changed(found, 2, step_s=1.1, total_s=1.1), found).startswith("slower: ")


def test_whole_training_is_compared_if_its_order_is_another_than_that_of_steps() -> None:
    """Regression: '23 % slower: 47.4ms per step instead of 109ms', in a training of ten steps with an evaluation."""
    found = chosen()
    text = worse(DIGITS, changed(found, step_s=0.5, total_s=1.2), found)
    assert text.startswith("slower: ") and text.endswith(" for the whole training")
    assert " per step " in worse(DIGITS, changed(found, step_s=1.5, total_s=1.2), found)


@pytest.mark.parametrize(
    ("minimize", "name", "worst", "little"),
    [
        ("Energy", "energy_J", "more energy: ", "saves too little energy: "),
        ("Cost", "cost_usd", "more expensive: $", "saves too little money: $"),
        ("Carbon", "carbon_g", "more carbon: ", "saves too little carbon: "),
    ],
)
def test_tie_is_named_with_the_time_that_decides_it(minimize: Any, name: str, worst: str, little: str) -> None:
    """Regression: 'more expensive: $95.6 instead of $97.3'."""
    request = replace(DIGITS, minimize=minimize)
    found = chosen(request)
    assert worse(request, changed(found, **{name: 1.5}), found).startswith(worst)
    text = worse(request, changed(found, total_s=2, **{name: 0.99}), found)
    assert text.startswith(little) and ", in " in text


def test_of_two_late_plans_the_later_one_is_called_later() -> None:
    """Regression: 'more expensive: $17.5 instead of $36.3', of a plan that misses the deadline by more."""
    request = replace(DIGITS, minimize="Cost", deadline_s=1.0)
    found = chosen(request)
    cheaper = changed(found, total_s=2, total_p90_s=2, cost_usd=0.5)
    assert worse(request, cheaper, found).startswith("later: ")
    in_time = replace(request, deadline_s=1e6)
    assert worse(in_time, changed(found, total_p90_s=1e9), found).startswith("misses the deadline: ")


def test_recomputation_that_saves_too_little_is_named() -> None:
    found = chosen()
    again = replace(changed(found, step_s=0.97, total_s=0.97), recomputes=True)
    assert worse(DIGITS, again, found).endswith(", with activation checkpointing")


def test_cheaper_plan_that_may_be_late_is_ruled_out_for_its_time() -> None:
    """Regression: a plan that saves energy and ends in time at the median was listed without the reason against it."""
    mixed = view(
        {"count": 1, "cpu": 16, "memory": "16Gi", "device": "cpu-fast"}, {"count": 1, "cpu": 2, "memory": "16Gi"}
    )
    energy = EnergySettings({"cpu-fast": 500.0})
    request = replace(DIGITS, minimize="Energy", energy=energy, nodes_max=1, total_steps=100_000)
    least = decided(request, mixed).chosen
    assert [group.device for group in least.groups] == ["cpu"]
    hurried = decided(replace(request, deadline_s=least.prediction.total_p90_s), mixed)
    assert [group.device for group in hurried.chosen.groups] == ["cpu-fast"]
    (reason,) = [refusal.reason for refusal in hurried.refusals if refusal.summary == least.summary]
    assert reason.startswith("misses the deadline: ") and reason.endswith(" (p90, with start-up)")
