"""An API server over HTTP with objects in memory, for tests of the whole operator, of its watches and of kopf.

A test can end watches as expired, and stop the answers to the watches of one resource while the others go on.
"""

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from dljob.kube.kinds import DLJOB, POD, PROFILE, Kind
from support.servers import field_ownership
from support.servers.pod_logs import PodLogs

Json = dict[str, Any]
Key = tuple[str, str, str]
"""Resource, namespace and name."""
BOOKMARK_S = 0.1
_END = object()


@dataclass
class HttpApiServer:
    """Use as an asynchronous context manager. ``url``: its address."""

    objects: dict[Key, Json] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    """Resources whose watches are opened, and then send nothing; ``team-a/pods``: only those of the namespace."""
    forbidden: set[str] = field(default_factory=set)
    """Namespaces in which nothing may be read."""
    expired: list[str] = field(default_factory=list)
    """Resources of which the next page after the first one, or the next watch, is refused as too old (410)."""
    unanswered: set[str] = field(default_factory=set)
    """Resources whose watches are not answered at all."""
    causes: list[Json] = field(default_factory=list)
    """Causes with which every server-side apply of a DLJob is rejected; empty: it is accepted."""
    logs: PodLogs = field(default_factory=PodLogs)
    bookmarks: bool = True
    url: str = ""
    version: int = 100
    lists: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Number of complete lists by resource."""
    _watches: defaultdict[str, set[asyncio.Queue[Any]]] = field(default_factory=lambda: defaultdict(set))
    _changes: defaultdict[str, list[tuple[int, Json]]] = field(default_factory=lambda: defaultdict(list))
    """Events by resource, each after its resourceVersion. A watch begins with those after the version that it names."""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def put(self, kind: Kind, body: Json, *, heard: bool = True) -> None:
        """Create or change an object. ``heard``: False: no watch says so, as while watches are down."""
        self.version += 1
        meta = {"uid": f"uid-{self.version}", **body["metadata"], "resourceVersion": str(self.version)}
        found = {"apiVersion": kind.api_version, "kind": kind.kind, **body, "metadata": meta}
        self.objects[kind.plural, meta.get("namespace", ""), meta["name"]] = found
        if heard:
            self._tell(kind.plural, "MODIFIED", found)

    def delete(self, kind: Kind, namespace: str, name: str, *, heard: bool = True) -> None:
        """Delete an object. ``heard``: as of ``put``."""
        self.version += 1
        found = self.objects.pop((kind.plural, namespace, name))
        if heard:
            meta = found["metadata"] | {"resourceVersion": str(self.version)}
            self._tell(kind.plural, "DELETED", found | {"metadata": meta})

    def merge(self, kind: Kind, namespace: str, name: str, patch: Json, manager: str) -> None:
        """Merge a patch into an existing object. ``manager``: the field manager to whom the changed fields belong."""
        self._merge((kind.plural, namespace, name), patch, manager)

    def expire(self, kind: Kind) -> None:
        """End all watches of a kind with the code 410: the API server no longer has the changes since they began."""
        for queue in self._watches[kind.plural]:
            queue.put_nowait(_error_event(410, "Expired"))
        self.end_watches(kind)

    def end_watches(self, kind: Kind) -> None:
        """End all watches of a kind, as an API server does after some minutes. Changes from now on are not for them."""
        for queue in self._watches.pop(kind.plural, ()):
            queue.put_nowait(_END)

    def fail_watches(self, kind: Kind) -> None:
        """Send an error to all watches of a kind, as an API server does while etcd has no leader."""
        for queue in self._watches[kind.plural]:
            queue.put_nowait(_error_event(500, "InternalError"))

    def watched(self, kind: Kind, watches: int = 1) -> bool:
        """Return True if at least ``watches`` watches of the kind are open."""
        return len(self._watches[kind.plural]) >= watches

    def _tell(self, resource: str, what: str, body: Json) -> None:
        event = {"type": what, "object": body}
        self._changes[resource].append((self.version, event))
        for queue in self._watches[resource]:
            queue.put_nowait(event)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if (found := self._discovered(request.path)) is not None:
            return web.json_response(found)
        parts = request.path.strip("/").split("/")
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2:
            namespace, parts = parts[1], parts[2:]
        if namespace in self.forbidden:
            return _error(403)
        if parts[0] in self.expired and ("watch" in request.query or "continue" in request.query):
            self.expired.remove(parts[0])
            return _error(410)
        if "watch" in request.query:
            return await self._watch(request, parts[0], namespace)
        if parts[0] == POD.plural and parts[-1] == "log":
            return await self.logs.answer(request, parts[1])
        if request.method == "GET" and len(parts) == 1:
            items = [
                body for key, body in self.objects.items() if key[0] == parts[0] and namespace in ("", key[1])
            ]  # fmt: skip
            return self._page(request, parts[0], items)
        return await self._one(request, parts, namespace)

    def _page(self, request: web.Request, resource: str, items: list[Json]) -> web.Response:
        """Return one page of a list, as long as the request says, with the token for the next one."""
        begin = int(request.query.get("continue", 0))
        end = begin + int(request.query.get("limit", len(items)))
        meta = {"resourceVersion": str(self.version)}
        if end < len(items):
            meta["continue"] = str(end)
        else:
            self.lists[resource] += 1
        return web.json_response({"metadata": meta, "items": items[begin:end]})

    async def _one(self, request: web.Request, parts: list[str], namespace: str) -> web.Response:
        """Read, create or replace one object."""
        if request.method == "GET":
            found = self.objects.get((parts[0], namespace, parts[1]))
            return web.json_response(found) if found is not None else _error(404)
        body = await request.json()
        if request.method == "DELETE" or request.content_type == "application/merge-patch+json":
            manager = request.query.get("fieldManager", "")
            return self._changed(request.method, (parts[0], namespace, parts[1]), body, manager)
        key = (parts[0], namespace, body["metadata"]["name"])
        if parts[0] == DLJOB.plural and request.method == "PATCH":
            return self._applied(key, body, request.query["fieldManager"], dry_run="dryRun" in request.query)
        if request.method == "POST" and key in self.objects:
            return _error(409)
        self.version += 1
        meta = {"uid": f"uid-{self.version}", **body["metadata"], "resourceVersion": str(self.version)}
        self.objects[key] = {**body, "metadata": meta}
        return web.json_response(self.objects[key])

    def _changed(self, method: str, key: Key, patch: Json, manager: str) -> web.Response:
        """Delete an object, or merge a patch into it, if it exists and has the uid and version of the request."""
        found = self.objects.get(key)
        if found is None:
            return _error(404)
        named = patch.get("preconditions") or patch.get("metadata") or {}
        if any(named.get(field) not in (None, found["metadata"][field]) for field in ("uid", "resourceVersion")):
            return _error(409)
        if method == "DELETE":
            self.version += 1
            del self.objects[key]
            return web.json_response(self._stored(key[0], "DELETED", found))
        return web.json_response(self._merge(key, patch, manager))

    def _merge(self, key: Key, patch: Json, manager: str) -> Json:
        found = self.objects[key]
        changed = _merged(found, patch)
        if key[0] == DLJOB.plural:
            managed = field_ownership.updated(found, changed, manager)
            changed["metadata"] = {**changed["metadata"], "managedFields": managed}
        self.version += 1
        self.objects[key] = self._stored(key[0], "MODIFIED", changed)
        return self.objects[key]

    def _applied(self, key: Key, body: Json, manager: str, *, dry_run: bool) -> web.Response:
        """Create or change a DLJob, as a server-side apply does."""
        if self.causes:
            return web.json_response(
                {"kind": "Status", "code": 422, "reason": "Invalid", "message": "invalid",
                 "details": {"causes": self.causes}}, status=422)  # fmt: skip
        before = self.objects.get(key, {"metadata": {"uid": f"uid-{self.version + 1}"}})
        content, managed = field_ownership.applied(before, body, manager)
        spec = content["spec"]
        generation = before["metadata"].get("generation", 0) + (before.get("spec") != spec)
        metadata = {**before["metadata"], **body["metadata"], "generation": generation, "managedFields": managed}
        changed = {**before, **body, "spec": spec, "metadata": metadata}
        if not dry_run:
            self.version += 1
            changed = self._stored(key[0], "MODIFIED", changed)
            self.objects[key] = changed
        return web.json_response(changed)

    def _stored(self, resource: str, what: str, body: Json) -> Json:
        """Tell the watches about an object with the current resourceVersion, and return it."""
        found = body | {"metadata": body["metadata"] | {"resourceVersion": str(self.version)}}
        self._tell(resource, what, found)
        return found

    async def _watch(self, request: web.Request, resource: str, namespace: str) -> web.StreamResponse:
        if resource in self.unanswered:
            await asyncio.Event().wait()
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        since = int(request.query["resourceVersion"])
        for version, change in self._changes[resource]:
            if version > since:
                queue.put_nowait(change)
        self._watches[resource].add(queue)
        bookmark: Json = {"type": "BOOKMARK", "object": {"kind": "x", "metadata": {}}}
        try:
            while True:
                event = bookmark
                try:
                    event = await asyncio.wait_for(queue.get(), BOOKMARK_S)
                except TimeoutError:
                    if not self.bookmarks or not queue.empty():
                        continue
                    bookmark["object"] = {"kind": "x", "metadata": {"resourceVersion": str(self.version)}}
                if event is _END:
                    return response
                if namespace and event["object"]["metadata"].get("namespace", namespace) != namespace:
                    continue
                if not self.silent & {resource, f"{namespace}/{resource}"}:
                    await response.write(json.dumps(event).encode() + b"\n")
        except ConnectionResetError:  # The client has gone.
            return response
        finally:
            self._watches[resource].discard(queue)

    def _discovered(self, path: str) -> Json | None:
        """Return what the API server's discovery says; None for a path of objects."""
        group, _, version = DLJOB.api_version.partition("/")
        served = {"version": version, "groupVersion": DLJOB.api_version}
        known: dict[str, Json] = {
            "/version": {"major": "1", "minor": "33"},
            "/api": {"versions": ["v1"]},
            "/api/v1": {"resources": [_served("namespaces", "Namespace", namespaced=False)]},
            "/apis": {"groups": [{"name": group, "versions": [served], "preferredVersion": served}]},
            f"/apis/{DLJOB.api_version}": {
                "resources": [_served(each.plural, each.kind, namespaced=each.namespaced) for each in (DLJOB, PROFILE)]
            },
            "/apis/kueue.x-k8s.io": {"versions": []},
        }
        return known.get(path)


def _served(plural: str, kind: str, *, namespaced: bool) -> Json:
    """Return what discovery says about a kind."""
    verbs = ["list", "watch", "patch"]
    return {"name": plural, "singularName": kind.lower(), "kind": kind, "namespaced": namespaced, "verbs": verbs}


def _merged(body: Json, patch: Json) -> Json:
    """Return ``body`` after a JSON merge patch without deletions."""
    both = {key for key in patch if isinstance(body.get(key), dict) and isinstance(patch[key], dict)}
    return {**body, **patch, **{key: _merged(body[key], patch[key]) for key in both}}


def _error_event(code: int, reason: str) -> Json:
    return {"type": "ERROR", "object": {"kind": "Status", "metadata": {}, "code": code, "reason": reason}}


def _error(code: int) -> web.Response:
    reason = {403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired"}.get(code, "InternalError")
    return web.json_response({"kind": "Status", "code": code, "reason": reason, "message": "no"}, status=code)
