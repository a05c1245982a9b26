"""Find out which applied objects somebody has changed or deleted, of those that no watch shows.

After the resync interval, the operator asks for the metadata of each object. If many jobs of a namespace will soon be
due, it lists the metadata of all their objects instead: a list of 100 objects costs the API server as much as four
requests for one. All jobs whose objects are as the operator has left them are then due again at the same time.
"""

import asyncio
from collections.abc import Iterable, Mapping
from math import inf
from time import monotonic

from dljob.api import Phase
from dljob.job.observed import JOB_LABEL, JobSeen
from dljob.job.profiles import MANAGED_LABEL, MANAGER
from dljob.kube import kinds
from dljob.kube.answers import ApiError
from dljob.kube.applying.applied import Applied, AppliedObjects, object_id
from dljob.kube.applying.calls import complete_all
from dljob.kube.kinds import Kind
from dljob.kube.ownership import only_ours
from dljob.kube.rest import Api
from dljob.render.config import Manifest

RECOVERY_RESYNC_S = 30.0
"""The resync interval in seconds of jobs that recover, if it is shorter than that of the installation."""
WATCHED = (kinds.STATEFUL_SET, kinds.CONFIG_MAP, kinds.CLAIM, kinds.PROVISIONING_REQUEST)
OURS = f"{MANAGED_LABEL}={MANAGER}"
"""Label selector of all objects that the operator applies. JOB-logs has no label of a job."""
MIN_LISTED, MIN_SHARE = 8, 0.25
"""The objects of a namespace are listed for at least this number of jobs, and this part of its jobs.

For fewer, requests for single objects cost less."""
JOBS_PER_TURN = 50
"""Jobs that are compared with a list before other tasks of the event loop have their turn."""


def within(job: JobSeen, at: float, resync_s: float) -> bool:
    """Return True if the resync interval of a job is not over. ``at``: monotonic time of its begin in seconds.

    ``resync_s``: interval of the installation in seconds.
    """
    return 0.0 <= monotonic() - at < (min(resync_s, RECOVERY_RESYNC_S) if recovers(job) else resync_s)


def recovers(job: JobSeen) -> bool:
    return job.status.get("phase") == Phase.RECOVERING


def kind_of(manifest: Manifest) -> Kind:
    return kinds.APPLIED[manifest["apiVersion"], manifest["kind"]]


def is_watched(manifest: Manifest) -> bool:
    """Return True if a watch shows the object: if its kind is watched and it has the label by which watches select."""
    return kind_of(manifest) in WATCHED and JOB_LABEL in manifest["metadata"].get("labels", {})


class Looks:
    def __init__(self, api: Api, applied: AppliedObjects, resync_s: float) -> None:
        self._api, self._applied, self._resync_s = api, applied, resync_s
        self._listing = asyncio.Lock()
        """Held while a namespace is listed, so that only the metadata of one are in memory."""
        self._listed_s: dict[str, float] = {}
        """Namespace → monotonic time in seconds of its last list."""
        self._forbidden: set[Kind] = set()
        """Kinds that the operator may not list. Roles of an older release lack the permission."""

    async def changed(self, job: JobSeen, manifests: Iterable[Manifest]) -> list[tuple[Manifest, str]]:
        """Return the manifests whose objects somebody has changed or deleted, with their digests.

        Look only at objects that no watch shows, that were applied from the same manifest, and whose resync interval is
        over. Raise ApiError if a request fails.
        """
        wanted = list(manifests)
        due = self._due(job, wanted)
        if due and self._many_are_due(job.namespace):
            await self._list_all(job.namespace, {kind_of(item) for item, _ in due})
            due = self._due(job, wanted)
        looks = await complete_all(self._is_unchanged(job, *pair) for pair in due)
        return [pair for pair, unchanged in zip(due, looks, strict=True) if not unchanged]

    def forget_all(self) -> None:
        self._listed_s.clear()

    def _due(self, job: JobSeen, manifests: Iterable[Manifest]) -> list[tuple[Manifest, str]]:
        oldest_s = self._applied.oldest_s(job)
        if oldest_s == inf or within(job, oldest_s, self._resync_s):
            return []
        applied = self._applied.of(job)
        return [(item, digest) for item in manifests if (digest := self._overdue(job, item, applied)) is not None]

    def _overdue(self, job: JobSeen, manifest: Manifest, applied: Mapping[str, Applied]) -> str | None:
        """Return the digest of an object's manifest if it is time to look at the object again; otherwise None.

        ``applied``: what was applied to the job.
        """
        if is_watched(manifest):
            return None
        last = applied.get(object_id(kind_of(manifest), manifest["metadata"]["name"]))
        if last is None or not last.digest or within(job, last.at, self._resync_s):
            return None
        return last.digest

    def _many_are_due(self, namespace: str) -> bool:
        """Return True if a list costs less than the requests that it saves within the next half of the interval."""
        half_ago_s = monotonic() - self._resync_s / 2
        if self._listed_s.get(namespace, -inf) > half_ago_s:
            return False
        jobs = self._applied.comparable(namespace)
        return sum(oldest_s < half_ago_s for oldest_s in jobs) >= max(MIN_LISTED, MIN_SHARE * len(jobs))

    async def _list_all(self, namespace: str, of_kinds: Iterable[Kind]) -> None:
        """List the metadata of all objects of jobs in a namespace, and note which of them nobody has changed."""
        async with self._listing:
            if not self._many_are_due(namespace):
                return  # Another job has listed them meanwhile.
            self._listed_s[namespace] = begun_s = monotonic()
            versions = dict[str, tuple[str, str]]()
            for kind in sorted(set(of_kinds) - self._forbidden, key=lambda each: each.plural):
                try:
                    listed, _ = await self._api.metadata(kind, namespace, OURS)
                except ApiError as error:
                    if not error.forbidden:
                        raise
                    self._forbidden.add(kind)
                else:
                    for meta in listed:
                        versions[object_id(kind, meta["name"])] = meta["uid"], meta["resourceVersion"]
            for number, key in enumerate(self._applied.jobs(namespace)):
                if number % JOBS_PER_TURN == JOBS_PER_TURN - 1:
                    await asyncio.sleep(0)
                self._applied.note_seen(key, versions, begun_s)

    async def _is_unchanged(self, job: JobSeen, manifest: Manifest, digest: str) -> bool:
        """Return True if nobody has changed an object since the operator applied it from a manifest with this digest.

        The request for its metadata costs the API server much less than an apply. If another process of the operator
        has applied the object, so that its resourceVersion is not known, the operator must be the only owner of its
        fields, and own all fields of the manifest.
        """
        kind, name = kind_of(manifest), manifest["metadata"]["name"]
        last = self._applied.get(job, kind, name)
        if last is None or last.digest != digest:
            return False
        try:
            meta = await self._api.metadata_of(kind, job.namespace, name)
        except ApiError as error:
            if error.forbidden:
                return False  # To apply it again needs no permission to read it.
            if not error.not_found:
                raise
            self._applied.put(job, kind, name, last._replace(uid=None, version=None))
            return False
        if last.version is None:
            unchanged = only_ours(job, meta, manifest, digest)
        else:
            unchanged = (meta["uid"], meta.get("resourceVersion")) == (last.uid, last.version)
        if unchanged:
            seen = last._replace(at=monotonic(), uid=meta["uid"], version=meta.get("resourceVersion"))
            self._applied.put(job, kind, name, seen)
        return unchanged
