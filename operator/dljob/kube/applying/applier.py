"""Apply the objects of a job, only if they have changed and only if the job controls them.

Watched objects store the digest of the applied manifest in an annotation, so that a restarted operator does not apply
them again. For the other kinds, the digest of all their manifests is an annotation of the plan's ConfigMap. In case
somebody has changed or deleted them, the operator looks at their metadata after the resync interval (``Looks``), and
applies those again that are not as it has left them. After its own restart, it does so after a random part of the
interval. While a job recovers, the interval is shorter: without the Service, the agents of its pods do not find each
other.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from time import monotonic

from dljob.job.observed import APPLIED_ANNOTATION, SIGNATURE_ANNOTATION, SUPPORT_ANNOTATION, JobSeen
from dljob.job.plan.authentic import signed_part
from dljob.kube import kinds
from dljob.kube.answers import ApiError, RejectedError
from dljob.kube.applying.applied import TO_APPLY, Applied, AppliedObjects, object_id
from dljob.kube.applying.calls import complete_all
from dljob.kube.applying.looks import Looks, is_watched, kind_of
from dljob.kube.kinds import Kind
from dljob.kube.objects.cache import Cache
from dljob.kube.objects.store import JobKey
from dljob.kube.objects.trim import controller_of, owner_uid
from dljob.kube.ownership import name_taken
from dljob.kube.rest import Api
from dljob.kube.transport import Body
from dljob.render import Names
from dljob.render.config import Manifest

AFTER_OTHERS = (kinds.ROLE_BINDING, kinds.PROVISIONING_REQUEST)
"""Kinds whose objects refer to other objects of the job: to a Role, and to PodTemplates."""


class Applier:
    def __init__(self, api: Api, cache: Cache, resync_s: float) -> None:
        self._api, self._cache, self._resync_s = api, cache, resync_s
        self._applied = AppliedObjects()
        self._looks = Looks(api, self._applied, resync_s)

    async def apply(self, job: JobSeen, manifests: Iterable[Manifest]) -> int:
        """Apply the manifests that have changed. Return their number.

        Objects on which other objects depend come first: the RoleBinding needs its Role, the plan's ConfigMap records
        that the others are applied, and pods need all objects. If an object is rejected, the plan's ConfigMap is still
        applied, because a lost node is fenced with it. Raise NameTakenError if another owner has an object of one of
        the names, RejectedError if the API server rejects an object, and ApiError if a request fails otherwise.
        """
        wanted = list(manifests)
        texts = [_text(item) for item in wanted]
        unwatched = [text for item, text in zip(wanted, texts, strict=True) if not is_watched(item)]
        support = _digest(f"[{', '.join(unwatched)}]")  # The same text as of the list of these manifests.
        digests = [_digest(text) for text in texts]
        pairs = list(zip(wanted, digests, strict=True))
        self._restore(job, pairs, support)
        applied = self._applied.of(job)
        due = [pair for pair in pairs if not self._stands(job, *pair, support, applied)]
        errors: list[Exception] = []
        for group in _ordered(due, Names.of(job).plan):
            if errors and any(kind_of(item) is kinds.STATEFUL_SET for item, _ in group):
                break
            noted = None if errors else support
            results = await complete_all((self._apply(job, *pair, noted) for pair in group), wait_only=True)
            errors += [error for error in results if isinstance(error, Exception)]
        if errors:
            raise errors[0]
        return len(due)

    async def look_again(self, job: JobSeen, manifests: Iterable[Manifest]) -> int:
        """Apply those manifests of objects that no watch shows again whose objects somebody has changed or deleted.

        Return their number. Do nothing within the resync interval, and for manifests that have changed: these are for
        ``apply``, which raises the same errors.
        """
        changed = await self._looks.changed(job, manifests)
        for group in _ordered(changed, Names.of(job).plan):
            await complete_all(self._apply_again(job, *pair) for pair in group)
        return len(changed)

    async def _apply_again(self, job: JobSeen, manifest: Manifest, digest: str) -> None:
        """Apply an object that ``look_again`` has found changed. After an error, it is due again at once.

        If the object is rejected, ``apply`` is the next to try, so that the job's status says why before anything else.
        """
        kind, name = kind_of(manifest), manifest["metadata"]["name"]
        last = self._applied.get(job, kind, name)
        try:
            await self._apply(job, manifest, digest, None)
        except RejectedError:
            self._applied.put(job, kind, name, TO_APPLY)
            raise
        except ApiError:
            self._applied.put(job, kind, name, last or TO_APPLY)
            raise

    async def create_pod(self, job: JobSeen, pod: Manifest) -> None:
        """Create a pod. Do nothing if it exists: a request whose answer was lost is sent again.

        Raise NameTakenError if the job does not control the pod with this name, and RejectedError if the API server
        rejects the pod.
        """
        name = pod["metadata"]["name"]
        try:
            found = await self._api.create(kinds.POD, pod)
        except ApiError as error:
            if error.rejected:
                raise RejectedError("Pod", name, error.message) from error
            if error.reason != "AlreadyExists":
                raise
            # The operator may list pods, but not get one.
            listed = await self._api.find(kinds.POD, job.namespace, fieldSelector=f"metadata.name={name}")
            if not listed:
                raise
            found = listed[0]
            if owner_uid(found) != job.uid:
                raise name_taken(job, kinds.POD, found) from error
        self._cache.put(kinds.POD, found)

    def forget(self, key: JobKey) -> None:
        """Forget the applied objects of a job that no longer exists."""
        self._applied.forget_job(key)

    def forget_all(self) -> None:
        """Forget the applied objects of all jobs, because another operator may have applied others meanwhile."""
        self._applied.clear()
        self._looks.forget_all()

    def _restore(self, job: JobSeen, pairs: Iterable[tuple[Manifest, str]], support: str) -> None:
        """Note what another process of the operator has applied, if the plan's ConfigMap records this.

        ``pairs``: manifests with their digests. ``support``: as of ``_stands``.
        """
        if self._applied.knows(job):
            return
        plan = self._cache.found(kinds.CONFIG_MAP, job.namespace, Names.of(job).plan)
        if plan is None or plan.owner != job.uid or plan.seen.support != support:
            return
        since = monotonic() - random.uniform(0, self._resync_s)
        unwatched = [(item, digest) for item, digest in pairs if not is_watched(item)]
        ids = {object_id(kind_of(item), item["metadata"]["name"]): digest for item, digest in unwatched}
        if ids:
            self._applied.update(job, {what: Applied(digest, since, None, None) for what, digest in ids.items()})

    def _stands(
        self, job: JobSeen, manifest: Manifest, digest: str, support: str, applied: Mapping[str, Applied]
    ) -> bool:
        """Return True if the object was applied from the same manifest.

        ``digest``: digest of the manifest. ``support``: digest of all manifests of the job's objects that are not
        watched. ``applied``: what was applied of these.
        """
        kind, name = kind_of(manifest), manifest["metadata"]["name"]
        plan_name = Names.of(job).plan
        if is_watched(manifest):
            found = self._cache.found(kind, job.namespace, name)
            if found is None or found.seen.applied != digest:
                return False
            if kind is kinds.CONFIG_MAP and name == plan_name:
                stands = self._cache.plans.stands(job, found.seen, manifest["data"])
                if found.seen.support != support or not stands:
                    return False
            return found.owner == job.uid or (kind is kinds.CLAIM and found.owner is None)
        last = applied.get(object_id(kind, name))
        return last is not None and last.digest == digest

    async def _apply(self, job: JobSeen, manifest: Manifest, digest: str, support: str | None) -> None:
        kind, meta = kind_of(manifest), manifest["metadata"]
        name = meta["name"]
        watched = is_watched(manifest)
        uid = await self._uid(job, kind, name, watched=watched)
        if uid is None and kind is kinds.CLAIM and self._cache.found(kind, job.namespace, name) is not None:
            return  # A claim that an earlier job of this name left, with its checkpoints.
        annotations = {**meta.get("annotations", {}), APPLIED_ANNOTATION: digest}
        is_plan = name == Names.of(job).plan and kind is kinds.CONFIG_MAP
        if is_plan:
            signature = self._cache.plans.signature(job, manifest["data"])
            annotations |= {SIGNATURE_ANNOTATION: signature} if signature else {}
            annotations |= {SUPPORT_ANNOTATION: support} if support is not None else {}
        body = {**manifest, "metadata": {**meta, **({"uid": uid} if uid else {}), "annotations": annotations}}
        try:
            # Without force, an object that somebody else has created in the meantime is a conflict.
            answer = await self._api.apply(kind, body, force=uid is not None)
            answer = await self._without_added(answer, manifest) if is_plan else answer
        except ApiError as error:
            if not watched:
                self._applied.put(job, kind, name, TO_APPLY)
            if error.rejected or (error.code == 500 and "typed" in error.message):
                raise RejectedError(kind.kind, name, error.message) from error
            raise
        if watched:
            self._cache.put(kind, answer)
        else:
            meta = answer["metadata"]
            found = Applied(digest, monotonic(), meta["uid"], meta.get("resourceVersion"))
            self._applied.put(job, kind, name, found)

    async def _without_added(self, answer: Body, plan: Manifest) -> Body:
        """Remove keys that somebody has added to the plan's ConfigMap, which server-side apply does not remove.

        ``answer``: the ConfigMap after the manifest ``plan`` was applied. Return the ConfigMap without the keys.
        """
        added = signed_part(answer.get("data") or {}).keys() - plan["data"].keys()
        if not added:
            return answer
        meta = answer["metadata"]
        patch = {"metadata": {"uid": meta["uid"]}, "data": dict.fromkeys(added)}
        return await self._api.merge(kinds.CONFIG_MAP, meta["namespace"], meta["name"], patch)

    async def _uid(self, job: JobSeen, kind: Kind, name: str, *, watched: bool) -> str | None:
        """Return the uid of the object with this name, which the job controls; None if no object has the name.

        Return None also for a volume claim without an owner, which an earlier job of this name may have left. Raise
        NameTakenError for any other object that the job does not control. ``watched``: True if a watch shows the
        object.
        """
        if watched:
            cached = self._cache.found(kind, job.namespace, name)
            if cached is not None and cached.owner == job.uid:
                return cached.uid
        elif (last := self._applied.get(job, kind, name)) is not None and last.uid:
            return last.uid
        try:
            body = await self._api.get(kind, job.namespace, name)
        except ApiError as error:
            if error.not_found:
                return None
            if error.forbidden:
                raise RejectedError(kind.kind, name, error.message) from error
            raise
        owner = controller_of(body)
        if owner is not None and owner.get("uid") == job.uid:
            return str(body["metadata"]["uid"])
        if kind is kinds.CLAIM and owner is None:
            self._cache.put(kind, {**body, "kind": kind.kind, "apiVersion": kind.api_version})
            return None
        raise name_taken(job, kind, body)


def has_plan(cache: Cache, job: JobSeen, wanted: Iterable[Manifest]) -> bool:
    """Return True if the API server has the plan among the ``wanted`` objects of a job, or if there is none.

    Pods on lost nodes may be deleted only if the API server has the plan. The plan has a new term (a number that
    increases with each such deletion), by which the other agents reject the agent of a deleted pod.
    """
    name = Names.of(job).plan
    plans = (item for item in wanted if item["kind"] == kinds.CONFIG_MAP.kind and item["metadata"]["name"] == name)
    if (plan := next(plans, None)) is None:
        return True
    found = cache.found(kinds.CONFIG_MAP, job.namespace, name)
    return found is not None and found.seen.plan == plan["data"]


def _ordered(due: list[tuple[Manifest, str]], plan_name: str) -> list[list[tuple[Manifest, str]]]:
    """Return manifests and digests in groups, in the order of applying. Objects of a group do not need each other.

    ``due``: (manifest, its digest). ``plan_name``: name of the ConfigMap with the plan.
    """
    groups: list[list[tuple[Manifest, str]]] = [[], [], [], []]
    for pair in due:
        item, kind = pair[0], kind_of(pair[0])
        if kind is kinds.STATEFUL_SET:
            groups[3].append(pair)
        elif kind is kinds.CONFIG_MAP and item["metadata"]["name"] == plan_name:
            groups[2].append(pair)
        else:
            groups[1 if kind in AFTER_OTHERS else 0].append(pair)
    return [group for group in groups if group]


def _text(manifest: Manifest) -> str:
    return json.dumps(manifest, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
