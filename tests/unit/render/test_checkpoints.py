"""Tests of the volumes of checkpoints in an object store: no claim, a sized staging volume, and the credentials."""

from typing import Any

import pytest

from dlcontract import CHECKPOINT_DIR, CHECKPOINT_SECRET_DIR
from dljob.api import DLJobSpec
from dljob.cluster import quantity
from dljob.job.defaults import parse_defaults, with_defaults
from dljob.render.volumes import checkpoints, scratch
from support.builders import CPUS, DIGITS, rendered, seen

Json = dict[str, Any]
SCRIPT: Json = {"trainer": {"framework": "Torchrun", "command": ["python", "a.py"]}, "nodes": {"min": 2, "max": 2}}
BERT: Json = {
    "model": {"hints": {"like": "BERT-base"}},
    "dataset": {"uri": "pvc://corpus/train.npz", "samples": 1000},
    "globalBatchSize": 32,
    "epochs": 1,
}


def pod_of(spec: Json) -> Json:
    [found] = [each for each in rendered(seen(spec)) if each["kind"] == "StatefulSet"]
    pod: Json = found["spec"]["template"]["spec"]
    return pod


def test_three_nodes_need_no_claim_and_no_storage_class() -> None:
    spec = {**DIGITS, "nodes": {"min": 3, "max": 3}, "checkpoint": {"uri": "s3://models", "secretName": "one"}}
    objects = rendered(seen(spec, CPUS, classes=()))
    assert not [each for each in objects if each["kind"] == "PersistentVolumeClaim"]
    [group] = [each for each in objects if each["kind"] == "StatefulSet"]
    pod = group["spec"]["template"]["spec"]
    assert group["spec"]["replicas"] == 3 and "persistentVolumeClaim" not in str(pod)
    volumes = {each["name"]: each for each in pod["volumes"]}
    [container] = pod["containers"]
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    assert volumes["checkpoints"] == {"name": "checkpoints", "emptyDir": {"sizeLimit": "3Gi"}}
    assert mounts[CHECKPOINT_DIR] == {"name": "checkpoints", "mountPath": CHECKPOINT_DIR}
    assert volumes["checkpoint-secret"]["secret"]["secretName"] == "one"
    assert mounts[CHECKPOINT_SECRET_DIR]["readOnly"] is True
    assert "AWS_" not in str(container["env"]), "scripts keep their own variables"


def test_without_a_secret_the_identity_of_the_pod_is_left_alone() -> None:
    pod = pod_of({**DIGITS, "checkpoint": {"uri": "s3://models"}})
    assert CHECKPOINT_SECRET_DIR not in str(pod)


def test_staging_is_requested_as_ephemeral_storage() -> None:
    spec = {**DIGITS, "checkpoint": {"uri": "s3://models", "stagingSize": "50Gi"}}
    resources = pod_of(spec)["containers"][0]["resources"]
    assert int(resources["requests"]["ephemeral-storage"]) == quantity("50Gi")
    assert "ephemeral-storage" not in resources["limits"]
    limited = pod_of({**spec, "trainer": {"scratch": {"size": "4Gi"}}})["containers"][0]["resources"]
    assert int(limited["requests"]["ephemeral-storage"]) == quantity("54Gi")
    assert int(limited["limits"]["ephemeral-storage"]) == quantity("54Gi") + scratch.RESERVE_NBYTES


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (DIGITS, "3Gi"),
        (SCRIPT, "20Gi"),
        # BERT-base has 110 million parameters, so that a training state has 1.23 GiB.
        ({**BERT, "trainer": {"command": ["a"]}}, "7Gi"),
        ({**BERT, "trainer": {"command": ["a"], "framework": "Torchrun"}}, "17Gi"),
    ],
)
@pytest.mark.parametrize("given", [{}, {"stagingSize": "Auto"}])
def test_auto_follows_from_the_model(spec: Json, size: str, given: Json) -> None:
    parsed = DLJobSpec.model_validate({**spec, "checkpoint": {"uri": "s3://models", **given}})
    assert checkpoints.staging_size(parsed) == size


def test_defaults_for_claims_do_not_reach_a_job_with_an_object_store() -> None:
    defaults = parse_defaults({"checkpoint": {"volume": {"storageClassName": "fast", "shared": True}}})
    spec = DLJobSpec.model_validate({**DIGITS, "checkpoint": {"uri": "s3://models"}})
    assert with_defaults(spec, defaults).checkpoint == spec.checkpoint


def test_disabled_checkpoints_need_neither_volume_nor_secret() -> None:
    stored = {"enabled": False, "uri": "s3://models", "secretName": "one", "stagingSize": "9Gi"}
    assert "checkpoint" not in str(pod_of({**DIGITS, "checkpoint": stored})["volumes"])
