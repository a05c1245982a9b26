"""The administrator's defaults against a real API server: whom a change of them reaches, and a wrong value."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dlcontract import RunPhase
from dljob.cli import main
from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, condition, wait_for
from support.cluster.live_job import SPEC, Play
from support.cluster.operator_process import OperatorProcess

pytestmark = pytest.mark.api
Json = dict[str, Any]
TOLERATIONS = [{"key": "dljob.dev/hollow", "operator": "Exists"}]


@pytest.fixture
def with_defaults(kubectl: Kubectl, nodes: HollowNodes, tmp_path: Path) -> Iterator[Callable[[Json], OperatorProcess]]:
    """Return a function that replaces the operator by one with other defaults, as a change of the chart's values."""
    with ExitStack() as running:

        def replace(defaults: Json) -> OperatorProcess:
            running.close()
            env = {"DLJOB_JOB_DEFAULTS": json.dumps(defaults)}
            return running.enter_context(
                OperatorProcess(kubectl.kubeconfig, kubectl.namespace, tmp_path / "log", **env)
            )

        yield replace


@pytest.fixture
def runtime_class(kubectl: Kubectl) -> Iterator[str]:
    name = f"sandbox-{kubectl.namespace}"
    kubectl.apply(
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": "runc"}
    )
    yield name
    kubectl.delete("runtimeclass", name)


def pods(kubectl: Kubectl, job: str) -> dict[str, Json]:
    return {pod["metadata"]["uid"]: pod["spec"] for pod in kubectl.list("pods", f"dljob.dev/job={job}")}


@pytest.mark.long
def test_changed_defaults_reach_new_jobs_and_restart_none(
    kubectl: Kubectl,
    nodes: HollowNodes,
    with_defaults: Callable[[Json], OperatorProcess],
    runtime_class: str,
) -> None:
    play = Play(kubectl, nodes.device)
    place = {"nodeSelector": {"dljob.dev/device": nodes.device}, "tolerations": TOLERATIONS}
    with_defaults({})
    play.run("before")
    with_defaults({"scheduling": {**place, "podGroupLabel": "first"}})
    play.run("early", scheduling={})
    first = {name: pods(kubectl, name) for name in ("before", "early")}
    assert all(spec["nodeSelector"] == place["nodeSelector"] for spec in first["early"].values())
    job = kubectl.job("early")
    assert "scheduling.podGroupLabel: first" in job["status"]["plan"]["defaults"]
    planned = condition(job, "Planned")
    assert planned is not None and "administrator's defaults" in planned["message"]
    described = kubectl.run("describe", "dljob", "early")
    assert f"scheduling.nodeSelector: dljob.dev/device={nodes.device}" in described
    plans = {name: play.plan(name) for name in first}
    operator = with_defaults(
        {"scheduling": {**place, "podGroupLabel": "second", "runtimeClassName": runtime_class},
         "runPolicy": {"activeDeadlineSeconds": 1, "ttlSecondsAfterFinished": 0}}
    )  # fmt: skip
    wait_for(
        "a reconcile of every job", lambda: operator.metric('dljob_operator_reconciles_total{result="ok"}') >= 2, 30
    )
    own = {"activeDeadlineSeconds": 600, "ttlSecondsAfterFinished": 600}
    play.submit("late", scheduling={}, runPolicy=own)
    play.until_ready("late")
    assert {spec["runtimeClassName"] for spec in pods(kubectl, "late").values()} == {runtime_class}
    for name in first:
        play.report(name, RunPhase.RUNNING, step=30, step_s=0.01)
        kubectl.wait_job(name, "step 30", lambda j: j["status"]["progress"]["step"] == 30, 30)
        assert pods(kubectl, name) == first[name], "no pod was restarted"
        assert play.plan(name) == plans[name]
        play.finish(name)
        assert kubectl.get("dljob", name) is not None, "it has no time after which it is deleted"
    play.patch("late", globalBatchSize=50)
    kubectl.wait_job("late", "plan 2", lambda j: j["status"]["plan"]["number"] == 2, 30)
    kubectl.delete("dljob", "late")


def test_wrong_default_ends_the_operator_with_one_line(kubectl: Kubectl, nodes: HollowNodes, tmp_path: Path) -> None:
    wrong = json.dumps({"scheduling": {"disruption": "Never"}})
    operator = OperatorProcess(kubectl.kubeconfig, kubectl.namespace, tmp_path / "log", DLJOB_JOB_DEFAULTS=wrong)
    operator.start(ready=False)
    wait_for("its end", lambda: not operator.running, 30)
    assert operator.log.strip() == (
        "dljob-operator: jobDefaults.scheduling.disruption: found 'Never'; expected 'Allow' or 'Avoid'"
    )


def test_dljob_plan_reads_the_defaults_of_the_operators_pod(
    kubectl: Kubectl, nodes: HollowNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = {"scheduling": {"tolerations": TOLERATIONS, "podGroupLabel": "group"}}
    env = [
        {"name": "DLJOB_WATCH_NAMESPACES", "value": kubectl.namespace},
        {"name": "DLJOB_JOB_DEFAULTS", "value": json.dumps(defaults)},
    ]
    operator = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator", "labels": {"app.kubernetes.io/name": "dljob"}},
        "spec": {
            "schedulerName": "nobody",
            "containers": [{"name": "operator", "image": "example.invalid/operator", "env": env}],
        },
    }
    kubectl.apply(operator)
    job = {
        "apiVersion": "dljob.dev/v1alpha1",
        "kind": "DLJob",
        "metadata": {"name": "job", "namespace": kubectl.namespace},
        "spec": {**SPEC, "scheduling": {}, "devices": [nodes.device]},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert main(["plan", str(tmp_path / "job.yaml")]) == 0
    assert "Administrator's defaults\n  scheduling.tolerations: dljob.dev/hollow:*\n" in capsys.readouterr().out
