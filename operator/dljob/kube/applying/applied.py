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

    __slots__ = ("comparable", "oldest_s")

    def __init__(self, objects: Mapping[str, Applied]) -> None:
        super().__init__(objects)
        self.oldest_s = min(each.at for each in objects.values())
        """No ``Applied.at`` is smaller. If all objects were seen later, only this is changed, without compression."""
        self.comparable = all(each.version for each in objects.values())
        """True if the resourceVersions of all objects are known."""


class AppliedObjects:
    """What was applied last of the objects that no watch shows, and when."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, _AppliedToJob]] = {}
        """By namespace and name of the job."""

    def get(self, job: JobSeen, kind: Kind, name: str) -> Applied | None:
        return self.of(job).get(object_id(kind, name))

    def put(self, job: JobSeen, kind: Kind, name: str, applied: Applied) -> None:
        self.update(job, {object_id(kind, name): applied})

    def update(self, job: JobSeen, applied: Mapping[str, Applied]) -> None:
        """Put what was applied. ``applied``: by the ids of objects (``object_id``), not empty."""
        self._of.setdefault(job.namespace, {})[job.name] = _AppliedToJob({**self.of(job), **applied})

    def of(self, job: JobSeen) -> Mapping[str, Applied]:
        """Return what was applied to a job, by the ids of objects."""
        found = self._found(job.key)
        return {} if found is None else _objects(found)

    def knows(self, job: JobSeen) -> bool:
        return self._found(job.key) is not None

    def oldest_s(self, job: JobSeen) -> float:
        """Return the smallest ``Applied.at`` of a job's objects; infinity if there is none."""
        found = self._found(job.key)
        return inf if found is None else found.oldest_s

    def jobs(self, namespace: str) -> list[JobKey]:
        """Return the jobs of a namespace whose applied objects are known."""
        return [(namespace, name) for name in self._of.get(namespace, {})]

    def comparable(self, namespace: str) -> list[float]:
        """Return ``oldest_s`` of those jobs in a namespace whose resourceVersions are all known."""
        return [each.oldest_s for each in self._of.get(namespace, {}).values() if each.comparable]

    def note_seen(self, key: JobKey, versions: Mapping[str, tuple[str, str]], at: float) -> None:
        """Note when those objects of a job that are as they were applied were seen, at a monotonic time in seconds.

        ``versions``: uid and resourceVersion of existing objects, by their ids.
        """
        found = self._found(key)
        if found is None or not found.comparable or found.oldest_s >= at:
            return
        objects = _objects(found)
        seen = {what: each for what, each in objects.items() if versions.get(what) == (each.uid, each.version)}
        if len(seen) == len(objects):
            found.oldest_s = at
        elif seen:
            later = {what: each._replace(at=max(each.at, at)) for what, each in seen.items()}
            self._of[key[0]][key[1]] = _AppliedToJob({**objects, **later})

    def forget_job(self, key: JobKey) -> None:
        namespace, name = key
        jobs = self._of.get(namespace, {})
        jobs.pop(name, None)
        if not jobs:
            self._of.pop(namespace, None)

    def clear(self) -> None:
        self._of.clear()

    def _found(self, key: JobKey) -> _AppliedToJob | None:
        return self._of.get(key[0], {}).get(key[1])


def _objects(packed: _AppliedToJob) -> dict[str, Applied]:
    found = ((what, Applied(*applied)) for what, applied in packed.value.items())
    return {what: each._replace(at=max(each.at, packed.oldest_s)) for what, each in found}


def object_id(kind: Kind, name: str) -> str:
    return f"{kind.kind} {name}"
