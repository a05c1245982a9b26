"""What the operator applied last of the objects of jobs that no watch shows. No I/O."""

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from dljob.api.compact import CompactJson
from dljob.job.observed import JobSeen
from dljob.kube.kinds import Kind
from dljob.kube.objects.store import JobKey


class Applied(NamedTuple):
    digest: str
    at: float
    """Monotonic time in seconds when the object was last applied, or seen to be as it was applied."""
    uid: str | None
    version: str | None
    """The object's resourceVersion after it was applied."""


TO_APPLY = Applied("", 0.0, None, None)
"""In place of an object that was not applied, so that ``apply`` applies it, whatever the plan's ConfigMap records."""


class _AppliedToJob(CompactJson):
    """``Applied`` of the objects of a job, by '<kind> <name>'. As Python objects, those of 6 take 3.2 KiB."""

    __slots__ = ("oldest_s",)

    def __init__(self, objects: Mapping[str, Applied]) -> None:
        super().__init__(objects)
        self.oldest_s = min(each.at for each in objects.values())
        """The smallest ``Applied.at``, to know without decompression that no object is due."""


class AppliedObjects:
    """What was applied last of the objects that no watch shows, and when."""

    def __init__(self) -> None:
        self._of: dict[JobKey, _AppliedToJob] = {}

    def get(self, job: JobSeen, kind: Kind, name: str) -> Applied | None:
        return self.of(job).get(object_id(kind, name))

    def put(self, job: JobSeen, kind: Kind, name: str, applied: Applied) -> None:
        self.update(job, {object_id(kind, name): applied})

    def update(self, job: JobSeen, applied: Mapping[str, Applied]) -> None:
        """Put what was applied. ``applied``: by the ids of objects (``object_id``), not empty."""
        self._of[job.key] = _AppliedToJob({**self.of(job), **applied})

    def of(self, job: JobSeen) -> Mapping[str, Applied]:
        """Return what was applied to a job, by the ids of objects."""
        found = self._of.get(job.key)
        return {} if found is None else {what: Applied(*applied) for what, applied in found.value.items()}

    def knows(self, job: JobSeen) -> bool:
        return job.key in self._of

    def oldest_s(self, job: JobSeen) -> float:
        """Return the smallest ``Applied.at`` of a job's objects; infinity if there is none."""
        found = self._of.get(job.key)
        return inf if found is None else found.oldest_s

    def forget_job(self, key: JobKey) -> None:
        self._of.pop(key, None)

    def clear(self) -> None:
        self._of.clear()


def object_id(kind: Kind, name: str) -> str:
    return f"{kind.kind} {name}"
