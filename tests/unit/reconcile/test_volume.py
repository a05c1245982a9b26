"""Tests of VolumeReady for a checkpoint claim that gets no volume: the remedies in its message, and their effect."""

from dataclasses import replace

import pytest

from dljob.job.observed import ClaimSeen
from support.builders import DIGITS, Json, after, changed, seen
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
