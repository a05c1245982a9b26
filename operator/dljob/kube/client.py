"""The operator's actions on the cluster."""

import asyncio
import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from math import inf
from time import monotonic
from typing import Any

from pydantic import ValidationError

from dlcontract import RunPhase
from dljob.api import API_VERSION, DLProfileStatus
from dljob.api.overrides import SECRET_LABEL
from dljob.job.identity import profile_name
from dljob.job.observed import APPLIED_ANNOTATION, JobSeen, Observed
from dljob.job.observed_structure import with_memory, with_split_step, with_structure
from dljob.job.profiles import MANAGED_LABEL, MANAGER, expired, updated_profile
from dljob.kube import kinds, pki
from dljob.kube.answers import ApiError, RejectedError, Written
from dljob.kube.applying import Applier, within
from dljob.kube.events.posted import PostedEvents
from dljob.kube.kinds import Kind
from dljob.kube.objects.cache import Cache
from dljob.kube.objects.store import JobKey
from dljob.kube.objects.trim import owner_uid
from dljob.kube.ownership import name_taken
from dljob.kube.plan_key import PlanKeySecret
from dljob.kube.rest import Api
from dljob.kube.transport import Body
from dljob.reconcile import RunMeasurements, RunMemory, Scale, Target
from dljob.render import Names
from dljob.render.config import Manifest
from dljob.render.names import metadata
from dljob.status import merge_patch


class Kube:
    def __init__(
        self,
        api: Api,
        cache: Cache,
        resync_s: float,
        namespaces: Sequence[str] = (),
        *,
        all_pods: bool = False,
        plan_key: PlanKeySecret | None = None,
    ) -> None:
        """``namespaces``: those whose jobs the operator manages; empty: all.

        ``all_pods``: True if the operator watches pods in all namespaces nevertheless. ``resync_s``: seconds after
        which an object that no watch shows is applied again, in case somebody has changed it.
        """
        self._plan_key = plan_key
        self.api = api
        self._cache = cache
        self._resync_s = resync_s
        self._namespaces, self._all_pods = namespaces, all_pods
        self._applier = Applier(api, cache, resync_s)
        self.events = PostedEvents(api, cache)
        self._updating = asyncio.Lock()
        """Held while profiles are updated, because each update begins with the result of the one before."""
        self._secrets: dict[JobKey, tuple[str, float]] = {}
        """Jobs whose Secret exists: uid of the job, and monotonic time in seconds when the Secret was last seen.

        An operator may never see that a job was gone before another one of its name was created."""

    async def apply(self, job: JobSeen, manifests: Iterable[Manifest]) -> int:
        """Apply the manifests that have changed and return their number. ``Applier.apply`` lists the errors.

        A Pod among the manifests is created after the other objects, because a pod cannot be changed.
        """
        wanted = list(manifests)
        applied = await self._applier.apply(job, (item for item in wanted if item["kind"] != kinds.POD.kind))
        for item in wanted:
            if item["kind"] == kinds.POD.kind:
                await self._applier.create_pod(job, item)
        return applied

    async def look_again(self, job: JobSeen, manifests: Iterable[Manifest]) -> int:
        """Apply again what somebody else has changed, as ``Applier.look_again`` describes. Return its number."""
        return await self._applier.look_again(job, (item for item in manifests if item["kind"] != kinds.POD.kind))

    def forget(self, key: JobKey) -> None:
        """Forget a job that no longer exists."""
        self._applier.forget(key)
        self._secrets.pop(key, None)

    def forget_all(self) -> None:
        """Forget what this operator has written. Call this when it becomes the leader: another one may have led."""
        self._applier.forget_all()
        self._secrets.clear()
        self.events.forget_all()

    async def ensure_secret(
        self, job: JobSeen, name: str, cluster_domain: str, now: datetime, *, started: bool = False
    ) -> None:
        """Create the Secret with the job's TLS keys if it does not exist. The operator reads only its metadata.

        ``started``: True if the job has StatefulSets. They are applied only after the Secret, which therefore exists
        unless somebody deleted it. If ``started`` is True and the operator may neither read nor create the Secret,
        raise no error. Otherwise, raise RejectedError if the API server rejects the Secret. Raise NameTakenError if the
        job does not control the Secret with this name: its creator would know the keys. Raise ApiError if a request
        fails for another reason.
        """
        uid, seen_s = self._secrets.get(job.key, ("", -inf))
        if uid == job.uid and within(job, seen_s, self._resync_s):
            return
        # A full quota rejects also a Secret that exists, before the API server notices that. So it is read first.
        exists = await self._has(job, kinds.SECRET, name)
        if not exists:
            try:
                await self.api.create(kinds.SECRET, _tls_secret(job, name, cluster_domain, now))
            except ApiError as error:
                if error.rejected and not (exists is None and started):
                    raise RejectedError("Secret", name, error.message) from error
                if error.reason == "AlreadyExists":  # Or it has another owner.
                    await self._has(job, kinds.SECRET, name)
                elif not error.rejected:  # Quotas answer with the code of a conflict, too.
                    raise
        self._secrets[job.key] = job.uid, monotonic()

    async def _has(self, job: JobSeen, kind: Kind, name: str) -> bool | None:
        """Return True if the job controls the object, and False if no object has this name.

        Return None if the operator has no permission to read it. Raise NameTakenError if it has another owner.
        """
        try:
            found = {"metadata": await self.api.metadata_of(kind, job.namespace, name)}
        except ApiError as error:
            if not (error.not_found or error.forbidden):
                raise
            return False if error.not_found else None
        if owner_uid(found) != job.uid:
            raise name_taken(job, kind, found)
        return True

    async def usable_secrets(self, namespace: str, names: Iterable[str]) -> dict[str, bool]:
        """Return name → True if the Secret has the label by which its owner lets DLJobs use it, and False if not.

        Secrets that do not exist are left out, and so are those after the first one that may not be used: a spec may
        name a thousand Secrets, and a job that waits for one is reconciled again and again.
        """
        found: dict[str, bool] = {}
        for name in names:
            try:
                labels = (await self.api.metadata_of(kinds.SECRET, namespace, name)).get("labels") or {}
            except ApiError as error:
                if not error.not_found:
                    raise
                break
            found[name] = labels.get(SECRET_LABEL) == "true"
            if not found[name]:
                break
        return found

    async def scale(self, job: JobSeen, scale: Scale) -> None:
        """Set the replicas of a StatefulSet. Do nothing if it is gone, or if another one now has its name."""
        # The object then differs from the applied manifest, so the next apply must not be skipped.
        annotations = {APPLIED_ANNOTATION: None}
        patch = {"metadata": {"uid": scale.uid, "annotations": annotations}, "spec": {"replicas": scale.replicas}}
        try:
            answer = await self.api.merge(kinds.STATEFUL_SET, job.namespace, scale.name, patch)
        except ApiError as error:
            if not (error.not_found or error.conflict):
                raise
            self._cache.drop(kinds.STATEFUL_SET, job.namespace, scale.name, scale.uid)
        else:
            self._cache.put(kinds.STATEFUL_SET, answer)

    async def delete(self, job: JobSeen, target: Target) -> None:
        """Delete an object of the job. Do nothing if it is gone, or if another object now has its name.

        With ``target.force``, delete it without a grace period.
        """
        known = (kinds.STATEFUL_SET, kinds.POD, kinds.PROVISIONING_REQUEST)
        kind = next(each for each in known if each.kind == target.kind)
        grace_s = 0 if target.force else None
        remains = await self.api.delete(kind, job.namespace, target.name, uid=target.uid, grace_s=grace_s)
        if remains is not None:
            self._cache.put(kind, remains)
        elif kind is kinds.PROVISIONING_REQUEST:  # The answer of the autoscaler in it no longer counts.
            self._cache.drop(kind, job.namespace, target.name, target.uid)

    async def delete_job(self, job: JobSeen) -> None:
        await self.api.delete(kinds.DLJOB, job.namespace, job.name, uid=job.uid)

    async def write_status(self, job: JobSeen, status: Mapping[str, Any]) -> Written:
        """Write the status of a job if it has changed. ``job``: the job as it was when the status was determined."""
        patch = merge_patch(job.status, status)
        if not patch:
            return Written.ALONE
        # The uid makes the patch fail for a new job of the same name, because metadata.uid is immutable.
        body = {"metadata": {"uid": job.uid}, "status": patch}
        try:
            answer = await self.api.merge(kinds.DLJOB, job.namespace, job.name, body, subresource="status")
        except ApiError as error:
            if error.not_found or error.conflict:
                return Written.NOT
            raise
        self._cache.put(kinds.DLJOB, answer)
        found = self._cache.job(job.key)
        return Written.ALONE if found is None or replace(found, status=job.status) == job else Written.AND_CHANGED

    async def observe(self, key: JobKey) -> Observed | None:
        """Return the cached state of a job; None if there is no such job.

        If its stored plan seems to be edited, read the job and the plan before that: the watch of one of them may lag
        behind the other, so that the plan only seems to be older than its record in the status. If the signature is
        that of an unknown key, also read the key again. Raise ApiError if one of them cannot be read.
        """
        observed = self._cache.observe(key)
        if observed is None or observed.plan_edit is None:
            return observed
        if self._plan_key is not None and self._cache.plans.lacks_key_of(key):
            await self._plan_key.read_again()
        for kind, name in ((kinds.DLJOB, key[1]), (kinds.CONFIG_MAP, Names.of(observed.job).plan)):
            try:
                self._cache.put(kind, await self.api.get(kind, key[0], name))
            except ApiError as error:
                if not error.not_found:
                    raise
                self._cache.drop(kind, key[0], name)
        return self._cache.observe(key)

    async def identify_sets(self, key: JobKey) -> None:
        """Ask the API server for the owners of StatefulSets that control pods with the job's label.

        Anybody can give a pod the label of a job. The pod belongs to the job only if a DLJob owns the pod's
        StatefulSet. Ask only about StatefulSets that no watch has shown. The watch selects StatefulSets by the label of
        a job, which those of other owners usually lack. Store the answers in the cache. If a request fails, the pods of
        this StatefulSet still count as the job's.
        """
        for uid, name in self._cache.unidentified_sets(key).items():
            body = None
            try:
                body = await self.api.get(kinds.STATEFUL_SET, key[0], name)
            except ApiError as error:
                if not error.not_found:
                    continue
            self._cache.identify_set(uid, body)

    async def update_profiles(self, measurements: RunMeasurements, namespace: str | None, now: datetime) -> None:
        """Update the DLProfile (measured constants) of each device type of a run. Create profiles that do not exist.

        ``namespace``: the only namespace whose plans use these profiles; None: the plans of all namespaces use them.
        """
        async with self._updating:
            await self._update_profiles(measurements, namespace, now)

    async def _update_profiles(self, measurements: RunMeasurements, namespace: str | None, now: datetime) -> None:
        model = measurements.model
        for device in measurements.devices:
            profile = await self._profile(model, device, namespace)
            before = _profile_status(profile.get("status") or {})
            complete = measurements.report.phase is RunPhase.SUCCEEDED
            if measurements.split_step is not None:
                after = with_split_step(before, measurements.split_step, now)
            else:
                after = with_structure(before, measurements.structure, now, complete=complete) or updated_profile(
                    before,
                    model,
                    device,
                    measurements.report,
                    now,
                    measurements.place,
                    measurements.data,
                    measurements.layouts.get(device),
                    measurements.machine_nodes,
                    measurements.used_cores.get(device),
                    measurements.start_s,
                )
            await self._write_profile(profile, after)

    async def _profile(self, model: str, device: str, namespace: str | None) -> Mapping[str, Any]:
        """Return the profile of a model on a type of device. Create it if it is not in the cache."""
        name = profile_name(model, device, namespace)
        found = next((each for each in self._cache.profiles() if each["metadata"]["name"] == name), None)
        return found or await self._created_profile(name, model, device, namespace)

    async def _write_profile(self, profile: Mapping[str, Any], after: DLProfileStatus) -> None:
        """Change the status of a profile to ``after``, if they differ."""
        name = profile["metadata"]["name"]
        if patch := merge_patch(profile.get("status") or {}, after.manifest()):
            answer = await self.api.merge(kinds.PROFILE, None, name, {"status": patch}, subresource="status")
            self._cache.put(kinds.PROFILE, answer)

    async def update_memory(self, found: RunMemory, now: datetime) -> None:
        """Update the memory of a training script in its profile, which only plans of its namespace use."""
        async with self._updating:
            profile = await self._profile(found.model, found.device, found.namespace)
            before = _profile_status(profile.get("status") or {})
            await self._write_profile(profile, with_memory(before, found.point, now))

    async def _created_profile(self, name: str, model: str, device: str, namespace: str | None) -> Body:
        """Create a profile that is not in the cache, and return it.

        If it exists already, return it as it is. It may be an administrator's, which must not get the operator's label.
        """
        spec = {"model": model, "device": device} | ({"namespace": namespace} if namespace else {})
        body: Body = {
            "apiVersion": API_VERSION,
            "kind": "DLProfile",
            "metadata": {"name": name, "labels": {MANAGED_LABEL: MANAGER}},
            "spec": spec,
        }
        try:
            found = await self.api.create(kinds.PROFILE, body)
        except ApiError as error:
            if not error.conflict:
                raise
            # The operator may list profiles, but not get one.
            listed = await self.api.find(kinds.PROFILE, None, fieldSelector=f"metadata.name={name}")
            if not listed:
                raise
            found = {**listed[0], "apiVersion": API_VERSION, "kind": "DLProfile"}
        self._cache.put(kinds.PROFILE, found)
        return found

    async def expire_profiles(self, now: datetime) -> None:
        """Delete the DLProfiles that are too old or too many, according to ``job.profiles.expired``."""
        for name in expired(self._cache.profiles(), now):
            await self.api.delete(kinds.PROFILE, None, name)

    async def prune(self, kind: Kind, selector: str = "") -> list[JobKey]:
        """Remove cached objects of this kind whose deletion the watches missed. Return the keys of their jobs.

        To find them, list the uids of all objects that the label ``selector`` matches; empty: all objects of the kind.
        """
        jobs: list[JobKey] = []
        for namespace in kind.watched_in(self._namespaces, all_pods=self._all_pods):
            present, before = await self.api.uids(kind, namespace, selector)
            jobs += self._cache.prune(kind, present, before, namespace)
        return jobs


def _tls_secret(job: JobSeen, name: str, cluster_domain: str, now: datetime) -> Body:
    issued = pki.issue(job.name, job.namespace, Names.of(job).service, cluster_domain, now)
    data = {"ca.crt": issued.ca_cert, "tls.crt": issued.cert, "tls.key": issued.key}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": metadata(job, name),
        "data": {file: base64.b64encode(text).decode() for file, text in data.items()},
    }


def _profile_status(status: Mapping[str, Any]) -> DLProfileStatus:
    """Return the status of a profile, or an empty one if it does not parse because somebody edited it."""
    try:
        return DLProfileStatus.model_validate(status, extra="ignore")
    except ValidationError:
        return DLProfileStatus()
