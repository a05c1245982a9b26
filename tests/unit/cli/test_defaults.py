"""Tests of reading the administrator's defaults from the pods of operators."""

import json
from typing import Any

import pytest

from dljob.api.defaults import NO_DEFAULTS
from dljob.client.errors import BadInputError
from dljob.client.operator_pods import (
    DEFAULTS_VARIABLE,
    NAMESPACES_VARIABLE,
    TEMPLATES_VARIABLE,
    of_namespace,
    operator_pods,
    templates_of_namespace,
)
from support.manifests.helm_chart import JOB_DEFAULTS, one, render

Json = dict[str, Any]


def pod(name: str, defaults: Json | str | None, namespaces: str = "", **labels: str) -> Json:
    env = [{"name": NAMESPACES_VARIABLE, "value": namespaces}, {"name": "DLJOB_NAMESPACE", "valueFrom": {}}]
    if defaults is not None:
        text = defaults if isinstance(defaults, str) else json.dumps(defaults)
        env.append({"name": DEFAULTS_VARIABLE, "value": text})
    marks = {"app.kubernetes.io/name": "dljob", **labels}
    return {
        "metadata": {"name": name, "namespace": "system", "labels": marks},
        "spec": {"containers": [{"name": "proxy"}, {"name": "operator", "env": env}]},
    }


BATCH = {"scheduling": {"priorityClassName": "batch"}}
OTHER = {"scheduling": {"priorityClassName": "other"}}


def test_the_operator_of_the_chart_is_found() -> None:
    template = one(render({"jobDefaults": JOB_DEFAULTS}), "Deployment")["spec"]["template"]
    found = operator_pods([{"metadata": {**template["metadata"], "name": "o"}, "spec": template["spec"]}])
    assert of_namespace(found, "any").manifest() == JOB_DEFAULTS


@pytest.mark.parametrize(
    ("pods", "namespace", "expected"),
    [
        ([], "a", {}),
        ([pod("o", None)], "a", {}),
        ([pod("o", BATCH)], "a", BATCH),
        ([pod("o", BATCH), pod("p", BATCH)], "a", BATCH),
        ([pod("o", BATCH, "a, b"), pod("p", OTHER, "c")], "b", BATCH),
        ([pod("o", BATCH, "a"), pod("p", OTHER, "c")], "d", {}),
        ([pod("o", BATCH, **{"app.kubernetes.io/name": "other"})], "a", {}),
    ],
)
def test_defaults_are_those_of_the_operator_of_the_namespace(pods: list[Json], namespace: str, expected: Json) -> None:
    assert of_namespace(operator_pods(pods), namespace).manifest() == expected
    if not expected:
        assert of_namespace(operator_pods(pods), namespace) == NO_DEFAULTS


@pytest.mark.parametrize(
    ("pods", "words"),
    [
        ([pod("o", BATCH), pod("p", OTHER)], ("system/o, system/p", "namespace a", "--defaults FILE")),
        ([pod("o", {"mascot": 1})], ("system/o", "jobDefaults.mascot", "--defaults FILE")),
        ([pod("o", "{")], ("system/o", "--defaults")),
    ],
)
def test_defaults_that_are_unclear_are_reported(pods: list[Json], words: tuple[str, ...]) -> None:
    with pytest.raises(BadInputError) as refusal:
        of_namespace(operator_pods(pods), "a")
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def with_templates(name: str, text: str, namespaces: str = "") -> Json:
    found = pod(name, None, namespaces)
    found["spec"]["containers"][1]["env"].append({"name": TEMPLATES_VARIABLE, "value": text})
    return found


def test_templates_of_the_chart_are_found() -> None:
    entry = {"name": "new", "count": 2, "cpu": 4, "memory": "8Gi"}
    template = one(render({"autoscaling": {"nodeTemplates": [entry]}}), "Deployment")["spec"]["template"]
    pods = operator_pods([{"metadata": {**template["metadata"], "name": "o"}, "spec": template["spec"]}])
    assert [(node.name, node.cpu) for node in templates_of_namespace(pods, "any").nodes] == [("new-0", 4), ("new-1", 4)]


@pytest.mark.parametrize("pods", [[], [pod("o", None)], [with_templates("o", '[{"count": 1}]', "other")]])
def test_without_templates_there_are_none(pods: list[Json]) -> None:
    assert templates_of_namespace(operator_pods(pods), "a").nodes == ()


@pytest.mark.parametrize(
    "pods", [[with_templates("o", "{")], [with_templates("o", '[{"count": 1}]'), with_templates("p", "[]")]]
)
def test_templates_that_are_unclear_are_reported(pods: list[Json]) -> None:
    with pytest.raises(BadInputError, match="system/o"):
        templates_of_namespace(operator_pods(pods), "a")
