"""Find out who owns an object. The operator applies to, scales and deletes only objects that the job controls."""

from collections.abc import Mapping
from typing import Any

from dljob.job.observed import JobSeen, Rejected
from dljob.job.waiting import earlier_job_text
from dljob.kube.answers import RejectedError
from dljob.kube.kinds import Kind
from dljob.kube.objects.trim import controller_of, owning_job


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
