"""Tests of VolumeReady for a checkpoint claim that gets no volume: the remedies in its message, and their effect."""

from dataclasses import replace

import pytest

from dljob.job.observed import ClaimSeen, ClassSeen
from support.builders import DIGITS, Json, after, changed, nodes, seen
from support.job_lifecycle import condition_of, gone, step, verdict

CLAIM = "digits-checkpoints"
ONE_NODE = {"min": 1, "max": 1}


def refused(*modes: str) -> ClaimSeen:
    return ClaimSeen(CLAIM, "Pending", modes, "standard", problem="only ReadWriteOnce is supported")


@pytest.mark.parametrize(
    ("volume", "wanted", "mode", "named", "unnamed"),
    [
        ({}, DIGITS["nodes"], "ReadWriteMany", ["spec.nodes.max: 1", "delete this claim"], ["shared: false"]),
        ({"shared": True}, ONE_NODE, "ReadWriteMany", ["volume.shared: false", "delete this claim"], ["nodes.max"]),
        ({}, ONE_NODE, "ReadWriteOnce", ["storageClassName", "delete this claim"], ["shared", "nodes.max"]),
        ({"claimName": CLAIM}, DIGITS["nodes"], "ReadWriteMany", ["claimName to another claim"], ["delete"]),
    ],
    ids=["several nodes", "shared by wish", "one node", "claim of the user"],
)
def test_remedies_of_a_claim_without_a_volume_fit_the_job(
    volume: Json, wanted: Json, mode: str, named: list[str], unnamed: list[str]
) -> None:
    spec = {**DIGITS, "nodes": wanted, "checkpoint": {"volume": volume}}
    desired = step(seen(spec, claims={CLAIM: refused(mode)}))
    assert verdict(desired, "VolumeReady") == ("False", "ProvisioningFailed")
    message = condition_of(desired, "VolumeReady").message
    assert [text for text in named if text not in message] == [], message
    assert [text for text in unnamed if text in message] == [], message


def test_job_gets_a_claim_for_one_node_after_the_remedy() -> None:
    first = seen()
    waiting = replace(after(first, step(first)), claims={CLAIM: refused("ReadWriteMany")})
    stopped = replace(gone(changed(waiting, nodes=ONE_NODE)), claims={})
    (claim,) = (item for item in step(stopped).objects if item["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


@pytest.mark.parametrize(
    ("volume", "wanted", "provisioner", "mode"),
    [
        ({}, {"max": 8}, "efs.csi.aws.com", "ReadWriteMany"),
        ({}, {}, "rook-ceph.cephfs.csi.ceph.com", "ReadWriteMany"),
        ({}, {}, "cluster.local/nfs-subdir-external-provisioner", "ReadWriteMany"),
        ({"storageClassName": "shared"}, {}, "nfs.csi.k8s.io", "ReadWriteMany"),
        ({"storageClassName": "other"}, {}, "nfs.csi.k8s.io", "ReadWriteOnce"),
        ({}, {"max": 1}, "efs.csi.aws.com", "ReadWriteOnce"),
        ({"shared": False}, {}, "efs.csi.aws.com", "ReadWriteOnce"),
        ({}, {}, "ebs.csi.aws.com", "ReadWriteOnce"),
        ({}, {}, "notnfs.csi.k8s.io", "ReadWriteOnce"),
    ],
)
def test_job_that_may_grow_gets_a_claim_for_several_nodes_where_the_class_shares_its_volumes(
    volume: Json, wanted: Json, provisioner: str, mode: str
) -> None:
    """Fixed bug: a job that was first planned on one node could never grow to several."""
    classes = (ClassSeen("shared", default=True, provisioner=provisioner), ClassSeen("other", provisioner="x"))
    spec = {**DIGITS, "checkpoint": {"volume": volume}, "nodes": wanted}
    desired = step(seen(spec, nodes({"name": "n", "cpu": 2}), classes=classes))
    (claim,) = (item for item in desired.objects if item["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == [mode]
    warned = "cannot move to several nodes" in condition_of(desired, "VolumeReady").message
    assert warned is (mode == "ReadWriteOnce" and wanted != {"max": 1})
