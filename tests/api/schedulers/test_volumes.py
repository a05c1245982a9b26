"""Tests of jobs whose volume only some nodes can mount, with the scheduler and the volume controller of Kubernetes."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster.fake_nodes import HollowNodes
from support.cluster.kubectl import Kubectl, wait_for
from support.cluster.live_job import Play

pytestmark = pytest.mark.api
Json = dict[str, Any]
LABEL = "dljob.dev/test-disks"
CLAIM = "zonal"
DATA: Json = {"uri": f"pvc://{CLAIM}/train.npz", "samples": 1000, "sampleBytes": 256}


@pytest.fixture(scope="module")
def volume(admin: Kubectl, kubectl: Kubectl, nodes: HollowNodes) -> Iterator[str]:
    """Return the volume of a bound claim, which the last two of three nodes can mount."""
    for node in nodes.names[1:]:
        admin.run("label", "node", node, f"{LABEL}={kubectl.namespace}")
    name = f"{kubectl.namespace}-zonal"
    size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
    expression = {"key": LABEL, "operator": "In", "values": [kubectl.namespace]}
    spec = {
        "capacity": size, "accessModes": modes, "hostPath": {"path": "/nowhere"}, "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain", "claimRef": {"namespace": kubectl.namespace, "name": CLAIM},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}},
    }  # fmt: skip
    admin.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})
    claim = {"accessModes": modes, "resources": {"requests": size}, "storageClassName": "", "volumeName": name}
    kubectl.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": claim})

    def bound() -> bool:
        found = kubectl.get("persistentvolumeclaim", CLAIM)
        return found is not None and found.get("status", {}).get("phase") == "Bound"

    wait_for("the claim to be bound", bound, 30)
    yield name
    admin.run("delete", "persistentvolume", name, "--wait=false")


def test_pods_run_where_the_volume_is(play: Play, nodes: HollowNodes, volume: str) -> None:
    play.submit("whole", dataset=DATA, nodes={"min": 1, "max": 3})
    wait_for("a plan", lambda: play.kubectl.get("configmap", "whole-plan"), 30)
    count = len({rank.pod for rank in play.plan("whole").ranks})
    play.until_ready("whole", count)
    pods = play.kubectl.list("pods", "dljob.dev/job=whole")
    assert 1 <= len(pods) == count <= 2 and {pod["spec"]["nodeName"] for pod in pods} <= set(nodes.names[1:])
    play.kubectl.delete("dljob", "whole")


def test_job_waits_for_nodes_that_can_mount_its_volume(play: Play, nodes: HollowNodes, volume: str) -> None:
    play.submit("large", dataset=DATA, nodes={"min": 3, "max": 3})
    words = "spec.dataset.uri", volume, CLAIM, LABEL, "2 match"
    play.until_reported("large", "Planned", "VolumeNodeConflict", *words)
    assert not play.kubectl.list("pods", "dljob.dev/job=large")
    play.kubectl.run("label", "node", nodes.names[0], f"{LABEL}={play.kubectl.namespace}")
    play.until_ready("large", 3)
    play.kubectl.delete("dljob", "large")
