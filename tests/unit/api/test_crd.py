"""Tests of the generated CRDs: up to date, valid for every Kubernetes version, structural and documented."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

import generation
from dljob.api import DLJobSpec, DLJobStatus, crd
from dljob.api.change_rules import is_change_rule
from support.manifests.admission import closed, defaulted, schema_of
from support.manifests.schema_validation import assert_valid

Json = dict[str, Any]
KINDS = [(d["spec"]["names"]["kind"], d) for d in crd.definitions()]
MINIMAL = {"model": {"name": "mlp"}, "dataset": {"name": "digits"}, "globalBatchSize": 8, "epochs": 1}


def nodes(schema: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield every schema in a schema, with its path."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}".lstrip("."))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


ALL_NODES = [(f"{kind} {path}", node) for kind, _ in KINDS for path, node in nodes(schema_of(kind))]


def test_generated_files_are_up_to_date() -> None:
    assert generation.stale() == []


def test_check_detects_an_outdated_file(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**generation.outputs(), "crds/dljob.dev_dljobs.yaml": "something else\n"}
    monkeypatch.setattr(generation, "outputs", lambda: changed)
    diff = "\n".join(generation.stale())
    assert "crds/dljob.dev_dljobs.yaml (expected)" in diff and "+something else" in diff


@pytest.mark.parametrize(("kind", "definition"), KINDS)
def test_crd_is_valid_for_every_kubernetes_version(kind: str, definition: Json) -> None:
    assert_valid(definition)


@pytest.mark.parametrize(("kind", "definition"), KINDS)
def test_crd_round_trips_through_yaml(kind: str, definition: Json) -> None:
    assert yaml.safe_load(generation.definition_yaml(definition)) == definition


@pytest.mark.parametrize(("path", "node"), ALL_NODES, ids=[path for path, _ in ALL_NODES])
def test_schema_is_structural(path: str, node: Json) -> None:
    """Check the conditions of https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/."""
    unions = {"$ref", "anyOf", "oneOf", "allOf", "not", "nullable", "title"} & node.keys()
    if node.get("x-kubernetes-int-or-string"):
        # The only form of a union, with the types in this order only.
        assert "type" not in node and unions == {"anyOf"} and node["anyOf"] == [{"type": "integer"}, {"type": "string"}]
        return
    assert node["type"] in ("object", "array", "string", "integer", "number", "boolean") and not unions
    assert not ("properties" in node and "additionalProperties" in node)
    assert node["type"] != "array" or "items" in node
    assert all(isinstance(node.get(f"exclusive{bound}", False), bool) for bound in ("Minimum", "Maximum"))
    if node.get("x-kubernetes-list-type") == "map":
        assert set(node["x-kubernetes-list-map-keys"]) <= set(node["items"]["required"])


@pytest.mark.parametrize(("path", "node"), [(p, n) for p, n in ALL_NODES if "default" in n])
def test_defaults_are_valid_and_complete(path: str, node: Json) -> None:
    """API servers reject a CRD with a default that breaks its own schema. Defaults also contain all nested defaults."""
    jsonschema.Draft202012Validator(closed(node)).validate(node["default"])
    assert defaulted(node, node["default"]) == node["default"]


def test_lists_with_rules_inside_are_bounded() -> None:
    """API servers estimate CEL's cost from maxItems, and reject a CRD with a rule under an unbounded list."""
    for path, node in ALL_NODES:
        if node.get("type") == "array" and any(
            "x-kubernetes-validations" in inner for _, inner in nodes(node["items"])
        ):
            assert "maxItems" in node, path


BOUNDS = {
    "string": ("maxLength", "enum", "format"),
    "array": ("maxItems",),
    "object": ("maxProperties", "properties"),
}
UNBOUNDED = {
    # path, or the beginning of paths → why the API server need not bound the value
    "DLJob apiVersion": "the API server accepts only the versions that it serves",
    "DLJob kind": "the API server accepts only this kind",
    "DLJob metadata": "the API server bounds it",
    "DLJob spec.podTemplateOverrides[].spec": "the operator accepts a spec of at most 64 KiB: test_spec_is_bounded",
    "DLJob status": "only the operator writes it, and cuts texts that users influence; a bound would lose all of it",
    "DLProfile apiVersion": "the API server accepts only the versions that it serves",
    "DLProfile kind": "the API server accepts only this kind",
    "DLProfile metadata": "the API server bounds it",
    "DLProfile spec.model": "only the operator and administrators write it; a bound would not be an additive change",
    "DLProfile spec.device": "only the operator and administrators write it; a bound would not be an additive change",
}


def test_every_text_list_and_map_is_bounded() -> None:
    """Otherwise a user could fill the memory of the operator, or of the API server."""
    unbounded = [
        path for path, node in ALL_NODES if not set(BOUNDS.get(node.get("type", "string"), node)) & node.keys()
    ]
    excepted = {
        path: [name for name in UNBOUNDED if path == name or path.startswith((f"{name}.", f"{name}[]"))]
        for path in unbounded
    }
    assert [path for path, names in excepted.items() if not names] == []
    assert {name for names in excepted.values() for name in names} == UNBOUNDED.keys()


def test_every_quantity_may_be_an_integer() -> None:
    """Users of core/v1 write ``cpu: 2``. Every pattern of a quantity has a suffix such as Mi."""
    quantities = {path: node for path, node in ALL_NODES if "[KMGTPE]i" in node.get("pattern", "")}
    assert {path.rpartition(".")[2] for path in quantities} == {"cpu", "cpuLimit", "memory", "size", "stagingSize"}
    assert [path for path, node in quantities.items() if not node.get("x-kubernetes-int-or-string")] == []


def test_rules_only_use_fields_of_kubernetes_1_29() -> None:
    rules = [rule for _, node in ALL_NODES for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) >= 8
    assert all(set(rule) - {"messageExpression"} == {"rule", "message"} for rule in rules)
    assert all(is_change_rule(rule) for rule in rules if "messageExpression" in rule)
    assert not any("\n" in rule["message"] for rule in rules)


def test_every_spec_field_has_a_description() -> None:
    """``kubectl explain`` prints the descriptions. The descriptions of lists and maps cover their entries."""
    silent = [
        path for path, node in nodes(schema_of("DLJob", "spec")) if "description" not in node and path[-1:] != "]"
    ]
    assert [p for p in silent if p and not p.startswith("trainer.env[]")] == []


def test_defaults_of_server_and_operator_agree() -> None:
    """The server's defaults in a stored object are the same as the operator's."""
    stored = defaulted(schema_of("DLJob", "spec"), MINIMAL)
    assert DLJobSpec.model_validate(stored) == DLJobSpec.model_validate(MINIMAL)
    assert stored["planning"] == {"mode": "Auto", "uneven": True, "candidates": 5}
    assert stored["checkpoint"]["volume"] == {"size": "1Gi", "reclaimPolicy": "Retain"}


def test_status_is_valid_under_its_schema() -> None:
    """An operator that writes fields which its own schema prunes would write them forever."""
    jsonschema.Draft202012Validator(closed(schema_of("DLJob", "status"))).validate(DLJobStatus().manifest())


def test_printer_columns_show_the_main_fields() -> None:
    [version] = crd.job_definition()["spec"]["versions"]
    columns = [(c["name"], c.get("priority", 0)) for c in version["additionalPrinterColumns"]]
    assert [name for name, wide in columns if not wide] == [
        "Phase", "Nodes", "Ready", "Progress", "Remaining", "Restarts", "Age",
    ]  # fmt: skip
    assert [name for name, wide in columns if wide] == [
        "Plan", "Predicted", "Measured", "Checkpoint", "Position", "Starts", "Queue",
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "definition"), KINDS)
def test_paths_of_columns_and_scale_exist(kind: str, definition: Json) -> None:
    [version] = definition["spec"]["versions"]
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += version["subresources"].get("scale", {}).values()
    for path in paths:
        node = version["schema"]["openAPIV3Schema"]
        for name in path.removeprefix(".").split("."):
            if name == "metadata":
                break
            node = node["properties"][name]
        else:
            assert node["type"] in ("string", "integer", "number"), path


@pytest.mark.parametrize(
    ("name", "valid"),
    [("digits", True), ("a", True), ("a" * 40, True), ("a" * 41, False), ("a.b", False), ("1st", False)],
)
def test_job_name_is_validated(name: str, valid: bool) -> None:
    from support.manifests.admission import holds

    assert holds(crd.JOB_NAME_RULE.cel, {"metadata": {"name": name}}) is valid
    assert crd.JOB_NAME_RULE.holds(name) is valid


def test_categories_differ_from_names() -> None:
    """kubectl expands categories first, so ``get dljob NAME`` would request jobs and profiles of that name."""
    names = [definition["spec"]["names"] for _, definition in KINDS]
    words = [{n["kind"].lower(), n["plural"], n["singular"], *n["shortNames"]} for n in names]
    assert not {category for n in names for category in n["categories"]} & set().union(*words)
    assert len(set().union(*words)) == sum(len(w) for w in words)
