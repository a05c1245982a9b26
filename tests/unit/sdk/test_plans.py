"""Tests of ``Client.plan``, and of the example on the page about the SDK."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dljob.cli import main
from dljob.kube.kinds import CLAIM, DLJOB, PROFILE, VOLUME
from dljob.sdk import Client, DLJobError, InvalidJobError
from support.servers.threaded_api import PretendOperator, ThreadedApiServer
from support.spec_changes import ENDED
from support.specs.small_specs import JOB, MINIMAL, Json

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/how-to/python.md").read_text(encoding="utf-8")
EXAMPLES = [
    block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if "import" in block
]
NODES: dict[str, Any] = {"nodes": [{"device": "cpu", "count": 3, "cpu": 4, "memory": "8Gi"}]}


def test_plan_for_the_cluster_is_that_of_the_command(
    client: Client, api: ThreadedApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    plan = client.plan(path)
    assert main(["plan", str(path), "--json"]) == 0
    assert json.loads(json.dumps(plan.document)) == json.loads(capsys.readouterr().out)
    assert plan.feasible and plan.status is not None and plan.status.predicted.step_seconds > 0
    assert plan.job == "a" and plan.scaling[0]["nodes"] == 1 and plan.refusal is None
    assert not [key for key in api.server.objects if key[0] == DLJOB.plural], "nothing was applied"


def test_profiles_of_other_namespaces_and_later_releases_do_not_count(
    client: Client, api: ThreadedApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the plan used measurements that the operator uses for another namespace only."""

    def profile(name: str, seconds: float, **more: Any) -> Json:
        spec = {"model": "mlp", "device": "cpu", **more}
        status = {"compute": [{"batch": 8, "seconds": seconds, "observations": 50, "cores": 1}], "later": "field"}
        return {"metadata": {"name": name}, "spec": spec, "status": status}

    api.put(PROFILE, profile("a-shared", 0.003))
    api.put(PROFILE, profile("b-own", 0.002, namespace="team-a"))
    api.put(PROFILE, profile("c-of-others", 0.001, namespace="team-c"))
    job = {**JOB, "spec": {**MINIMAL, "nodes": {"min": 1, "max": 1}, "resources": {"cpu": "1"}}}
    path = tmp_path / "job.yaml"
    found = {}
    for namespace in ("team-a", "team-b", "team-c"):
        path.write_text(yaml.safe_dump({**job, "metadata": {"name": "a", "namespace": namespace}}))
        assert main(["plan", str(path), "--json"]) == 0
        plans = [client.plan(path).document, json.loads(capsys.readouterr().out)]
        found[namespace] = [round(plan["plan"]["predicted"]["stepSeconds"], 3) for plan in plans]
    assert found == {"team-a": [0.002] * 2, "team-b": [0.003] * 2, "team-c": [0.001] * 2}


def test_plan_uses_only_nodes_that_can_mount_the_volume(
    client: Client, api: ThreadedApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = [{"matchExpressions": [{"key": "disk", "operator": "Exists"}]}]
    meta = {"name": "data", "namespace": "team-a"}
    api.put(CLAIM, {"metadata": meta, "spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}})
    api.put(VOLUME, {"metadata": {"name": "pv"}, "spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}})
    data = {"uri": "pvc://data/train.npz", "samples": 1000, "sampleBytes": 256}
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump({**JOB, "metadata": {"name": "a", "namespace": "team-a"}, "spec": {**MINIMAL, "dataset": data}})
    )
    plan = client.plan(path)
    assert not plan.feasible and plan.summary.startswith("VolumeNodeConflict: found volume 'pv' of claim 'data'")
    assert main(["plan", str(path)]) == 1
    assert "VolumeNodeConflict" in capsys.readouterr().out


def test_plan_says_that_a_change_would_be_refused(client: Client, api: ThreadedApiServer) -> None:
    client.submit(JOB)
    api.report_status("a", **ENDED)
    plan = client.plan({**JOB, "spec": {**MINIMAL, "epochs": 9}})
    assert plan.feasible and plan.refusal is not None and "spec.epochs" in plan.refusal


class TestWithoutACluster:
    @pytest.fixture(autouse=True)
    def _without_kubeconfig(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KUBECONFIG", "/nowhere")

    def test_plan_for_described_nodes(self, tmp_path: Path) -> None:
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(NODES))
        plans = [Client().plan(MINIMAL, cluster=given) for given in (NODES, path, str(path))]
        assert len({plan.summary for plan in plans}) == 1 and plans[0].feasible

    def test_infeasible_plan_says_why(self) -> None:
        plan = Client().plan({**MINIMAL, "globalBatchSize": 90, "nodes": {"min": 9, "max": 9}}, cluster=NODES)
        assert not plan.feasible and plan.status is None and plan.scaling == []
        assert plan.summary.startswith(plan.document["infeasible"]["reason"])

    def test_invalid_input_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidJobError):
            Client().plan({**MINIMAL, "epochs": 0}, cluster=NODES)
        with pytest.raises(DLJobError, match=r"^cluster: nodes\[0\]\.cpu: found -1"):
            Client().plan(MINIMAL, cluster={"nodes": [{"cpu": -1}]})
        with pytest.raises(DLJobError, match="missing"):
            Client().plan(MINIMAL, cluster=tmp_path / "missing.yaml")
        with pytest.raises(DLJobError):
            Client().plan(tmp_path / "missing.yaml", cluster=NODES)
        task = {"task": {"type": "TabularRegression"}, "dataset": {"uri": "pvc://a/b.csv"}}
        with pytest.raises(DLJobError, match="found a task"):
            Client().plan(task, cluster=NODES)

    def test_packages_of_the_operator_are_not_needed(self) -> None:
        code = f"""
import sys
for name in ("aiohttp", "kopf", "kubernetes"):
    sys.modules[name] = None
from dljob.sdk import Client, DLJobError
assert Client().plan({MINIMAL!r}, cluster={NODES!r}).feasible
try:
    Client().jobs()
except DLJobError as error:
    assert "pip install" in str(error), error
else:
    raise AssertionError
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_of_the_page_runs(
    example: str, api: ThreadedApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with PretendOperator(api):
        exec(compile(example, "python.md", "exec"), {})
    assert "submit" not in example or " 0.98\n" in capsys.readouterr().out


def test_page_has_its_examples() -> None:
    assert len(EXAMPLES) == 3
