"""Tests of the chart value gangScheduling: the setting that it makes, and the permission that comes with it."""

from typing import Any

import pytest
import yaml

from dljob.app.settings import Settings
from dljob.render.gang import API_VERSIONS, GangScheduling
from support.manifests.helm_chart import CHART, of_kind, one, render

Json = dict[str, Any]
GROUPS = {value: {version.split("/")[0] for version in versions} for value, versions in API_VERSIONS.items()}


def pod_group_rules(values: Json) -> list[tuple[str, list[str], list[str]]]:
    """Return (kind of the role, API groups, verbs) of the rules about PodGroups."""
    roles = [role for kind in ("ClusterRole", "Role") for role in of_kind(render(values), kind)]
    rules = [(role["kind"], rule) for role in roles for rule in role.get("rules") or ()]
    return [(kind, rule["apiGroups"], rule["verbs"]) for kind, rule in rules if "podgroups" in rule["resources"]]


@pytest.mark.parametrize("value", GangScheduling)
def test_value_reaches_the_operator_with_exactly_its_permission(value: GangScheduling) -> None:
    values = {"gangScheduling": value.value}
    [container] = one(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    settings = Settings.of({item["name"]: item.get("value", "made-up") for item in container["env"]})
    assert settings.gang_scheduling is value
    assert {kind.api_version.split("/")[0] for kind in settings.pod_groups} == GROUPS.get(value, set())
    verbs = ["get", "list", "create", "patch"]
    assert pod_group_rules(values) == [("ClusterRole", [group], verbs) for group in GROUPS.get(value, ())]
    limited = pod_group_rules({**values, "watchNamespaces": ["a", "b"]})
    assert limited == 2 * [("Role", [group], verbs) for group in GROUPS.get(value, ())]


def test_default_is_none() -> None:
    assert pod_group_rules({}) == []
    assert yaml.safe_load((CHART / "values.yaml").read_text())["gangScheduling"] == "none"


@pytest.mark.parametrize("value", ["auto", "", True])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(Exception, match="gangScheduling"):
        render({"gangScheduling": value})
