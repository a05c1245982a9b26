"""The cached objects of one kind, with indices. No I/O."""

from dataclasses import dataclass, field
from typing import Any

JobKey = tuple[str, str]
"""Namespace and name of a job."""


@dataclass(frozen=True, slots=True)
class CachedObject:
    """A watched object, with only the fields that the operator needs (``seen``).

    ``owner`` is the uid of the controlling owner, ``owning_job`` its name if it is a DLJob. Of a pod without the label
    of a job, only ``uid`` and ``version`` (resourceVersion) are stored, because a cluster may have tens of thousands of
    such pods. The resources that such a pod takes from its node are stored in ``Cache.ledger``.
    """

    uid: str
    version: int | None
    owner: str | None
    job: JobKey | None
    """Key of the job that the object's label names; None without the label."""
    seen: Any
    owning_job: str | None


@dataclass
class Store:
    """Objects of one kind by namespace and name, with indices by job label and namespace."""

    entries: dict[tuple[str, str], CachedObject] = field(default_factory=dict)
    by_job: dict[JobKey, tuple[str, ...]] = field(default_factory=dict)
    """Sorted names of the objects of each job. In a set, the few that a job has would take 200 bytes more."""
    by_namespace: dict[str, set[str]] = field(default_factory=dict)

    def add(self, key: tuple[str, str], entry: CachedObject) -> None:
        """Add an object, which must not be in the store. ``key``: its namespace and name."""
        self.entries[key] = entry
        self.by_namespace.setdefault(key[0], set()).add(key[1])
        if entry.job:
            self.by_job[entry.job] = tuple(sorted((*self.by_job.get(entry.job, ()), key[1])))

    def forget(self, key: tuple[str, str]) -> None:
        """Remove an object. Do nothing if it is not in the store."""
        if (entry := self.entries.pop(key, None)) is None:
            return
        self.by_namespace[key[0]].discard(key[1])
        if not self.by_namespace[key[0]]:
            del self.by_namespace[key[0]]
        if entry.job is not None:
            self.by_job[entry.job] = tuple(name for name in self.by_job[entry.job] if name != key[1])
            if not self.by_job[entry.job]:
                del self.by_job[entry.job]
