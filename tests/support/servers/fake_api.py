"""An API server in memory for tests of the controller, with the StatefulSet controller and the scheduler as methods.

Watch events arrive only when a test calls ``FakeCluster.watch``, so that a test decides how far a watch lags behind.
"""

import asyncio
import pickle
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

from dljob.kube import Cache
from dljob.kube.answers import ApiError
from dljob.kube.kinds import (
    APPLIED,
    CLAIM,
    CONFIG_MAP,
    DLJOB,
    LIMIT_RANGE,
    NODE,
    POD,
    PRIORITY_CLASS,
    PROVISIONING_REQUEST,
    QUOTA,
    SECRET,
    STATEFUL_SET,
    STORAGE_CLASS,
    VOLUME,
    Kind,
)  # fmt: skip
from dljob.kube.rest import FIELD_OWNER
from support.builders import NOW
from support.servers import field_ownership

Json = dict[str, Any]
Copied = TypeVar("Copied")
WATCHED = (
    DLJOB, STATEFUL_SET, POD, CONFIG_MAP, CLAIM, NODE, PRIORITY_CLASS, QUOTA, LIMIT_RANGE, PROVISIONING_REQUEST,
    STORAGE_CLASS, VOLUME,
)  # fmt: skip


def copied(body: Copied) -> Copied:
    """Return a copy of JSON. pickle takes a ninth of the time of deepcopy."""
    made: Copied = pickle.loads(pickle.dumps(body, pickle.HIGHEST_PROTOCOL))
    return made


def merged(old: Any, new: Any) -> Any:
    if not isinstance(new, Mapping):
        return new
    result = dict(old) if isinstance(old, Mapping) else {}
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def _field(body: Json, path: str, default: str) -> Any:
    """Return the field that a field selector names, such as involvedObject.uid."""
    parent, _, name = path.rpartition(".")
    return (body[parent] if parent else body).get(name, default)


class FakeApi:
    """The methods of ``dljob.kube.Api`` that the controller uses, on objects in memory."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.events: list[tuple[str, Kind, Json]] = []
        """Changes that no cache has seen yet: ADDED or DELETED, kind and object."""
        self.refused: set[str] = set()
        """Kinds whose objects the server refuses to create, for example because of a quota."""
        self.unlisted: dict[str, ApiError | None] = {}
        """Errors of lists, by kind. None: the server does not answer."""
        self.uncreated: dict[str, ApiError | None] = {}
        """Errors of requests to create an object, by kind. None: the server does not answer."""
        self.unreadable: set[str] = set()
        """Kinds whose single objects the operator may not read."""
        self.unavailable: set[str] = set()
        """Kinds whose single objects the server cannot read at the moment."""
        self.status_errors: list[ApiError] = []
        """Errors of the next writes of a job's status, in this order."""
        self.looked_at: list[str] = []
        """Names of the objects whose metadata were read."""
        self.pages: list[tuple[str, str | None]] = []
        """(plural of the kind, namespace) of each page of a list that was read."""
        self.created = "2026-01-01T00:00:00Z"
        """Creation time of new objects that state none."""
        self._version = 0

    def _store(self, kind: Kind, body: Json) -> Json:
        meta = body["metadata"]
        key = (kind.plural, meta.get("namespace") or "", meta["name"])
        old = self.objects.get(key)
        self._version += 1
        defaults = {
            "uid": old["metadata"]["uid"] if old else str(uuid.uuid4()),
            "creationTimestamp": old["metadata"]["creationTimestamp"] if old else self.created,
        }
        body = {**body, "kind": kind.kind, "metadata": {**defaults, **meta, "resourceVersion": str(self._version)}}
        self.objects[key] = body
        self.events.append(("ADDED", kind, copied(body)))
        return copied(body)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        if kind.kind in self.unreadable:
            raise ApiError(403, "Forbidden", f"cannot get {kind.plural}")
        if kind.kind in self.unavailable:
            raise ApiError(500, "InternalError", f"cannot read {kind.plural}")
        found = self.objects.get((kind.plural, namespace or "", name))
        if found is None:
            raise ApiError(404, "NotFound", name)
        return copied(found)

    async def metadata_of(self, kind: Kind, namespace: str | None, name: str) -> Json:
        self.looked_at.append(name)
        metadata: Json = (await self.get(kind, namespace, name))["metadata"]
        return metadata

    async def metadata(self, kind: Kind, namespace: str | None, selector: str) -> tuple[list[Json], int | None]:
        self.pages.append((kind.plural, namespace))
        found = [body["metadata"] for body in await self.find(kind, namespace)]
        label, _, value = selector.partition("=")
        return [meta for meta in found if not selector or meta.get("labels", {}).get(label) == value], self._version

    async def find(self, kind: Kind, namespace: str | None, **params: str) -> list[Json]:
        if kind.kind in self.unlisted:
            if (error := self.unlisted[kind.kind]) is None:
                await asyncio.sleep(1e6)
            raise error or ApiError(0, "TimeoutError", "")
        found = [
            body
            for (plural, where, _), body in self.objects.items()
            if plural == kind.plural and namespace in (None, where)
        ]
        if "fieldSelector" in params:
            wanted = dict(part.split("=") for part in params["fieldSelector"].split(","))
            found = [
                body for body in found if all(_field(body, path, value) == value for path, value in wanted.items())
            ]
        return copied(found)

    def of_job(self, kind: Kind, key: tuple[str, str]) -> list[Json]:
        """Return the objects of a kind whose names begin with a job's. They are no copies: do not change them."""
        return [
            body
            for (plural, namespace, name), body in self.objects.items()
            if plural == kind.plural and namespace == key[0] and name.startswith(f"{key[1]}-")
        ]

    async def page(
        self, kind: Kind, namespace: str | None, selector: str, limit: int, token: str, fields: str = ""
    ) -> Json:
        assert not selector, selector
        self.pages.append((kind.plural, namespace))
        found = await self.find(kind, namespace, **({"fieldSelector": fields} if fields else {}))
        begin = int(token or 0)
        more = str(begin + limit) if begin + limit < len(found) else ""
        return {"metadata": {"continue": more}, "items": found[begin : begin + limit]}

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Json:
        if kind.kind in self.refused:  # Admission comes before the storage: also an object that exists is refused.
            raise ApiError(403, "Forbidden", f"exceeded quota: {kind.plural}")
        if kind.kind in self.uncreated:
            if (error := self.uncreated[kind.kind]) is None:
                await asyncio.sleep(1e6)
            raise error or ApiError(0, "TimeoutError", "")
        meta = body["metadata"]
        if (kind.plural, meta.get("namespace") or "", meta["name"]) in self.objects:
            raise ApiError(409, "AlreadyExists", meta["name"])
        return self._store(kind, dict(body))

    async def apply(self, kind: Kind, body: Mapping[str, Any], subresource: str = "", **_: Any) -> Json:
        if kind.kind in self.refused:
            raise ApiError(403, "Forbidden", f"exceeded quota: {kind.plural}")
        meta = body["metadata"]
        old = self.objects.get((kind.plural, meta.get("namespace") or "", meta["name"]))
        if kind is PROVISIONING_REQUEST and old is not None and old["spec"] != body["spec"]:
            raise ApiError(422, "Invalid", "spec: Value is immutable")
        _, managed = field_ownership.applied(old or {"metadata": {}}, dict(body), FIELD_OWNER)
        return self._store(kind, merged(merged(old or {}, body), {"metadata": {"managedFields": managed}}))

    async def merge(
        self, kind: Kind, namespace: str | None, name: str, patch: Mapping[str, Any], subresource: str = ""
    ) -> Json:
        if kind is DLJOB and subresource == "status" and self.status_errors:
            raise self.status_errors.pop(0)
        old = await self.get(kind, namespace, name)
        new = merged(old, patch)
        if not subresource:
            new["metadata"] = {**new["metadata"], "managedFields": field_ownership.updated(old, new, "somebody")}
        return self._store(kind, new)

    async def delete(self, kind: Kind, namespace: str | None, name: str, **_: Any) -> None:
        found = self.objects.pop((kind.plural, namespace or "", name), None)
        if found is not None:
            self.events.append(("DELETED", kind, found))


class FakeCluster:
    """What users, kubelets, the StatefulSet controller and the scheduler do on a ``FakeApi``."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.now = NOW
        """Time at which new pods are created."""

    def node(self, name: str, device: str, gpus: int, **labels: str) -> None:
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        allocatable = {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": str(gpus)}
        meta = {"name": name, "labels": {"nvidia.com/gpu.product": device, **labels}}
        self.api._store(NODE, {"metadata": meta, "status": {"conditions": [ready], "allocatable": allocatable}})

    def claim(
        self, name: str, mode: str, namespace: str = "team-a", *, node_label: tuple[str, str] | None = None
    ) -> None:
        """Create or change a bound claim. ``node_label``: label of the nodes on which its volume can be mounted."""
        meta, spec = {"name": name, "namespace": namespace}, {"accessModes": [mode], "volumeName": f"pv-{name}"}
        if node_label is not None:
            term = {"matchExpressions": [{"key": node_label[0], "operator": "In", "values": [node_label[1]]}]}
            affinity = {"required": {"nodeSelectorTerms": [term]}}
            body = {"nodeAffinity": affinity, "claimRef": {"namespace": namespace, "name": name}}
            self.api._store(VOLUME, {"metadata": {"name": f"pv-{name}"}, "spec": body})
        self.api._store(CLAIM, {"metadata": meta, "spec": spec, "status": {"phase": "Bound"}})

    def quota(self, namespace: str, used: Json | None = None, **hard: str) -> None:
        """Create or change the quota of a namespace, with a status as the quota controller writes it."""
        status = {"hard": hard, "used": used or {}}
        self.api._store(
            QUOTA, {"metadata": {"name": "full", "namespace": namespace}, "spec": {"hard": hard}, "status": status}
        )

    def limit_range(self, namespace: str, **container: Json) -> None:
        """Create or change the LimitRange of a namespace for containers."""
        limits = [{"type": "Container", **container}]
        self.api._store(
            LIMIT_RANGE, {"metadata": {"name": "sizes", "namespace": namespace}, "spec": {"limits": limits}}
        )

    def secret(self, name: str, namespace: str = "team-a", **labels: str) -> None:
        self.api._store(SECRET, {"metadata": {"name": name, "namespace": namespace, "labels": labels}})

    async def delete_plan_key(self) -> None:
        await self.api.delete(SECRET, "dljob-system", "plan-key")

    def priority_class(self, name: str, value: int, *, default: bool = False) -> None:
        self.api._store(PRIORITY_CLASS, {"metadata": {"name": name}, "value": value, "globalDefault": default})

    def submit(
        self, name: str, namespace: str = "team-a", *, second: int = 0, annotations: Json | None = None, **spec: Any
    ) -> tuple[str, str]:
        """Create a job. ``second``: of its creation time, which decides between equal jobs."""
        created = f"2026-01-01T00:00:{second:02}Z"
        meta = {"name": name, "namespace": namespace, "generation": 1, "creationTimestamp": created}
        meta |= {"annotations": annotations} if annotations else {}
        self.api._store(DLJOB, {"metadata": meta, "spec": spec})
        return namespace, name

    async def edit(self, key: tuple[str, str], **spec: Any) -> None:
        old = await self.api.get(DLJOB, *key)
        generation = old["metadata"]["generation"] + 1
        await self.api.merge(DLJOB, *key, {"metadata": {"generation": generation}, "spec": spec})

    async def create_pods(self, key: tuple[str, str]) -> list[Json]:
        """Create the pods that the job's StatefulSets lack, and return them."""
        made = []
        for item in self.api.of_job(STATEFUL_SET, key):
            meta, spec = item["metadata"], item["spec"]
            for i in range(spec["replicas"]):
                if ("pods", key[0], f"{meta['name']}-{i}") in self.api.objects:
                    continue
                owner = {"kind": "StatefulSet", "name": meta["name"], "uid": meta["uid"], "controller": True}
                pod = {
                    "metadata": {
                        "name": f"{meta['name']}-{i}", "namespace": key[0], "ownerReferences": [owner],
                        "labels": dict(spec["template"]["metadata"]["labels"]),
                        "creationTimestamp": self.now.isoformat(),
                    },
                    "spec": copied(spec["template"]["spec"]), "status": {"phase": "Pending"},
                }  # fmt: skip
                made.append(await self.api.create(POD, pod))
        return made

    async def bind(self, pods: list[Json], *nodes: str) -> None:
        for pod, node in zip(pods, nodes, strict=True):
            meta = pod["metadata"]
            await self.api.merge(POD, meta["namespace"], meta["name"], {"spec": {"nodeName": node}})

    def warn(self, body: Json, reason: str, message: str) -> None:
        """Post a warning event about an object, as a controller of Kubernetes does."""
        meta = body["metadata"]
        event = {
            "metadata": {"name": f"{meta['name']}.{reason}", "namespace": meta["namespace"]}, "type": "Warning",
            "reason": reason, "message": message, "lastTimestamp": self.now.isoformat(),
            "involvedObject": {"name": meta["name"], "uid": meta["uid"], "kind": body["kind"]},
        }  # fmt: skip
        self.api.objects["events", meta["namespace"], f"{meta['name']}.{reason}"] = event

    async def reject(self, pod: Json, node: str, reason: str, message: str) -> None:
        """Let the kubelet of a node reject a pod that a scheduler has placed there, as ``rejectPod`` of the kubelet does."""
        meta = pod["metadata"]
        status = {"phase": "Failed", "reason": reason, "message": f"Pod was rejected: {message}"}
        await self.api.merge(POD, meta["namespace"], meta["name"], {"spec": {"nodeName": node}, "status": status})

    async def replace_failed(self, key: tuple[str, str]) -> list[Json]:
        """Delete the failed pods of a job and create them anew, as the StatefulSet controller does."""
        for pod in await self.api.find(POD, key[0]):
            name = pod["metadata"]["name"]
            if name.startswith(f"{key[1]}-") and pod["status"]["phase"] == "Failed":
                await self.api.delete(POD, key[0], name)
        return await self.create_pods(key)

    def watch(self, cache: Cache) -> list[tuple[str, str]]:
        """Bring the changes since the last call into the cache. Return the keys of the jobs that they affect."""
        events, self.api.events = self.api.events, []
        return [key for event in events if event[1] in WATCHED for key in _seen(cache, *event)]

    def listed(self, cache: Cache) -> None:
        """Fill the cache of another operator with all objects."""
        by_plural = {kind.plural: kind for kind in (*WATCHED, *APPLIED.values())}
        for (plural, _, _), body in self.api.objects.items():
            if plural in by_plural and by_plural[plural] in WATCHED:
                cache.put(by_plural[plural], copied(body))


def _seen(cache: Cache, what: str, kind: Kind, body: Json) -> list[tuple[str, str]]:
    meta = body["metadata"]
    if what == "DELETED":
        cache.drop(kind, meta.get("namespace") or "", meta["name"], meta["uid"])
    else:
        cache.put(kind, body)
    name = meta["name"] if kind is DLJOB else (meta.get("labels") or {}).get("dljob.dev/job")
    return [(meta["namespace"], name)] if name and kind is not NODE else []
