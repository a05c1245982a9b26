"""One watch falls silent while the others go on: the probes of the operator fail, so that the kubelet restarts it."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dlcontract
from support.chaos.faulty_api import Act, Disturbance, FaultyApi
from support.cluster.kubectl import Kubectl, wait_for
from support.cluster.operator_process import OperatorProcess
from support.operator_forks.forked_operator import ForkedOperator

pytestmark = pytest.mark.api
SILENCES = 4
"""A watch counts as dead after fewer silences than this."""
SUSPENDED = {
    "apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "metadata": {"name": "quiet"},
    "spec": {
        "model": {"name": "digits-cnn"}, "dataset": {"name": "digits"}, "globalBatchSize": 60, "epochs": 5,
        "suspend": True,
    },
}  # fmt: skip


@pytest.fixture
def api(kubectl: Kubectl, tmp_path: Path) -> Iterator[FaultyApi]:
    found = FaultyApi(kubectl.kubeconfig, tmp_path, seed=1)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def operator(kubectl: Kubectl, api: FaultyApi, tmp_path: Path) -> Iterator[OperatorProcess]:
    """Return an operator behind the proxy, whose watches count as dead after 8 s."""
    settings = {"DLJOB_WATCH_SILENCE_SECONDS": "3"}
    found = ForkedOperator(str(api.kubeconfig), kubectl.namespace, tmp_path / "log", "silent", **settings)
    found.start()
    yield found
    found.kill()


@pytest.mark.parametrize(
    ("resource", "act"),
    [
        ("dljobs", Act.SILENCE),
        pytest.param("dljobs", Act.HOLD, marks=pytest.mark.long),
        pytest.param("configmaps", Act.SILENCE, marks=pytest.mark.long),
        pytest.param("configmaps", Act.HOLD, marks=pytest.mark.long),
    ],
)
def test_probes_fail_when_one_watch_is_silent(
    kubectl: Kubectl, api: FaultyApi, operator: OperatorProcess, resource: str, act: Act
) -> None:
    count = itertools.count()

    def change() -> None:
        number = str(next(count))
        kubectl.patch("dljob", "quiet", {"metadata": {"annotations": {"example.com/change": number}}})
        data = {"data": {dlcontract.REPORT_KEY: json.dumps(number)}}
        kubectl.patch("configmap", "quiet-report", data)

    def changing(probe: Callable[[], bool]) -> Callable[[], bool]:
        def changed() -> bool:
            change()
            return probe()

        return changed

    kubectl.apply(SUSPENDED)
    # The operator stores only the plan and the report of a job, and only if the job controls them.
    owner = {"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "name": "quiet", "controller": True}
    owner["uid"] = kubectl.job("quiet")["metadata"]["uid"]
    meta = {"name": "quiet-report", "labels": {"dljob.dev/job": "quiet"}, "ownerReferences": [owner]}
    kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta})
    opened = 'dljob_operator_api_requests_total{code="200",resource="storageclasses",verb="watch"}'
    wait_for(
        "watches of kinds that do not change to be opened again and again",
        changing(lambda: operator.metric(opened) > SILENCES), 60, operator.metrics,
    )  # fmt: skip
    assert operator.liveness() == "ok\n"
    api.begin(Disturbance(f"silent {resource}", act, lambda call: call.watch and call.resource == resource))
    wait_for(
        "the liveness probe to fail",
        changing(lambda: operator.liveness().startswith(f"the watch of {resource}")), 60, lambda: operator.log,
    )  # fmt: skip
    assert operator.readiness().startswith(f"the watch of {resource}")
    assert "the liveness probe fails: the watch of" in operator.log
    api.end()
    wait_for("the watch to go on", changing(lambda: operator.liveness() == "ok\n"), 60, lambda: operator.log)
