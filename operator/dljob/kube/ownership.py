"""Find out who owns an object, and its fields.

The operator applies to, scales and deletes only objects that the job controls.
"""

import json
from collections.abc import Mapping
from typing import Any

from dljob.job.observed import APPLIED_ANNOTATION, JobSeen, Rejected
from dljob.job.waiting import earlier_job_text
from dljob.kube.answers import RejectedError
from dljob.kube.kinds import Kind
from dljob.kube.objects.trim import controller_of, owner_uid, owning_job
from dljob.kube.rest import FIELD_OWNER


class NameTakenError(RejectedError):
    """The name of one of the job's objects is in use by an object that the job does not control.

    ``being_deleted``: True if the object belongs to an earlier DLJob of the job's name. That DLJob no longer exists, so
    that the garbage collector deletes the object soon.
    """

    def __init__(self, kind: str, name: str, message: str, *, being_deleted: bool = False) -> None:
        super().__init__(kind, name, message)
        self.being_deleted = being_deleted


def name_taken(job: JobSeen, kind: Kind, body: Mapping[str, Any]) -> NameTakenError:
    """Return the error to raise if another owner's object has a name that the job needs. ``body``: this object."""
    name = body["metadata"]["name"]
    if owning_job(body) == job.name:
        return NameTakenError(kind.kind, name, earlier_job_text(f"{kind.kind} {name}"), being_deleted=True)
    text = (
        f"metadata.name: the job {job.name!r} needs a {kind.kind} named {name!r}; found one {_holder(body)}. "
        "Choose another job name, or delete that object"
    )
    return NameTakenError(kind.kind, name, text)


def _holder(body: Mapping[str, Any]) -> str:
    if (holder := owning_job(body)) is not None:
        return f"of DLJob {holder!r}"
    if (owner := controller_of(body)) is not None:
        return f"of {owner.get('kind')} {owner.get('name')!r}"
    managers = sorted({str(item.get("manager")) for item in body["metadata"].get("managedFields") or ()})
    return f"that belongs to no DLJob (written by {', '.join(managers[:3]) or 'an unknown client'})"


def rejected_object(error: RejectedError) -> Rejected:
    """Return the object of a job that could not be written because of ``error``."""
    taken = isinstance(error, NameTakenError)
    ends = isinstance(error, NameTakenError) and error.being_deleted
    return Rejected(error.kind, error.name, error.message, taken=taken, being_deleted=ends)


def only_ours(job: JobSeen, meta: Mapping[str, Any], manifest: Mapping[str, Any], digest: str) -> bool:
    """Return True if an object is as the operator applied it from the manifest with this digest.

    A client that adds or changes fields becomes an owner of them. If a client only removes fields, they are missing
    among those that the operator owns. ``meta``: the object's metadata.
    """
    entries = meta.get("managedFields") or []
    owners = {(item.get("manager"), item.get("operation")) for item in entries}
    applied = (meta.get("annotations") or {}).get(APPLIED_ANNOTATION)
    if (owner_uid({"metadata": meta}), applied, owners) != (job.uid, digest, {(FIELD_OWNER, "Apply")}):
        return False
    own = {name: value for name, value in manifest["metadata"].items() if name not in ("name", "namespace")}
    content = {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind")}
    fields = entries[0].get("fieldsV1")
    return bool(fields) and _has_all(fields, {**content, "metadata": own})


def _has_all(fields: Mapping[str, Any], value: Any) -> bool:
    """Return True if a manager owns all fields of a JSON value. ``fields``: the entry ``fieldsV1`` about the value.

    An empty entry is about a value without parts, or one whose parts are not owned apart, such as a selector.
    """
    if not fields:
        return True
    if isinstance(value, Mapping):
        return all(f"f:{name}" in fields and _has_all(fields[f"f:{name}"], item) for name, item in value.items())
    if isinstance(value, list):
        return all(any(_is_about(key, item) and _has_all(fields[key], item) for key in fields) for item in value)
    return True


def _is_about(key: str, item: Any) -> bool:
    """Return True if an entry of ``fieldsV1`` is about this item of a list.

    ``key``: ``v:`` and the item, or ``k:`` and the fields by which the item is known, with their default values.
    """
    kind, _, text = key.partition(":")
    if kind == "k" and isinstance(item, Mapping):
        return all(item.get(name, default) == default for name, default in json.loads(text).items())
    return kind == "v" and bool(json.loads(text) == item)
