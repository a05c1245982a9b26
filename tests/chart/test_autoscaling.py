"""Tests of the chart values autoscaling: they reach the operator, and mistakes are refused."""

from typing import Any

import pytest

from dljob.app.settings import Settings
from dljob.cluster.templates import MAX_NEW_NODES
from support.manifests.helm_chart import of_kind, one, render

Json = dict[str, Any]
TEMPLATE: Json = {
    "name": "gpu", "count": 4, "device": "NVIDIA-L4", "devices": 8, "cpu": 95.5, "memory": "370Gi", "bandwidth": "3G",
    "labels": {"pool": "gpu"}, "taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}],
}  # fmt: skip


def settings(values: Json) -> Settings:
    [container] = one(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    return Settings.of({item["name"]: item.get("value", "made-up") for item in container["env"]})


def test_templates_reach_the_operator() -> None:
    found = settings({"autoscaling": {"nodeTemplates": [TEMPLATE], "startTimeoutSeconds": 1200}})
    assert found.scale_up_s == 1200 and len(found.node_templates) == 4
    node = found.node_templates[0]
    assert (node.device, node.devices, node.cpu, node.labels) == ("NVIDIA-L4", 8, 95.5, {"pool": "gpu"})
    assert node.taints == (("nvidia.com/gpu", "present", "NoSchedule"),)


def test_default_has_no_templates() -> None:
    found = settings({})
    assert (found.node_templates, found.scale_up_s) == ((), 900)


def provisioning_rules(values: Json) -> list[tuple[str, str, list[str], list[str]]]:
    """Return (kind of the role, API group, resources, verbs) of the rules about ProvisioningRequests and PodTemplates."""
    roles = [role for kind in ("ClusterRole", "Role") for role in of_kind(render(values), kind)]
    return [
        (role["kind"], rule["apiGroups"][0], rule["resources"], rule["verbs"])
        for role in roles
        for rule in role.get("rules") or ()
        if {"provisioningrequests", "podtemplates"} & set(rule["resources"])
    ]


def test_provisioning_requests_are_off_by_default_and_come_with_their_permissions() -> None:
    assert settings({}).provisioning == () and provisioning_rules({}) == []
    on: Json = {"autoscaling": {"provisioningRequests": {"enabled": True}}}
    found = settings(on)
    assert found.provisioning_class == "best-effort-atomic-scale-up.autoscaling.x-k8s.io"
    assert [kind.kind for kind in found.provisioning] == ["ProvisioningRequest"]
    rules = [
        ("autoscaling.x-k8s.io", ["provisioningrequests"], ["get", "list", "watch", "create", "patch", "delete"]),
        ("", ["podtemplates"], ["get", "list", "create", "patch"]),
    ]
    assert provisioning_rules(on) == [("ClusterRole", *rule) for rule in rules]
    assert provisioning_rules({**on, "watchNamespaces": ["a"]}) == [("Role", *rule) for rule in rules]


def test_class_of_provisioning_requests_is_a_setting() -> None:
    name = "check-capacity.autoscaling.x-k8s.io"
    values: Json = {"autoscaling": {"provisioningRequests": {"enabled": True, "className": name}}}
    assert settings(values).provisioning_class == name
    values["autoscaling"]["provisioningRequests"]["className"] = "Not A Name"
    with pytest.raises(Exception, match="className"):
        render(values)


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 0}, {"count": None}, {"memory": 8}, {"zone": "a"}, {"devices": 65}, {"taints": [{"key": "a"}]},
        {"memory": "100Ki"}, {"memory": "64"}, {"memory": "0Gi"}, {"memory": "64GB"},
        {"cpu": 0}, {"cpu": "0"}, {"cpu": "0m"}, {"cpu": -1}, {"cpu": "two"}, {"device": None},
    ],
)  # fmt: skip
def test_bad_templates_are_refused(changes: Json) -> None:
    entry = {key: value for key, value in {**TEMPLATE, **changes}.items() if value is not None}
    with pytest.raises(Exception, match="nodeTemplates"):
        render({"autoscaling": {"nodeTemplates": [entry]}})


@pytest.mark.parametrize("memory", ["64Gi", "67108864Ki", "68719476736", "0.5Gi", "1Mi", "1.5T"])
def test_memory_of_a_template_is_a_quantity(memory: str) -> None:
    assert render({"autoscaling": {"nodeTemplates": [{**TEMPLATE, "memory": memory}]}})


@pytest.mark.parametrize(
    ("templates", "words"),
    [
        ([TEMPLATE, TEMPLATE], ("nodeTemplates[1].name", '"gpu"')),
        ([{**TEMPLATE, "name": name, "count": 1000} for name in "abc"], ("found 3000 nodes", "2000")),
    ],
)
def test_templates_that_do_not_go_together_are_refused(templates: list[Json], words: tuple[str, ...]) -> None:
    with pytest.raises(Exception, match="nodeTemplates") as refusal:
        render({"autoscaling": {"nodeTemplates": templates}})
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize("cpu", [0.5, 4, "4", "500m", "0.5", "95.5"])
def test_cpu_of_a_template_is_a_quantity(cpu: float | str) -> None:
    assert settings({"autoscaling": {"nodeTemplates": [{**TEMPLATE, "cpu": cpu}]}}).node_templates


def test_the_chart_and_the_operator_have_one_limit_of_nodes() -> None:
    templates = [{**TEMPLATE, "name": name, "count": MAX_NEW_NODES // 2} for name in "ab"]
    assert len(settings({"autoscaling": {"nodeTemplates": templates}}).node_templates) == MAX_NEW_NODES
