"""Tests of the chart value preemption and the setting that it makes."""

import pytest

from dljob.app.settings import Settings
from support.manifests.helm_chart import one, render


@pytest.mark.parametrize(("values", "preempts"), [
    ({}, False), ({"preemption": "Never"}, False), ({"preemption": "LowerPriority"}, True),
])  # fmt: skip
def test_value_reaches_the_operator(values: dict[str, str], preempts: bool) -> None:
    [container] = one(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = Settings.of({item["name"]: item.get("value", "made-up") for item in container["env"]})
    assert settings.preempts is preempts


@pytest.mark.parametrize("value", ["never", "Always", "", True])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(Exception, match="preemption"):
        render({"preemption": value})
