"""Tests of the Helm chart: lint, valid objects for every Kubernetes version, and safe defaults."""

from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

import helm_engine
from dljob.api import crd
from dljob.api.defaults import JobDefaults
from support.manifests.admission import refusals
from support.manifests.helm_chart import CHART, MONITORED, WAYS, of_kind, one, render
from support.manifests.schema_validation import assert_valid

Json = dict[str, Any]
PROMETHEUS_OPERATOR = "monitoring.coreos.com/v1"


def test_chart_passes_lint() -> None:
    report = helm_python.lint(CHART, MONITORED, strict=True)
    assert report["errors"] == []


@pytest.mark.parametrize("way", WAYS)
def test_objects_are_valid_for_every_kubernetes_version(way: str) -> None:
    objects = render(WAYS[way])
    assert one(objects, "Deployment")
    for manifest in objects:
        if manifest["apiVersion"] != PROMETHEUS_OPERATOR:
            assert_valid(manifest)


@pytest.mark.parametrize("way", WAYS)
def test_every_object_has_labels_and_a_namespace(way: str) -> None:
    cluster_wide = {
        "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding", "PriorityClass",
    }  # fmt: skip
    for manifest in render(WAYS[way], namespace="somewhere"):
        metadata = manifest["metadata"]
        assert metadata["labels"]["app.kubernetes.io/name"] == "dljob"
        if manifest["kind"] in cluster_wide:
            assert "namespace" not in metadata
        elif manifest["kind"] not in ("Role", "RoleBinding"):
            assert metadata["namespace"] == "somewhere"


def test_notes_show_a_job_that_needs_no_shared_volume() -> None:
    """Fixed bug: the plan of the job could have several nodes, and the indented end of its text ended it in no shell."""
    texts = helm_engine.render(CHART, "dljob", "dljob-system", {})
    [notes] = [text for path, text in texts.items() if path.endswith("NOTES.txt")]
    manifest = notes.split("kubectl apply -f - <<END\n")[1].split("\nEND\n")[0]
    job = yaml.safe_load(manifest)
    assert refusals(job) == []
    assert job["spec"]["nodes"]["max"] == 1


def test_operator_goes_before_the_pods_of_jobs() -> None:
    """On a full node, neither the scheduler nor the kernel prefers a job's pod to the operator's."""
    [made] = [each for each in of_kind(render(), "PriorityClass") if each["value"] > 0]
    assert not any(each.get("globalDefault") for each in of_kind(render(), "PriorityClass"))
    for values, name in (
        ({}, made["metadata"]["name"]),
        ({"priorityClassName": "system-cluster-critical"}, "system-cluster-critical"),
        ({"priorityClass": {"create": False}}, None),
        ({"singleNamespaceInstall": True}, None),
    ):
        objects = render(values)
        pod = one(objects, "Deployment")["spec"]["template"]["spec"]
        assert pod.get("priorityClassName") == name
        assert sum(each["value"] > 0 for each in of_kind(objects, "PriorityClass")) == (values == {})
    assert (
        one(render(), "Deployment")["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        == "500m"
    )


def test_priority_classes_have_different_names_in_a_namespace_with_a_long_name() -> None:
    """Fixed bug: both names were cut to the same 63 characters, so that Helm could not install the chart."""
    objects = render(release="machine-learning-platform", namespace="n" * 63)
    names = {each["value"]: each["metadata"]["name"] for each in of_kind(objects, "PriorityClass")}
    assert len(set(names.values())) == 2 and max(map(len, names.values())) <= 63
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert env["DLJOB_PROBE_PRIORITY_CLASS"] == names[-1000]


@pytest.mark.parametrize("way", ["monitored", "one namespace", "two namespaces", "brought along"])
def test_names_of_digits_are_texts(way: str) -> None:
    """Regression: the API server rejected the objects of a release, or in a namespace, with such a name."""
    values = {**WAYS[way], "nameOverride": "7", "fullnameOverride": "trainer"}
    for manifest in render(values, release="2024", namespace="123"):
        if manifest["apiVersion"] != PROMETHEUS_OPERATOR:
            assert_valid(manifest)
        metadata = manifest["metadata"]
        texts = [metadata["name"], metadata.get("namespace", ""), *metadata["labels"].values()]
        assert all(isinstance(text, str) for text in texts), metadata


def test_large_numbers_are_integers() -> None:
    """Regression: the chart wrote a million as 1e+06, which is no integer."""
    monitor = {"metrics": {"podMonitor": {"enabled": True, "sampleLimit": 1_000_000}}}
    assert repr(one(render(monitor), "PodMonitor")["spec"]["sampleLimit"]) == "1000000"
    pod = one(render({"terminationGracePeriodSeconds": 1_000_000}), "Deployment")["spec"]["template"]["spec"]
    assert repr(pod["terminationGracePeriodSeconds"]) == "1000000"


def test_defaults_are_secure() -> None:
    pod = one(render(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]
    assert not any("hostPath" in volume for volume in pod["volumes"])


def test_any_uid_can_be_set() -> None:
    pod = one(render({"podSecurityContext": {"runAsUser": 54321}}), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == 54321 and pod["securityContext"]["runAsNonRoot"] is True


def test_selectors_match_pods() -> None:
    objects = render({**MONITORED, "podDisruptionBudget": {"enabled": True}, "replicas": 2})
    deployment = one(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        one(objects, "Service")["spec"]["selector"],
        one(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        one(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    service_labels = one(objects, "Service")["metadata"]["labels"]
    assert one(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items() <= service_labels.items()


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({"repository": "a/b"}, "a/b:0.2.0"),
        ({"repository": "a/b", "tag": "2"}, "a/b:2"),
        ({"repository": "a/b", "tag": "2", "digest": f"sha256:{'f' * 64}"}, f"a/b@sha256:{'f' * 64}"),
    ],
)
def test_image_reference_follows_from_values(image: Json, reference: str) -> None:
    objects = render({"image": image, "trainer": {"image": image}})
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == reference
    assert {"name": "DLJOB_TRAINER_IMAGE", "value": reference} in container["env"]


def test_crds_match_the_generated_files() -> None:
    for found, expected in zip(of_kind(render(), "CustomResourceDefinition"), crd.definitions(), strict=True):
        assert found["spec"] == expected["spec"]
        assert found["metadata"]["name"] == expected["metadata"]["name"]
        assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize(
    ("crds", "count", "kept"), [({"keep": False}, 2, False), ({"enabled": False}, 0, False), ({}, 2, True)]
)
def test_crds_can_be_omitted_or_deleted_with_the_release(crds: Json, count: int, kept: bool) -> None:
    found = of_kind(render({"crds": crds}), "CustomResourceDefinition")
    assert len(found) == count
    assert all(("annotations" in d["metadata"]) is kept for d in found)


def tolerations(*entries: Json) -> Json:
    return {"jobDefaults": {"scheduling": {"tolerations": [*entries]}}}


# Invalid values, and the words of the chart's error message.
BAD: dict[str, tuple[Json, tuple[str, ...]]] = {
    "unknown value": ({"replica": 2}, ("replica",)),
    "unknown value inside": ({"metrics": {"prot": 1}}, ("prot",)),
    "wrong type": ({"replicas": "two"}, ("replicas", "integer")),
    "privileged port": ({"metrics": {"port": 80}}, ("port", "1,024")),
    "tag in the repository": ({"image": {"repository": "a/b:1"}}, ("repository",)),
    "bad digest": ({"image": {"digest": "abc"}}, ("digest",)),
    "unknown log level": ({"operator": {"logLevel": "loud"}}, ("logLevel", "debug")),
    "label of the selector": (
        {"podLabels": {"team": "a", "app.kubernetes.io/name": "other"}}, ("podLabels", "app.kubernetes.io/name"),
    ),
    "two without a leader": ({"replicas": 2, "leaderElection": {"enabled": False}}, ("replicas", "maximum")),
    "source that is no peer": ({"metrics": {"allowedSources": [{"cidr": "10.0.0.0/8"}]}}, ("allowedSources", "cidr")),
    "default of an unknown field": ({"jobDefaults": {"runPolicy": {"backoffLimit": 3}}}, ("backoffLimit",)),
    "unknown default": ({"jobDefaults": {"scheduling": {"disruption": "Never"}}}, ("disruption", "Avoid")),
    "default that is no label": ({"jobDefaults": {"scheduling": {"nodeSelector": {"a b": "c"}}}}, ("nodeSelector",)),
    "toleration of nothing": ({"jobDefaults": {"scheduling": {"tolerations": [{"value": "x"}]}}}, ("tolerations",)),
    "text for seconds": ({"jobDefaults": {"runPolicy": {"ttlSecondsAfterFinished": "1h"}}}, ("integer",)),
    "free energy": ({"jobDefaults": {"prices": {"usdPerKwh": 0}}}, ("usdPerKwh",)),
    "architecture of another name": ({"nodes": {"architectures": ["x86_64"]}}, ("architectures", "amd64")),
    "no limit of faults": ({"nodeFaults": {"limit": 0}}, ("limit", "1")),
    "longest time below the first": (
        {"nodeFaults": {"leftOutSeconds": 7200, "maxLeftOutSeconds": 3600}}, ("maxLeftOutSeconds", "3600", "7200"),
    ),
    "weight of nothing": ({"queue": {"weights": {"team-a": 0}}}, ("team-a", "0.001")),
    "weight of no namespace": ({"queue": {"weights": {"Team A": 2}}}, ("Team A",)),
    "no bandwidth": ({"jobDefaults": {"topology": {"betweenZones": {"bandwidth": "0"}}}}, ("bandwidth",)),
    "no bandwidth with a unit": ({"jobDefaults": {"topology": {"betweenRacks": {"bandwidth": "0.0G"}}}}, ("bandwidth",)),
    "no bytes of scratch space": ({"jobDefaults": {"trainer": {"scratch": {"size": 0}}}}, ("scratch", "size")),
    "no source bandwidth": ({"jobDefaults": {"dataset": {"sourceBandwidth": "0"}}}, ("sourceBandwidth",)),
    "no scratch space": ({"jobDefaults": {"trainer": {"scratch": {"size": "0"}}}}, ("scratch", "size")),
    "two forms of carbon intensity": (
        {"jobDefaults": {"energy": {"carbon": {"gramsPerKwh": 0, "gramsPerKwhByHour": [1] * 24}}}},
        ("jobDefaults.energy.carbon", "gramsPerKwhByHour"),
    ),
    "unknown operator of a toleration": (tolerations({"key": "a", "operator": "In"}), ("tolerations", "Exists")),
    "unknown effect of a toleration": (tolerations({"key": "a", "effect": "Never"}), ("tolerations", "NoExecute")),
    "value that has no effect": (
        tolerations({"key": "a"}, {"key": "a", "operator": "Exists", "value": "x"}), ("tolerations[1].value", "Equal"),
    ),
    "seconds that have no effect": (
        tolerations({"key": "a", "tolerationSeconds": 0}), ("tolerations[0].tolerationSeconds", "NoExecute"),
    ),
    "monitor without service": (
        {"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}}, ("serviceMonitor", "service"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_values_are_rejected(case: str) -> None:
    values, words = BAD[case]
    with pytest.raises(helm_python.HelmError) as refusal:
        render(values)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_labels_of_the_pod_replace_those_that_select_nothing() -> None:
    labels = {"team": "a", "app.kubernetes.io/version": "mine"}
    texts = helm_engine.render(CHART, "dljob", "dljob-system", {"podLabels": labels})
    [text] = [text for path, text in texts.items() if path.endswith("/deployment.yaml")]
    pod = yaml.safe_load(text)["spec"]["template"]["metadata"]
    assert labels.items() <= pod["labels"].items() and text.count("app.kubernetes.io/version: mine") == 1
    assert pod["labels"]["app.kubernetes.io/name"] == "dljob"


def test_values_that_look_like_zero_are_accepted() -> None:
    for size in ("Auto", "10Gi", "0.5Gi", "100", "0.05G", 21474836480):
        assert render({"jobDefaults": {"trainer": {"scratch": {"size": size}}}})
    for bandwidth in ("250M", "0.5G", "100", "1.0Gi"):
        assert render({"jobDefaults": {"topology": {"betweenZones": {"bandwidth": bandwidth}}}})
    assert render(tolerations({"operator": "Exists"}, {"key": "a", "effect": "NoExecute", "tolerationSeconds": 0}))


def test_every_value_is_in_the_schema_and_the_readme() -> None:
    """A value missing in the schema would be rejected. A value missing in the README would not be found."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    with helm_python.Chart.load(CHART) as chart:
        schema = chart.schema
    assert schema is not None
    readme = (CHART / "README.md").read_text()
    for path, value in _leaves(values):
        node = schema
        for name in path.split("."):
            assert "properties" not in node or name in node["properties"], path
            node = node.get("properties", {}).get(name, {})
            if "properties" not in node:
                break
        assert f"`{path}`" in readme, f"README.md does not explain {path} (default {value!r})"


def test_every_value_of_the_schema_has_a_default() -> None:
    with helm_python.Chart.load(CHART) as chart:
        schema, values = chart.schema, chart.values
    assert schema is not None
    assert set(schema["properties"]) - {"global"} == set(values)


def _fields(schema: Json, definitions: Json) -> Json | None:
    """Return the nested names of the fields in a JSON schema; None for a value without fields."""
    for option in schema.get("anyOf", ()):
        if option.get("type") != "null" and "required" not in option:
            schema = option
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "items" in schema:
        return _fields(schema["items"], definitions)
    if "properties" not in schema or not isinstance(schema["properties"], dict):
        return None
    return {name: _fields(field, definitions) for name, field in schema["properties"].items()}


def test_schema_has_the_defaults_that_the_operator_reads() -> None:
    with helm_python.Chart.load(CHART) as chart:
        schema = chart.schema
    assert schema is not None
    model = JobDefaults.model_json_schema(by_alias=True)
    assert _fields(schema["properties"]["jobDefaults"], {}) == _fields(model, model["$defs"])


def test_readme_explains_every_default() -> None:
    def paths(fields: Json, path: str) -> Iterator[str]:
        for name, inner in fields.items():
            yield from paths(inner, f"{path}.{name}") if inner and name != "tolerations" else (f"{path}.{name}",)

    model = JobDefaults.model_json_schema(by_alias=True)
    readme = (CHART / "README.md").read_text()
    for path in paths(_fields(model, model["$defs"]) or {}, "jobDefaults"):
        assert f"| `{path}` |" in readme, f"README.md does not explain {path}"


def _leaves(values: Json, path: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in values.items():
        here = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and value and name not in ("labels", "resources"):
            found += _leaves(value, here)
        else:
            found.append((here, value))
    return found
