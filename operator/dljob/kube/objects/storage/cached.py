"""Look up claims, StorageClasses and PersistentVolumes in the cache, and the jobs that wait because of them."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from dljob.api.compact import brief_conditions
from dljob.cluster.node_selector import NodeSelector
from dljob.job.observed import ClaimSeen, ClassSeen, JobSeen
from dljob.kube.kinds import CLAIM, STORAGE_CLASS, VOLUME, Kind

VOLUME_NODE_CONFLICT = "VolumeNodeConflict"
"""Reason of Planned=False of a job whose volumes are where it finds too few nodes."""
Entries = Mapping[tuple[str, str], Any]
"""Objects of one kind in the cache (``CachedObject``), by namespace and name."""


class CachedStorage:
    """The claims, StorageClasses and PersistentVolumes in the cache. Only volumes with node affinity are cached."""

    def __init__(self, claims: Entries, claims_of: Mapping[str, Collection[str]], classes: Entries, volumes: Entries):
        """``claims_of``: namespace → names of its claims."""
        self._claims, self._claims_of, self._classes, self._volumes = claims, claims_of, classes, volumes
        self._changed_in = set[str]()
        """Namespaces of the claims whose volumes have changed since the last call of ``waiting``."""

    def volume_changed(self, body: Mapping[str, Any]) -> None:
        """Note that a PersistentVolume has other nodes than before, or is new."""
        self._changed_in.add(((body.get("spec") or {}).get("claimRef") or {}).get("namespace") or "")

    def claims(self, namespace: str) -> dict[str, ClaimSeen]:
        return {name: self._claims[namespace, name].seen for name in self._claims_of.get(namespace, ())}

    def classes(self) -> tuple[ClassSeen, ...]:
        return tuple(entry.seen for entry in self._classes.values())

    def volumes(self, claims: Iterable[ClaimSeen]) -> dict[str, NodeSelector]:
        """Return name → nodes that can mount it, for each PersistentVolume of ``claims`` that limits the nodes."""
        found = ((claim.volume, self._volumes.get(("", claim.volume))) for claim in claims if claim.volume)
        return {name: entry.seen for name, entry in found if entry is not None}

    def waiting(self, jobs: Iterable[JobSeen], changed: Collection[Kind]) -> Iterator[JobSeen]:
        """Yield the jobs that changes of objects of the kinds ``changed`` may let start, or may let be planned.

        A claim or a StorageClass matters to jobs that wait for a volume, or for nodes on which it can be mounted. A
        PersistentVolume matters only to the latter, in the namespace of its claim.
        """
        namespaces, self._changed_in = self._changed_in, set()
        objects = not {CLAIM, STORAGE_CLASS}.isdisjoint(changed)
        if not objects and not namespaces:
            return
        for job in jobs:
            conditions = brief_conditions(job.status)
            if job.status.get("phase") in ("Complete", "Failed"):
                continue
            unready = conditions.get("VolumeReady", ("True", ""))[0] != "True"
            apart = conditions.get("Planned") == ("False", VOLUME_NODE_CONFLICT)
            if (objects and (unready or apart)) or (VOLUME in changed and apart and job.namespace in namespaces):
                yield job
