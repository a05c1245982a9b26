"""Tests of sharded data in real pods: each node fetches its part of a file, and a lost pod's part is not lost."""

from typing import Any

import pytest
import yaml

from support.cluster.kubectl import ROOT, Kubectl, condition, step_of
from support.cluster.pod_server import trainer_image

pytestmark = pytest.mark.e2e


def sharded(admin: Kubectl, name: str, **changes: Any) -> list[dict[str, Any]]:
    """Return the manifests of the example, with its job called ``name`` and with changed spec fields."""
    documents = list(yaml.safe_load_all((ROOT / "examples" / "dataset-sharded.yaml").read_text()))
    [job] = [document for document in documents if document["kind"] == "DLJob"]
    [server] = [document for document in documents if document["kind"] == "Pod"]
    job["metadata"]["name"] = name
    job["spec"] |= changes
    server["spec"]["containers"][0]["image"] = trainer_image(admin)
    return documents


@pytest.mark.long
def test_nodes_fetch_their_shards_and_train(admin: Kubectl, kubectl: Kubectl) -> None:
    kubectl.apply(*sharded(admin, "shards"))
    done = kubectl.wait_phase("shards", "Complete", 300)
    assert done["status"]["result"]["accuracy"] >= 0.95


@pytest.mark.long
def test_job_with_sharded_data_survives_a_lost_pod(admin: Kubectl, kubectl: Kubectl) -> None:
    checkpoint = {"interval": "5s"}
    kubectl.apply(*sharded(admin, "loses-a-pod", epochs=60, nodes={"min": 2, "max": 3}, checkpoint=checkpoint))
    before = kubectl.wait_job("loses-a-pod", "a step", lambda job: step_of(job) > 20, 240)
    kubectl.run("delete", "pod", "loses-a-pod-cpu-1", "--grace-period=0", "--force")
    done = kubectl.wait_phase("loses-a-pod", "Complete", 400)
    status = done["status"]
    assert status["restartsByCause"] and status["result"]["steps"] > step_of(before)
    assert status["result"]["accuracy"] >= 0.95 and condition(done, "Failed") is None
