"""Tests of the chart values autoscaling: they reach the operator, and mistakes are refused."""

from typing import Any

import pytest

from dljob.app.settings import Settings
from support.manifests.helm_chart import one, render

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


@pytest.mark.parametrize(
    "changes",
    [{"count": 0}, {"count": None}, {"memory": 8}, {"zone": "a"}, {"devices": 65}, {"taints": [{"key": "a"}]}],
)
def test_bad_templates_are_refused(changes: Json) -> None:
    entry = {key: value for key, value in {**TEMPLATE, **changes}.items() if value is not None}
    with pytest.raises(Exception, match="nodeTemplates"):
        render({"autoscaling": {"nodeTemplates": [entry]}})
