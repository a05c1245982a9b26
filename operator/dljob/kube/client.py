"""The operator's actions on the cluster.

The operator applies an object only if its manifest differs from the one that it applied last. To find out, it compares
digests of the two manifests. An annotation of each object stores the digest. For kinds that are watched, the operator
reads the annotation, so that it does not apply the objects again after a restart. For other kinds, the operator also
stores the digest in memory.
"""

import asyncio
import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any

from dljob.api import API_VERSION, DLProfileStatus
from dljob.cluster import ClusterView
from dljob.job.observed import APPLIED_ANNOTATION, JobSeen
from dljob.job.profiles import devices, profile_name, updated_profile
from dljob.kube import kinds, pki, view
from dljob.kube.cache import Cache, JobKey
from dljob.kube.kinds import Kind
from dljob.kube.rest import FIELD_OWNER, Api, ApiError, Body
from dljob.reconcile import RunMeasurements, Target
from dljob.render import Names
from dljob.render.config import Manifest
from dljob.render.names import metadata
from dljob.status import Event, merge_patch

PODS_REUSED_S = 2.0
"""Seconds for which a list of all pods is reused. Pods of plans that are made in this time are not in the list.

Reservations account for the resources of these pods.
"""
_LAST = ("RoleBinding", "StatefulSet")
"""Kinds to apply last.

An operator without the permission ``bind`` cannot create a RoleBinding before its Role exists. The pods of a
StatefulSet need all other objects.
"""
_NOT_OVER = "status.phase!=Succeeded,status.phase!=Failed"


class RejectedError(Exception):
    """The API server rejected an object of a job. A retry is useless until the object or the cluster changes."""

    def __init__(self, kind: str, name: str, message: str) -> None:
        super().__init__(f"{kind} {name}: {message}")
        self.kind, self.name, self.message = kind, name, message


class Kube:
    def __init__(self, api: Api, cache: Cache, resync_s: float, namespaces: Sequence[str] = ()) -> None:
        self.api = api
        self._cache = cache
        self._resync_s = resync_s
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._applied: dict[tuple[str, str, str], tuple[str, float]] = {}
        """Applied objects: (kind, namespace, name) → (digest of the manifest, monotonic time of the answer in s)."""
        self._pods: tuple[float, list[Body]] | None = None

    async def apply(self, job: JobSeen, manifests: Iterable[Manifest]) -> int:
        """Apply the manifests that have changed, first those on which other objects depend. Return their number.

        Raise RejectedError if the API server rejects an object, and ApiError if a request fails otherwise.
        """
        due = [(manifest, _digest(manifest)) for manifest in manifests]
        due = [(manifest, digest) for manifest, digest in due if not self._stands(manifest, digest)]
        first = [item for item in due if item[0]["kind"] not in _LAST]
        last = [item for item in due if item[0]["kind"] in _LAST]
        for group in (first, last):
            await complete_all(self._apply(manifest, digest) for manifest, digest in group)
        return len(due)

    def _stands(self, manifest: Manifest, digest: str) -> bool:
        kind, meta = kinds.APPLIED[manifest["kind"]], manifest["metadata"]
        if kind in (kinds.STATEFUL_SET, kinds.CONFIG_MAP, kinds.CLAIM):
            return self._cache.applied(kind, meta["namespace"], meta["name"]) == digest
        last = self._applied.get((kind.kind, meta["namespace"], meta["name"]))
        return last is not None and last[0] == digest and monotonic() - last[1] < self._resync_s

    async def _apply(self, manifest: Manifest, digest: str) -> None:
        kind, meta = kinds.APPLIED[manifest["kind"]], manifest["metadata"]
        annotations = {**meta.get("annotations", {}), APPLIED_ANNOTATION: digest}
        body = {**manifest, "metadata": {**meta, "annotations": annotations}}
        try:
            answer = await self.api.apply(kind, body)
        except ApiError as error:
            if error.rejected or (error.code == 500 and "typed" in error.message):
                raise RejectedError(kind.kind, meta["name"], error.message) from error
            raise
        self._applied[kind.kind, meta["namespace"], meta["name"]] = (digest, monotonic())
        if kind in (kinds.STATEFUL_SET, kinds.CONFIG_MAP, kinds.CLAIM):
            self._cache.put(kind, answer)

    def forget(self, key: JobKey, uid: str) -> None:
        """Forget the applied digests of a job that no longer exists."""
        names = Names(key[1], uid)
        for name in {names.account, names.service, names.plan, names.report, names.secret, names.claim}:
            for kind in (*kinds.APPLIED, "Secret"):
                self._applied.pop((kind, key[0], name), None)

    async def ensure_secret(self, job: JobSeen, name: str, cluster_domain: str, now: datetime) -> None:
        """Create the Secret with the job's TLS keys if it does not exist. The operator never reads or updates it."""
        key = ("Secret", job.namespace, name)
        last = self._applied.get(key)
        if last is not None and monotonic() - last[1] < self._resync_s:
            return
        issued = pki.issue(job.name, job.namespace, Names.of(job).service, cluster_domain, now)
        data = {"ca.crt": issued.ca_cert, "tls.crt": issued.cert, "tls.key": issued.key}
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls",
            "metadata": metadata(job, name),
            "data": {file: base64.b64encode(text).decode() for file, text in data.items()},
        }
        try:
            await self.api.create(kinds.SECRET, body)
        except ApiError as error:
            if error.rejected:
                raise RejectedError("Secret", name, error.message) from error
            if not error.conflict:
                raise
        self._applied[key] = ("", monotonic())

    async def scale(self, job: JobSeen, name: str, replicas: int) -> None:
        # The object now differs from the applied manifest, so the next apply must not be skipped.
        patch = {"metadata": {"annotations": {APPLIED_ANNOTATION: None}}, "spec": {"replicas": replicas}}
        try:
            answer = await self.api.merge(kinds.STATEFUL_SET, job.namespace, name, patch)
        except ApiError as error:
            if not error.not_found:
                raise
            self._cache.drop(kinds.STATEFUL_SET, job.namespace, name)
        else:
            self._cache.put(kinds.STATEFUL_SET, answer)

    async def delete(self, job: JobSeen, target: Target) -> None:
        kind = {"StatefulSet": kinds.STATEFUL_SET, "Pod": kinds.POD}[target.kind]
        grace_s = 0 if target.force else None
        await self.api.delete(kind, job.namespace, target.name, uid=target.uid, grace_s=grace_s)

    async def delete_job(self, job: JobSeen) -> None:
        await self.api.delete(kinds.DLJOB, job.namespace, job.name, uid=job.uid)

    async def write_status(self, job: JobSeen, status: Mapping[str, Any]) -> bool:
        """Write the status of a job if it has changed. Return True if the status was written.

        Return False if it has not changed or if the job was deleted.
        """
        patch = merge_patch(job.status, status)
        if not patch:
            return False
        # The uid makes the patch fail for a new job of the same name, because metadata.uid is immutable.
        body = {"metadata": {"uid": job.uid}, "status": patch}
        try:
            answer = await self.api.merge(kinds.DLJOB, job.namespace, job.name, body, subresource="status")
        except ApiError as error:
            if error.not_found or error.conflict:
                return False
            raise
        self._cache.put(kinds.DLJOB, answer)
        return True

    async def record_event(self, job: JobSeen, event: Event, now: datetime) -> None:
        """Post an event about the job. A repeated event raises the count of the existing one."""
        stamp, name = now.strftime("%Y-%m-%dT%H:%M:%SZ"), event.name(job.name, job.uid)
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": job.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION, "kind": "DLJob", "namespace": job.namespace, "name": job.name,
                "uid": job.uid,
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message,
            "source": {"component": FIELD_OWNER},
            "reportingComponent": FIELD_OWNER,
            "reportingInstance": FIELD_OWNER,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }  # fmt: skip
        try:
            await self.api.create(kinds.EVENT, body)
        except ApiError as error:
            if not error.conflict:
                raise
            existing = await self.api.get(kinds.EVENT, job.namespace, name)
            again = {"count": existing.get("count", 1) + 1, "lastTimestamp": stamp}
            await self.api.merge(kinds.EVENT, job.namespace, name, again)

    async def view(self, job: JobSeen | None, reservations: Iterable[view.Reservation]) -> ClusterView:
        """Return the free resources of the cluster. Resources that the pods of ``job`` use count as free."""
        pods = await self._all_pods()
        if job is not None:
            mine = {pod.uid for pod in self._cache.pods_of(job.key)}
            pods = [pod for pod in pods if pod["metadata"]["uid"] not in mine]
        return view.cluster_view(self._cache.nodes(), pods, reservations)

    async def _all_pods(self) -> list[Body]:
        """Return all pods that have not ended.

        If the operator is limited to some namespaces, return only the pods of these namespaces.
        """
        if self._pods is not None and monotonic() - self._pods[0] < PODS_REUSED_S:
            return self._pods[1]
        found: list[Body] = []
        for namespace in self._namespaces:
            found += await self.api.find(kinds.POD, namespace, fieldSelector=_NOT_OVER, resourceVersion="0")
        self._pods = (monotonic(), found)
        return found

    async def update_profiles(self, measurements: RunMeasurements, now: datetime) -> None:
        """Write the measurements of a run into the profiles of its devices."""
        profiles = {profile["metadata"]["name"]: profile for profile in self._cache.profiles()}
        model = measurements.model
        for device in devices(measurements.report):
            name = profile_name(model, device)
            if name not in profiles:
                spec = {"model": model, "device": device}
                body: Body = {
                    "apiVersion": API_VERSION, "kind": "DLProfile", "metadata": {"name": name}, "spec": spec,
                }  # fmt: skip
                self._cache.put(kinds.PROFILE, await self.api.apply(kinds.PROFILE, body))
            old = profiles.get(name, {}).get("status") or {}
            before = DLProfileStatus.model_validate(old)
            after = updated_profile(
                before, model, device, measurements.report, now, measurements.place, measurements.data
            )
            if patch := merge_patch(old, after.manifest()):
                answer = await self.api.merge(kinds.PROFILE, None, name, {"status": patch}, subresource="status")
                self._cache.put(kinds.PROFILE, answer)

    async def prune(self, kind: Kind, selector: str = "") -> list[JobKey]:
        """Remove cached objects of this kind whose deletion the watches missed. Return the keys of their jobs."""
        jobs: list[JobKey] = []
        for namespace in self._namespaces if kind.namespaced else (None,):
            present, before = await self.api.uids(kind, namespace, selector)
            jobs += self._cache.prune(kind, present, before, namespace)
        return jobs


async def complete_all(calls: Iterable[Any]) -> None:
    """Await all calls, also if some fail, and then raise the first error. No call continues in the background."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
