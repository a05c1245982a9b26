"""Tests of the chart value queue.assignment and the setting that it makes."""

import pytest

from dljob.app.settings import Settings
from support.manifests.helm_chart import one, render


@pytest.mark.parametrize(("values", "together"), [
    ({}, True), ({"queue": {"assignment": "InOrder"}}, False), ({"queue": {"assignment": "Together"}}, True),
])  # fmt: skip
def test_value_reaches_the_operator(values: dict[str, dict[str, str]], together: bool) -> None:
    [container] = one(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = Settings.of({item["name"]: item.get("value", "made-up") for item in container["env"]})
    assert settings.assigns_together is together


@pytest.mark.parametrize("value", ["together", "Fair", "", True])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(Exception, match="assignment"):
        render({"queue": {"assignment": value}})
