"""Tests of jobs whose script comes from ``trainer.source``: the claim with the archive."""

import pytest

from dljob.job.observed import ClaimSeen
from support.builders import seen
from support.job_lifecycle import condition_of, step, verdict


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({}, ("False", "SourceClaimNotFound")),
        ({"scripts": ClaimSeen("scripts", "Bound", ("ReadWriteOnce",))}, ("False", "SourceClaimNotShared")),
        ({"scripts": ClaimSeen("scripts", "Bound", ("ReadOnlyMany",))}, ("True", "NotNeeded")),
    ],
    ids=["missing", "one node", "shared"],
)
def test_state_of_the_claim_with_the_script_is_reported(
    claims: dict[str, ClaimSeen], expected: tuple[str, str]
) -> None:
    source = {"archive": {"uri": "pvc://scripts/v1.zip"}}
    trainer = {"framework": "Torchrun", "command": ["torchrun", "train.py"], "source": source}
    spec = {"trainer": trainer, "nodes": {"min": 2}, "checkpoint": {"enabled": False}}
    desired = step(seen(spec, claims=claims))
    assert verdict(desired, "VolumeReady") == expected
    assert expected[0] == "True" or "spec.trainer.source.archive.uri" in condition_of(desired, "VolumeReady").message
