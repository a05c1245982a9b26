"""An upgrade from the last release and back, with a field added to the CRD in between, restarts no running job."""

import copy
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlcontract import RunPhase
from support.cluster.kubectl import ROOT, Kubectl, condition, wait_for
from support.cluster.live_job import Play
from support.cluster.operator_process import OperatorProcess
from support.cluster.release import last_release

pytestmark = pytest.mark.api
Json = dict[str, Any]
JOBS = ("plain", "scaled", "refused")
OVERRIDE = [{"manager": "me", "spec": {"dnsPolicy": "Default"}}]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source of the last release."""
    return last_release(tmp_path_factory)


@pytest.fixture(scope="module")
def operators(
    kubectl: Kubectl, released: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OperatorProcess, OperatorProcess]]:
    """Return the operator of the last release, which allows every override, and that of the checkout."""
    folder = tmp_path_factory.mktemp("operators")
    path = os.pathsep.join(str(released / part) for part in ("operator", "operator/contract"))
    env = {"DLJOB_OVERRIDES": "all", "PYTHONPATH": path}
    both = (
        OperatorProcess(kubectl.kubeconfig, kubectl.namespace, folder / "old", "old", **env),
        OperatorProcess(kubectl.kubeconfig, kubectl.namespace, folder / "new", "new"),
    )
    yield both
    for each in both:
        if each.running:
            each.stop()


def with_another_field(definition: Json) -> Json:
    """Return the CRD of a later release: its spec has one more field, with a default."""
    later = copy.deepcopy(definition)
    schema = later["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    schema["properties"]["mascot"] = {"type": "string", "default": "gopher"}
    return later


def install(kubectl: Kubectl, definition: Json) -> None:
    subprocess.run(
        ["kubectl", f"--kubeconfig={kubectl.kubeconfig}", "apply", "--server-side", "--force-conflicts", "-f", "-"],
        input=yaml.safe_dump(definition), text=True, check=True, timeout=60, capture_output=True,
    )  # fmt: skip


def uids(kubectl: Kubectl) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in kubectl.list("pods", "dljob.dev/job")}


def looked_at(operator: OperatorProcess) -> bool:
    return operator.metric('dljob_operator_reconciles_total{result="ok"}') >= len(JOBS)


def test_upgrade_and_rollback_restart_no_job(
    kubectl: Kubectl, nodes: Any, operators: tuple[OperatorProcess, OperatorProcess]
) -> None:
    old, new = operators
    definition = yaml.safe_load((ROOT / "crds/dljob.dev_dljobs.yaml").read_text())
    play = Play(kubectl, nodes.device)
    old.start()
    small = {"nodes": {"min": 1, "max": 1}, "globalBatchSize": 10}
    play.submit("plain", **small)
    play.submit("scaled", **small, checkpoint={"enabled": True})
    play.submit(
        "refused", **small, podTemplateOverrides=OVERRIDE
    )  # The operator of the checkout allows only safe ones.
    for name in JOBS:
        play.until_ready(name, 1)
        play.report(name, RunPhase.RUNNING, step_s=0.01)
        kubectl.wait_phase(name, "Running", 30)
    before = uids(kubectl)
    plans = {name: play.plan(name) for name in JOBS}
    try:
        for step, (leaving, coming) in enumerate(((old, new), (new, old)), 1):
            assert leaving.stop() == 0, leaving.log
            install(kubectl, with_another_field(definition) if coming is new else definition)
            coming.start()
            wait_for("a look at every job", lambda operator=coming: looked_at(operator), 40)
            for name in JOBS:
                play.report(name, RunPhase.RUNNING, step=10 * step + 1, step_s=0.01)
                kubectl.wait_job(
                    name, "progress", lambda j, at=10 * step + 1: j["status"]["progress"]["step"] == at, 30
                )
            assert uids(kubectl) == before, "no pod was restarted"
            assert {name: play.plan(name) for name in JOBS} == plans
            accepted = condition(kubectl.job("refused"), "Accepted")
            assert accepted is not None and accepted["status"] == ("False" if coming is new else "True")
        for name in JOBS:
            play.finish(name)
    finally:
        install(kubectl, definition)
