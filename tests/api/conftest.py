"""Fixtures of the API tests: a namespace with a local operator process and fake nodes.

Each module and each pytest worker has its own namespace and nodes. They only share the CRDs.
"""

import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import ROOT, Kubectl
from support.cluster.live_job import Play
from support.cluster.operator_process import OperatorProcess
from support.operator_forks.forked_operator import ForkedOperator

Json = dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs DLJOB_TEST_KUBECONFIG; hack/test api sets it")
    for item in items:
        if "api" in item.keywords and "DLJOB_TEST_KUBECONFIG" not in os.environ:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def admin(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Kubectl]:
    """Return a client of the cluster with the CRDs and without other running operators."""
    kubectl = Kubectl(os.environ["DLJOB_TEST_KUBECONFIG"])
    os.environ["KUBECONFIG"] = kubectl.kubeconfig
    folder = tmp_path_factory.getbasetemp()
    with _without_other_operators(kubectl, folder if worker_id == "master" else folder.parent):
        yield kubectl


@contextmanager
def _without_other_operators(kubectl: Kubectl, folder: Path) -> Iterator[None]:
    """Stop other operators in the first pytest worker that uses ``folder``, and restart them in the last one."""
    stopped = folder / "operators-stopped.json"
    with (folder / "operators-turn").open("w") as turn, (folder / "operators-users").open("w") as users:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not stopped.exists():
            _install_crds(kubectl)
            text = kubectl.run("get", "deployments", "-A", "-l", "app.kubernetes.io/name=dljob", "-o", "json")
            stopped.write_text(text)
            for other in json.loads(text)["items"]:
                _scale(kubectl, other["metadata"], 0)
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        yield
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another worker is still running; the last one restarts the operators
        for other in json.loads(stopped.read_text())["items"]:
            _scale(kubectl, other["metadata"], other["spec"]["replicas"])
        stopped.unlink()


def _install_crds(kubectl: Kubectl) -> None:
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        definition = yaml.safe_load(path.read_text())
        kubectl.apply(definition, flags=("--server-side", "--force-conflicts"))
    kubectl.run("wait", "--for=condition=Established", "crd/dljobs.dljob.dev", "crd/dlprofiles.dljob.dev")


def _scale(kubectl: Kubectl, meta: Json, replicas: int) -> None:
    kubectl.run("scale", "-n", meta["namespace"], "deployment", meta["name"], f"--replicas={replicas}")


@contextmanager
def _namespace(admin: Kubectl) -> Iterator[Kubectl]:
    name = f"api-{uuid.uuid4().hex[:8]}"
    admin.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield Kubectl(admin.kubeconfig, name)
    admin.delete("namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def kubectl(admin: Kubectl) -> Iterator[Kubectl]:
    """Return a client of a new namespace, which the operator manages."""
    with _namespace(admin) as found:
        yield found


@pytest.fixture(scope="module")
def neighbour(admin: Kubectl) -> Iterator[Kubectl]:
    """Return a client of a second namespace. Modules whose operator manages it say so in ``operator_environment``."""
    with _namespace(admin) as found:
        yield found


@pytest.fixture(scope="module")
def nodes(kubectl: Kubectl) -> Iterator[HollowNodes]:
    with HollowNodes(kubectl.namespace, 3, device=kubectl.namespace.replace("api", "hollow")) as found:
        yield found


@pytest.fixture(scope="module")
def claim(admin: Kubectl, kubectl: Kubectl) -> Iterator[str]:
    """Return a bound claim that pods on several nodes can use."""
    volume = f"shared-{kubectl.namespace}"
    size = {"storage": "1Gi"}
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    claim = {**spec, "volumeName": volume, "resources": {"requests": size}}
    admin.apply(
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume},
            "spec": {**spec, "capacity": size, "hostPath": {"path": "/tmp/shared"}},
        },
    )  # fmt: skip
    kubectl.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "shared"}, "spec": claim})
    yield "shared"
    admin.delete("persistentvolume", volume, "--wait=false")


@pytest.fixture(scope="module")
def operator_environment() -> dict[str, str]:
    """Return settings of the operator that differ from the usual ones. Modules replace this fixture by their own."""
    return {}


@pytest.fixture(scope="module")
def operator(
    kubectl: Kubectl,
    nodes: HollowNodes,
    operator_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OperatorProcess]:
    log = tmp_path_factory.mktemp("operator") / "log"
    with ForkedOperator(kubectl.kubeconfig, kubectl.namespace, log, **operator_environment) as found:
        yield found


@pytest.fixture
def play(kubectl: Kubectl, nodes: HollowNodes, operator: OperatorProcess) -> Play:
    return Play(kubectl, nodes.device)
