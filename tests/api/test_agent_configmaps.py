"""Tests of an agent's API calls against a real API server with the permissions that the operator grants."""

import asyncio
import base64
import os
import ssl
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlcontract import PLAN_KEY, REPORT_KEY, DatasetRef, ModelRef, Plan, Rank, Report, RunPhase
from dltrain.agent.job.exchange import ConfigMaps
from dltrain.agent.job.kube_api import ApiError, KubeApi
from support.cluster.kubectl import Kubectl, wait_for

pytestmark = [
    pytest.mark.api,
    pytest.mark.skipif("DLJOB_TEST_KUBECONFIG" not in os.environ, reason="needs DLJOB_TEST_KUBECONFIG"),
]


@pytest.fixture
def namespace() -> Iterator[Kubectl]:
    name = f"agent-{uuid.uuid4().hex[:8]}"
    kubectl = Kubectl(os.environ["DLJOB_TEST_KUBECONFIG"], name)
    kubectl.run("create", "namespace", name)
    yield kubectl
    kubectl.run("delete", "namespace", name, "--wait=false")


@pytest.fixture
def exchange(namespace: Kubectl, tmp_path: Path) -> ConfigMaps:
    """Return the client of the service account of a job named ``mine``."""
    rules = [
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["mine-plan"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["mine-report"], "verbs": ["get", "patch"]},
    ]  # fmt: skip
    rbac, annotation = "rbac.authorization.k8s.io", {"kubernetes.io/service-account.name": "mine"}
    namespace.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "mine"}},
        {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token", "metadata": {"name": "token", "annotations": annotation}},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": {"name": "mine"}, "rules": rules},
        {"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": {"name": "mine"},
         "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "mine"},
         "subjects": [{"kind": "ServiceAccount", "name": "mine"}]},
    )  # fmt: skip

    def token() -> str | None:
        return ((namespace.get("secret", "token") or {}).get("data") or {}).get("token")

    file = tmp_path / "token"
    file.write_bytes(base64.b64decode(wait_for("the account's token", token, 10)))
    cluster = yaml.safe_load(Path(namespace.kubeconfig).read_text())["clusters"][0]["cluster"]
    host, _, port = cluster["server"].removeprefix("https://").partition(":")
    ca = cluster.get("certificate-authority-data")
    context = ssl.create_default_context(
        cafile=cluster.get("certificate-authority"), cadata=base64.b64decode(ca).decode() if ca else None
    )
    return ConfigMaps(KubeApi(host, int(port), namespace.namespace, file, context), "mine")


def put(namespace: Kubectl, name: str, data: dict[str, str]) -> None:
    namespace.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data})


def plan(**fields: Any) -> Plan:
    rank = Rank(rank=0, pod="mine-cpu-0", host="mine-cpu-0.mine", group="cpu", device="cpu", share=8)
    base = {
        "job": "mine",
        "namespace": "default",
        "uid": "u",
        "number": 1,
        "ranks": (rank,),
        "global_batch": 8,
        "steps": 1,
    }
    return Plan(**(base | {"model": ModelRef(name="mlp"), "dataset": DatasetRef(name="digits")} | fields))


def test_agent_receives_plans_as_written(namespace: Kubectl, exchange: ConfigMaps) -> None:
    async def follow() -> None:
        plans = exchange.plans()
        coming = asyncio.ensure_future(anext(plans))
        done, _ = await asyncio.wait({coming}, timeout=0.5)
        assert not done, "no plan has been written yet"
        put(namespace, "mine-plan", {PLAN_KEY: plan().to_json()})
        assert await asyncio.wait_for(coming, 10) == plan()
        coming = asyncio.ensure_future(anext(plans))
        put(namespace, "mine-plan", {PLAN_KEY: "{}"})
        put(namespace, "mine-plan", {PLAN_KEY: plan(number=2).to_json()})
        assert await asyncio.wait_for(coming, 10) == plan(number=2)
        await plans.aclose()

    asyncio.run(follow())


def test_reports_are_written_and_read_back(namespace: Kubectl, exchange: ConfigMaps) -> None:
    report = Report(uid="u", plan_number=1, plan_digest="d", term=1, phase=RunPhase.RUNNING, unix_s=1.0)

    async def write() -> None:
        assert await exchange.previous_report() is None
        with pytest.raises(ApiError) as error:
            await exchange.write(report)
        assert error.value.status == 404
        put(namespace, "mine-report", {"other.key": "stays"})
        await exchange.write(report)
        assert await exchange.previous_report() == report

    asyncio.run(write())
    data = (namespace.get("configmap", "mine-report") or {})["data"]
    assert data["other.key"] == "stays" and Report.parse(data[REPORT_KEY]) == report


def test_agent_cannot_access_other_config_maps(namespace: Kubectl, exchange: ConfigMaps) -> None:
    put(namespace, "yours-plan", {PLAN_KEY: plan().to_json()})
    api = exchange._api
    with pytest.raises(ApiError) as error:
        asyncio.run(api.get("yours-plan"))
    assert error.value.status == 403
