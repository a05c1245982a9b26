"""A namespace with the operator as a process beside it, nodes without machines, and the trainer's part to play."""

import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from hollow import HollowNodes
from kube import ROOT, Kubectl
from operator_process import OperatorProcess
from play import Play

Json = dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs DLJOB_TEST_KUBECONFIG; hack/test api sets it")
    for item in items:
        if "api" in item.keywords and "DLJOB_TEST_KUBECONFIG" not in os.environ:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def admin() -> Iterator[Kubectl]:
    """The cluster with our kinds, and with no other operator at work."""
    kubectl = Kubectl(os.environ["DLJOB_TEST_KUBECONFIG"])
    os.environ["KUBECONFIG"] = kubectl.kubeconfig
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        definition = yaml.safe_load(path.read_text())
        kubectl.apply(_without_rules(definition), flags=("--validate=false", "--server-side", "--force-conflicts"))
    kubectl.run("wait", "--for=condition=Established", "crd/dljobs.dljob.dev", "crd/dlprofiles.dljob.dev")
    others = json.loads(kubectl.run("get", "deployments", "-A", "-l", "app.kubernetes.io/name=dljob", "-o", "json"))
    for other in others["items"]:
        _scale(kubectl, other["metadata"], 0)
    yield kubectl
    for other in others["items"]:
        _scale(kubectl, other["metadata"], other["spec"]["replicas"])


def _scale(kubectl: Kubectl, meta: Json, replicas: int) -> None:
    kubectl.run("scale", "-n", meta["namespace"], "deployment", meta["name"], f"--replicas={replicas}")


def _without_rules(node: Any) -> Any:
    """Without CEL, as on a server before 1.25: what the operator checks itself is what these tests are about."""
    if isinstance(node, dict):
        return {k: _without_rules(v) for k, v in node.items() if k != "x-kubernetes-validations"}
    return [_without_rules(item) for item in node] if isinstance(node, list) else node


@pytest.fixture(scope="module")
def kubectl(admin: Kubectl) -> Iterator[Kubectl]:
    name = f"api-{uuid.uuid4().hex[:8]}"
    admin.run("create", "namespace", name)
    yield Kubectl(admin.kubeconfig, name)
    admin.run("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def nodes(kubectl: Kubectl) -> Iterator[HollowNodes]:
    found = HollowNodes(kubectl.namespace, 3)
    found.start()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def operator(
    kubectl: Kubectl, nodes: HollowNodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    found = OperatorProcess(kubectl.kubeconfig, kubectl.namespace, tmp_path_factory.mktemp("operator") / "log")
    found.start()
    yield found
    if found.running:
        assert found.stop() == 0, found.log


@pytest.fixture
def play(kubectl: Kubectl, operator: OperatorProcess) -> Play:
    return Play(kubectl)
