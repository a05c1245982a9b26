"""Objects of one job as a watch shows them, for tests of the cache."""

from typing import Any

Json = dict[str, Any]


def body(
    name: str,
    uid: str = "u1",
    version: int = 1,
    *,
    job: str | None = "digits",
    owner: str | None = "job-uid",
    **more: Any,
) -> Json:
    meta: Json = {
        "name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version),
        "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"dljob.dev/job": job, "dljob.dev/group": "cpu"} if job else {},
    }  # fmt: skip
    if owner:
        meta["ownerReferences"] = [{"controller": True, "uid": owner, "kind": "StatefulSet", "name": "digits-cpu"}]
    return {"metadata": meta, "spec": {}, **more}


DLJOB_OWNER: Json = {
    "apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "name": "digits", "uid": "job-uid", "controller": True,
}  # fmt: skip


def dljob(uid: str = "job-uid", version: int = 1, **more: Any) -> Json:
    return body("digits", uid, version, job=None, owner=None, **more)
