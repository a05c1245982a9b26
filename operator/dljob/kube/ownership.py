"""Find out who owns an object. The operator applies to, scales and deletes only objects that the job controls."""

from collections.abc import Mapping
from typing import Any

from dljob.job.observed import JobSeen
from dljob.kube.kinds import Kind
from dljob.kube.objects.trim import controller_of, owning_job
from dljob.kube.rest import RejectedError


class NameTakenError(RejectedError):
    """The name of one of the job's objects is in use by an object that the job does not control."""


def name_taken(job: JobSeen, kind: Kind, body: Mapping[str, Any]) -> NameTakenError:
    """Return the error to raise if another owner's object has a name that the job needs. ``body``: this object."""
    name = body["metadata"]["name"]
    text = (
        f"metadata.name: the job {job.name!r} needs a {kind.kind} named {name!r}; found one {_holder(job, body)}. "
        "Choose another job name, or delete that object"
    )
    return NameTakenError(kind.kind, name, text)


def _holder(job: JobSeen, body: Mapping[str, Any]) -> str:
    if (holder := owning_job(body)) is not None:
        if holder == job.name:
            return "of an earlier job of this name, which Kubernetes is still deleting"
        return f"of DLJob {holder!r}"
    if (owner := controller_of(body)) is not None:
        return f"of {owner.get('kind')} {owner.get('name')!r}"
    managers = sorted({str(item.get("manager")) for item in body["metadata"].get("managedFields") or ()})
    return f"that belongs to no DLJob (written by {', '.join(managers[:3]) or 'an unknown client'})"
