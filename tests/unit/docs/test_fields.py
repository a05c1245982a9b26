"""Tests that fields in the documentation exist: in fragments of YAML, and as code in sentences, with their values.

Also that its Python can be parsed, and that files, metrics and functions of the trainer exist.
"""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
import yaml

from dljob.cluster import cluster_view
from support.documentation import ROOT, Code, blocks, commands, inline
from support.manifests.admission import closed, schema_of

Json = dict[str, Any]


def _without_required(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_required(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_required(value) for key, value in schema.items() if key != "required" or value == {}}


JOB, PROFILE = (_without_required(closed(schema_of(kind))) for kind in ("DLJob", "DLProfile"))
VALUES: Json = json.loads((ROOT / "charts/dljob/values.schema.json").read_text(encoding="utf-8"))
_SPEC: Json = JOB["properties"]["spec"]
TOP = {*_SPEC["properties"], *VALUES["properties"], "spec", "status"}
FOREIGN = ("integrations", "scrape_configs")
"""First keys of configurations of Kueue and Prometheus."""
_FIELD = re.compile(r"([a-z][A-Za-z0-9]*(?:(?:\[\])?\.[a-z][A-Za-z0-9]*)*)(?:: (\S.*))?")
FOREIGN_FIELDS = re.compile(
    r"spec\.(active|template\.metadata\.labels|schedulingGroup\.podGroupName|workloadRef)|release|securityContext"
    r"|spec: \{|watchNamespaces: \[the|.*\.(config\.id2label|json|pt2|py|safetensors)$"
    r"|runPolicy\.(cleanPodPolicy|managedBy|schedulingPolicy|suspend)|trainer\.(numNodes|numProcPerNode|resourcesPerNode)"
)
"""Fields of MPIJobs, PyTorchJobs, TrainJobs, Workloads, pods and monitors, and names of files."""


def schemas(root: Json, path: Sequence[str]) -> list[Json]:
    """Return the schemas of the field ``path`` in ``root``, also below the items of lists. The result is empty if none."""
    if not path:
        return [root]
    found = schemas(root["items"], path) if isinstance(root.get("items"), dict) else []
    below = root.get("properties", {}).get(path[0])
    if below is None and isinstance(root.get("additionalProperties"), dict):
        below = root["additionalProperties"]
    if root.get("x-kubernetes-preserve-unknown-fields"):
        found.append({})
    return found + (schemas(below, path[1:]) if below is not None else [])


def _valid(schema: Json, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def _fragments() -> Iterator[Any]:
    for block in blocks():
        if block.language == "yaml":
            for document in yaml.safe_load_all(block.text):
                if "kind" not in document and not document.keys() & set(FOREIGN):
                    yield pytest.param(document, id=block.place)


@pytest.mark.parametrize("fragment", _fragments())
def test_fragment_of_yaml_is_valid(fragment: Json) -> None:
    """A fragment is a part of a job, of its spec or of its trainer, values of the chart, or the nodes of a cluster."""
    if isinstance(fragment.get("nodes"), list):
        assert cluster_view(fragment)
        return
    whole = json.loads(json.dumps(fragment).replace('"\\u2026"', "[]").replace("\\u2026", "0" * 36))
    assert any(_valid(schema, whole) for schema in (JOB, _SPEC, _SPEC["properties"]["trainer"], VALUES))


@pytest.mark.parametrize("block", [pytest.param(each, id=each.place) for each in blocks() if each.language == "python"])
def test_python_can_be_parsed(block: Code) -> None:
    ast.parse(block.text)


def _problem(text: str) -> str | None:
    """Return what is wrong with code in a sentence if it is a field of a job, of a profile or of the chart."""
    found = _FIELD.fullmatch(text)
    path = found[1].replace("[]", "").split(".") if found else []
    if not found or path[0] not in TOP or (len(path) == 1 and not found[2]) or FOREIGN_FIELDS.match(text):
        return None
    known = [schema for root in (JOB, PROFILE, _SPEC, VALUES) for schema in schemas(root, path)]
    if not known:
        return "no such field"
    if found[2] is None or "…" in found[2]:
        return None
    try:
        value = yaml.safe_load(found[2])
    except yaml.YAMLError:
        return "no YAML"
    words = found[2].isupper()  # A placeholder, such as FILE.
    return None if words or any(_valid(schema, value) for schema in known) else f"no value of the field: {found[2]}"


def test_fields_in_sentences_exist_and_have_these_values() -> None:
    assert sum(_FIELD.fullmatch(code.text) is not None for code in inline()) > 1500
    wrong = [f"{code.place}: {code.text}: {problem}" for code in inline() if (problem := _problem(code.text))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("spec.nodes.max", None),
        ("nodes.most", "no such field"),
        ("parallelism.strategy: Sharded", None),
        ("parallelism.strategy: Shard", "no value of the field: Shard"),
        ("queue.deadlines: false", None),
    ],
)
def test_wrong_fields_are_found(text: str, problem: str | None) -> None:
    assert _problem(text) == problem


def test_values_in_helm_commands_exist() -> None:
    names = [
        (code.place, name)
        for code, words in commands()
        if words[0] in ("helm", "hack/helm", "hack/quickstart")
        for option, value in pairwise(words)
        if option in ("--set", "--set-string", "--set-json")
        for name in re.findall(r"(?:^|,)([A-Za-z][\w.]*)=", value)
    ]
    assert len(names) > 10
    assert not [each for each in names if not schemas(VALUES, each[1].split("."))]


def test_files_of_the_repository_exist() -> None:
    folders = (ROOT, ROOT / "operator", ROOT / "operator/contract", ROOT / "trainer-image")
    named = re.compile(
        r"(?:benchmarks|charts|crds|dlcontract|dljob|dltrain|docs|examples|hack|operator|tests|trainer-image)/[\w./-]+"
    )
    found = [(code.place, code.text) for code in inline() if named.fullmatch(code.text)]
    assert len(found) > 150
    assert not [each for each in found if not any((folder / each[1]).exists() for folder in folders)]


def test_metrics_exist() -> None:
    listed = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    named = {name for code in inline() for name in re.findall(r"\bdljob_(?:operator|trainer)_\w*[a-z]\b", code.text)}
    assert len(named) > 30
    assert not [name for name in named if f"`{name}`" not in listed and f"`{name}{{" not in listed]


def test_functions_of_the_trainer_exist() -> None:
    """Names after ``t.`` belong to the API for scripts. Names after ``dltrain.`` are its functions and packages."""
    package = ROOT / "trainer-image/dltrain"
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in [*(package / "train").rglob("*.py"), package / "elastic/ranks.py"]
    )
    named = {
        found
        for code in (*inline(), *blocks())
        for found in re.findall(r"(?<![\w.])(t|dltrain)\.([a-z]\w*)", code.text)
    }
    assert {("t", "wrap"), ("t", "steps"), ("dltrain", "report")} <= named
    functions = set(
        ast.literal_eval(re.search(r"__all__ = (\[.*?\])", (package / "__init__.py").read_text("utf-8"))[1])
    )
    for owner, name in named:
        if owner == "t":
            assert re.search(rf"\bdef {name}\(|\bself\.{name}\b", source), f"t.{name}"
        else:
            assert name in functions or any(package.glob(f"{name}*")), f"dltrain.{name}"
