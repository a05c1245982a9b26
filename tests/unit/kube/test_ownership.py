"""Tests of who owns an object and its fields, on objects as an API server stores them."""

from typing import Any

import pytest

from dljob.job.observed import APPLIED_ANNOTATION
from dljob.kube.ownership import only_ours
from support.builders import job

Json = dict[str, Any]
OWNER = {"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "name": "train", "uid": "job-uid", "controller": True}
SERVICE: Json = {
    "apiVersion": "v1", "kind": "Service",
    "metadata": {"name": "train", "namespace": "team", "labels": {"app": "dljob"}, "ownerReferences": [OWNER]},
    "spec": {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "dljob"},
        "ports": [{"name": "agent", "port": 29400, "targetPort": 29400}], "finalizers": ["one"],
    },
}  # fmt: skip
FIELDS: Json = {
    "f:metadata": {
        "f:annotations": {f"f:{APPLIED_ANNOTATION}": {}}, "f:labels": {"f:app": {}},
        "f:ownerReferences": {'k:{"uid":"job-uid"}': {}},
    },
    "f:spec": {
        "f:clusterIP": {}, "f:publishNotReadyAddresses": {}, "f:selector": {},
        "f:ports": {'k:{"port":29400,"protocol":"TCP"}': {".": {}, "f:name": {}, "f:port": {}, "f:targetPort": {}}},
        "f:finalizers": {'v:"one"': {}},
    },
}  # fmt: skip
ENTRY: Json = {"manager": "dljob-operator", "operation": "Apply", "apiVersion": "v1", "fieldsType": "FieldsV1"}


def without(fields: Json, first: str, *others: str) -> Json:
    """Return the fields without one of them, and without parents of which nothing is left."""
    below = without(fields[first], *others) if others else {}
    return {name: value for name, value in {**fields, first: below}.items() if name != first or below}


def judged(fields: Json | None, *others: Json, digest: str = "d1", owner: Json = OWNER) -> bool:
    """Return the result for the Service with these fields of the operator, and other ``managedFields``."""
    entries = [{**ENTRY, "fieldsV1": fields}, *others]
    meta = {"annotations": {APPLIED_ANNOTATION: digest}, "ownerReferences": [owner], "managedFields": entries}
    return only_ours(job(name="train", uid="job-uid"), meta, SERVICE, "d1")


def test_object_that_nobody_else_has_changed_is_ours() -> None:
    assert judged(FIELDS)


@pytest.mark.parametrize(
    "path",
    [
        ("f:metadata", "f:labels", "f:app"),
        ("f:metadata", "f:ownerReferences"),
        ("f:spec", "f:selector"),
        ("f:spec", "f:ports", 'k:{"port":29400,"protocol":"TCP"}'),
        ("f:spec", "f:ports", 'k:{"port":29400,"protocol":"TCP"}', "f:name"),
        ("f:spec", "f:finalizers", 'v:"one"'),
        ("f:spec",),
    ],
    ids=".".join,
)
def test_object_of_which_somebody_has_removed_a_field_is_not_ours(path: tuple[str, ...]) -> None:
    assert not judged(without(FIELDS, *path))


def test_object_of_which_all_fields_are_gone_is_not_ours() -> None:
    assert not judged({})
    assert not judged(None)


def test_object_of_another_writer_manifest_or_job_is_not_ours() -> None:
    assert not judged(
        FIELDS, {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:spec": {"f:type": {}}}}
    )
    assert not judged(FIELDS, digest="d2")
    assert not judged(FIELDS, owner={**OWNER, "uid": "another"})
