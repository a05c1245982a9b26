"""Tests of the command line against a real cluster with the operator: plan, run, failure and top."""

import json
from pathlib import Path

import pytest
import yaml

from support.cluster.command_line import dljob
from support.cluster.kubectl import ONE_NODE, TWO_NODES, Kubectl, example

pytestmark = pytest.mark.e2e


def test_command_line_and_operator_make_the_same_plan(kubectl: Kubectl) -> None:
    """Compare `dljob plan` with the operator's plan for the same manifest with PlanOnly on the same cluster."""
    manifest = example("plan-only.yaml", job="same")
    kubectl.apply(manifest)
    status = kubectl.wait_phase("same", "Planned", 30)["status"]["plan"]
    ended = dljob(kubectl, "plan", "-", "--json", stdin=yaml.safe_dump(manifest))
    assert ended.returncode == 0, ended.stderr
    shown = json.loads(ended.stdout)["plan"]
    assert [g["batchPerRank"] for g in shown["groups"]] == [g["batchPerRank"] for g in status["groups"]]
    assert shown["predicted"]["stepSeconds"] == pytest.approx(status["predicted"]["stepSeconds"], rel=0.01)
    assert shown["collective"] == status["collective"]


def test_run_follows_a_job_to_its_end(kubectl: Kubectl, tmp_path: Path) -> None:
    manifest = yaml.safe_dump(example("digits.yaml", job="followed", epochs=6, nodes=TWO_NODES))
    ended = dljob(kubectl, "run", "-", "--namespace", kubectl.namespace, "--timeout", "240", stdin=manifest)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for word in ("applied", "Planned", "phase Running", "100 %", "predicted", "phase Complete", "accuracy"):
        assert word in ended.stdout
    top = dljob(kubectl, "top", "--namespace", kubectl.namespace)
    (line,) = [line for line in top.stdout.splitlines() if line.startswith("followed ")]
    assert line.split()[1] == "Complete"
    assert kubectl.job("followed")["status"]["result"]["analysis"]["samples"] == 360
    folder = tmp_path / "model"
    copied = dljob(kubectl, "get-model", "followed", str(folder), "--namespace", kubectl.namespace)
    assert copied.returncode == 0, copied.stderr
    assert {"model.safetensors", "model.json", "predict.py", "report.html"} <= {path.name for path in folder.iterdir()}
    assert not kubectl.list("pods", "app.kubernetes.io/name=dljob-reader"), "the pod is deleted"


def test_run_of_a_failing_job_gives_exit_code_1(kubectl: Kubectl) -> None:
    env = [{"name": "DLTRAIN_IMPORT_AHEAD", "value": "off"}]  # The command does not need torch.
    changes = {"trainer": {"command": ["false"], "env": env}, "runPolicy": {"backoffLimit": 0}, "nodes": ONE_NODE}
    job = example("digits.yaml", job="failing", **changes)
    ended = dljob(kubectl, "run", "-", "-n", kubectl.namespace, "--timeout", "200", stdin=yaml.safe_dump(job))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "phase Failed" in ended.stdout


def test_run_prints_the_error_of_the_api_server(kubectl: Kubectl) -> None:
    manifest = yaml.safe_dump(example("digits.yaml", job="nowhere"))
    ended = dljob(kubectl, "run", "-", "-n", "no-such-namespace", stdin=manifest)
    assert ended.returncode == 2
    assert 'namespaces "no-such-namespace" not found' in ended.stderr
    assert ended.stderr.count("\n") == 1
