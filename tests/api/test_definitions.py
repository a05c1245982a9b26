"""Tests of the CRDs, their CEL rules and the examples in a real API server."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dljob.api import DLJobStatus, crd
from support.cluster.api_server import DEFINITIONS, Server
from support.cluster.kubectl import Kubectl
from support.manifests.admission import defaulted, schema_of
from support.specs.cases import BAD, CASES
from support.specs.small_specs import JOB, spec_of, with_field

Json = dict[str, Any]
EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))


pytestmark = pytest.mark.api


@pytest.fixture(scope="module")
def server(kubectl: Kubectl) -> Server:
    """Return the API server with the CRDs. No operator watches this module's namespace."""
    return Server(kubectl.kubeconfig, kubectl.namespace)


def job(name: str, spec: Json) -> Json:
    return {**JOB, "metadata": {"name": name}, "spec": spec}


def test_crds_are_structural_and_established(server: Server) -> None:
    for definition in crd.definitions():
        found = server.call("GET", f"{DEFINITIONS}/{definition['metadata']['name']}").body
        conditions = {c["type"]: c for c in found["status"]["conditions"]}
        assert conditions["Established"]["status"] == conditions["NamesAccepted"]["status"] == "True"
        assert "NonStructuralSchema" not in conditions
        stored = found["spec"]["versions"][0]["schema"]
        assert stored == definition["spec"]["versions"][0]["schema"], "the server stores every rule and default"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_are_admitted(path: Path, server: Server) -> None:
    [manifest] = [d for d in yaml.safe_load_all(path.read_text()) if d["kind"] == "DLJob"]
    answer = server.create(manifest)
    assert answer.code == 201, answer.body.get("message")
    assert answer.warnings == ()
    assert answer.body["spec"] == defaulted(schema_of("DLJob", "spec"), manifest["spec"]), (
        "the defaults match those of the unit tests"
    )


def test_deadline_must_be_a_moment(server: Server) -> None:
    for number, value in enumerate(("tomorrow", "2026-02-31T18:00:00Z", "2026-12-01", "2026-12-01T18:00:00")):
        answer = server.create(job(f"no-moment-{number}", spec_of({"scheduling": {"finishBy": value}})))
        assert answer.code == 422 and "finishBy" in answer.body["message"], value
    answer = server.create(job("moment", spec_of({"scheduling": {"finishBy": "2026-12-01T18:00:00+02:00"}})))
    assert answer.code == 201, answer.body.get("message")


@pytest.mark.parametrize("case", CASES)
def test_rules_are_enforced(case: str, server: Server) -> None:
    changes, words = CASES[case]
    answer = server.create(job(f"case-{list(CASES).index(case)}", spec_of(changes)))
    assert answer.code == (422 if words else 201), answer.body.get("message")
    assert words in answer.body.get("message", "")


@pytest.mark.parametrize("case", BAD)
def test_invalid_field_is_rejected(case: str, server: Server) -> None:
    path, value, words = BAD[case]
    answer = server.create(with_field(path, value))
    assert answer.code in (400, 422), answer.body
    message = answer.body["message"]
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["a" * 41, "a.b", "1st"])
def test_names_invalid_for_pods_are_rejected(name: str, server: Server) -> None:
    answer = server.create(job(name, spec_of({})))
    assert answer.code == 422 and "metadata.name must have at most 40 characters" in answer.body["message"]


def test_unknown_fields_are_pruned_without_strict_validation(server: Server) -> None:
    answer = server.create({**with_field("batchSize", 3), "metadata": {"name": "pruned"}}, validation="Warn")
    assert answer.code == 201 and "batchSize" not in answer.body["spec"]
    assert any("unknown field" in warning for warning in answer.warnings)


def test_scale_subresource_sets_the_maximum_nodes(server: Server) -> None:
    server.create(job("scaled", spec_of({"nodes": {"min": 2}})))
    scale = f"{server.jobs}/scaled/scale"
    assert server.call("GET", scale).body["spec"]["replicas"] == 10000, "the default is no limit"
    answer = server.call("PATCH", scale, {"spec": {"replicas": 4}}, "merge-patch+json")
    assert (answer.code, answer.body["spec"]["replicas"]) == (200, 4)
    assert server.call("GET", f"{server.jobs}/scaled").body["spec"]["nodes"] == {"min": 2, "max": 4}
    rejected = server.call("PATCH", scale, {"spec": {"replicas": 1}}, "merge-patch+json")
    assert rejected.code == 422 and "lower min or raise max" in rejected.body["message"]


def test_field_managers_own_their_overrides(server: Server) -> None:
    """Two field managers apply one override each, and neither removes the other's."""
    server.create(job("shared", spec_of({})))
    for manager in ("queue", "policy"):
        override = {"manager": manager, "metadata": {"labels": {manager: "x"}}}
        body = {**JOB, "metadata": {"name": "shared"}, "spec": {"podTemplateOverrides": [override]}}
        answer = server.call("PATCH", f"{server.jobs}/shared?fieldManager={manager}", body, "apply-patch+yaml")
        assert answer.code == 200, answer.body.get("message")
    found = server.call("GET", f"{server.jobs}/shared").body["spec"]["podTemplateOverrides"]
    assert [override["manager"] for override in found] == ["queue", "policy"]


def test_status_is_stored_as_written(server: Server) -> None:
    server.create(job("told", spec_of({})))
    status = DLJobStatus().manifest()
    answer = server.call(
        "PATCH", f"{server.jobs}/told/status?fieldValidation=Strict", {"status": status}, "merge-patch+json"
    )
    assert answer.code == 200 and answer.body["status"] == status
