"""Tests of the chart values queue.assignment and preemption, and of the settings that they make."""

from typing import Any

import pytest

from dljob.app.settings import Settings
from support.manifests.helm_chart import one, render


def settings_of(values: dict[str, Any]) -> Settings:
    [container] = one(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    return Settings.of({item["name"]: item.get("value", "made-up") for item in container["env"]})


@pytest.mark.parametrize(("values", "together"), [
    ({}, True), ({"queue": {"assignment": "InOrder"}}, False), ({"queue": {"assignment": "Together"}}, True),
])  # fmt: skip
def test_assignment_reaches_the_operator(values: dict[str, Any], together: bool) -> None:
    assert settings_of(values).assigns_together is together


@pytest.mark.parametrize(("values", "preempts"), [
    ({}, False), ({"preemption": "Never"}, False), ({"preemption": "LowerPriority"}, True),
])  # fmt: skip
def test_preemption_reaches_the_operator(values: dict[str, Any], preempts: bool) -> None:
    assert settings_of(values).preempts is preempts


@pytest.mark.parametrize("value", ["together", "Fair", "", True])
def test_other_assignments_are_refused(value: object) -> None:
    with pytest.raises(Exception, match="assignment"):
        render({"queue": {"assignment": value}})


@pytest.mark.parametrize("value", ["never", "Always", "", True])
def test_other_preemptions_are_refused(value: object) -> None:
    with pytest.raises(Exception, match="preemption"):
        render({"preemption": value})
