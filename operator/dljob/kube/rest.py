"""REST calls to the API server: objects, lists and watches. An operator writes only as the leader (``may_write``)."""

from collections.abc import AsyncIterator, Callable, Mapping
from time import monotonic
from typing import Any

import aiohttp

from dljob.kube.answers import MAX_ANSWER_NBYTES, TOO_LARGE, Allowance, ApiError, lines, without_answer
from dljob.kube.kinds import Kind
from dljob.kube.objects.trim import version_number
from dljob.kube.transport import CALL_LIMIT_S, Body, Requested, Transport

FIELD_OWNER = "dljob-operator"
METADATA_PAGE = 100
"""Number of objects on one page of ``Api.metadata`` and ``Api.uids``.

Their ``managedFields`` need 10 times as much memory as the text. The uids of 14,000 pods, which the operator compares
with its cache every 10 minutes, took 28 MB for a moment with pages of 500, and take 7 MB with pages of 100.
"""
FIND_PAGE = 500
"""Number of objects on one page of ``Api.find``, as of kubectl. The time limit is that of a page."""
MAX_LISTS = 4
"""How often ``Api.find`` begins a list, if the API server no longer has the version of the list that was begun."""


class Api:
    """Client of the API server. Methods take a Kind and names, and return the server's object."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: str,
        requested: Requested | None = None,
        may_write: Callable[[], bool] | None = None,
        max_nbytes: float = MAX_ANSWER_NBYTES,
    ) -> None:
        """``may_write``: called before each write. If it returns False, the write is not sent and raises ApiError.

        None: all writes are sent. ``requested``: called after each request, for metrics; None: nothing is called.
        ``max_nbytes``: maximum size of an answer, see ``MAX_ANSWER_NBYTES``.
        """
        transport = Transport(session, server, requested, may_write, max_nbytes)
        self._send, self._count, self._max_nbytes = transport.send, transport.count, max_nbytes
        self._fitting: dict[tuple[str, str], int] = {}
        """(path, header Accept) of a list whose pages were too large → number of objects on its last page."""
        self.session, self.server = session, transport.server

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Body:
        if not name:  # The API server would return the list of all objects.
            raise ApiError(404, "NotFound", f"{kind.plural} with an empty name not found")
        return await self._send("get", "GET", kind.plural, kind.path(namespace, name))

    async def metadata_of(self, kind: Kind, namespace: str | None, name: str) -> Body:
        """Return the metadata of an object. The API server sends nothing else of it."""
        accept = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
        path = kind.path(namespace, name)
        found = await self._send("get", "GET", kind.plural, path, accept=accept)
        metadata: Body = found["metadata"]
        return metadata

    async def find(self, kind: Kind, namespace: str | None, **params: str) -> list[Body]:
        """Return all objects of a kind, without their fields ``kind`` and ``apiVersion``. ``namespace`` None: all.

        ``params``: URL parameters of the list, such as ``labelSelector`` or ``fieldSelector``. If the API server no
        longer has the version of the list for its next page (code 410), begin again, ``MAX_LISTS`` times in all. Raise
        ApiError with the code ``TOO_LARGE`` if the pages together have more bytes than an answer may have.
        """
        begun = 1
        while True:
            items, token, allowance = list[Body](), "", Allowance(self._max_nbytes)
            try:
                while True:
                    query = {**params, "limit": str(FIND_PAGE)} | ({"continue": token} if token else {})
                    found = await self._send(
                        "list", "GET", kind.plural, kind.path(namespace), params=query, allowed=allowance
                    )
                    items += found.get("items") or []
                    token = (found.get("metadata") or {}).get("continue") or ""
                    if not token:
                        return items
            except ApiError as error:
                if error.code != 410 or not token or begun == MAX_LISTS:
                    raise
                begun += 1

    async def page(
        self, kind: Kind, namespace: str | None, selector: str, limit: int, token: str,
        fields: str = "", accept: str = "application/json",
    ) -> Body:  # fmt: skip
        """Return one page of a list of a kind, as the API server sends it, with at most ``limit`` objects.

        The page has fewer objects if the answer would be too large. ``token``: ``metadata.continue`` of the page
        before; empty: return the first page. Empty selectors of labels and ``fields`` match all objects.
        """
        given = {"labelSelector": selector, "fieldSelector": fields, "continue": token}
        params = {name: value for name, value in given.items() if value}
        path = kind.path(namespace)
        most = min(limit, 2 * self._fitting.pop((path, accept), limit))
        while True:
            try:
                params["limit"] = str(most)
                page = await self._send("list", "GET", kind.plural, path, params=params, accept=accept)
            except ApiError as error:
                if error.code != TOO_LARGE or most == 1:
                    raise
                most = max(1, most // 4)
            else:
                if most < limit:
                    self._fitting[path, accept] = most
                return page

    async def watch(
        self,
        kind: Kind,
        namespace: str | None,
        selector: str,
        version: str,
        seconds: int,
        silence_s: float,
        name: str = "",
    ) -> AsyncIterator[bytes]:
        """Yield the events of a watch after the resourceVersion ``version`` as lines of JSON.

        ``selector``: label selector; empty: all objects. ``name``: watch only the object of this name; empty: all.
        The iteration ends when the API server ends the stream, which it does after ``seconds``. It also ends if the
        stream breaks, or if nothing arrives for ``silence_s`` seconds. Raise ApiError if the API server rejects the
        request or does not answer it.
        """
        params = {
            "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": str(seconds),
        } | ({"labelSelector": selector} if selector else {})  # fmt: skip
        params |= {"fieldSelector": f"metadata.name={name}"} if name else {}
        path, began = kind.path(namespace), monotonic()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_LIMIT_S, sock_read=silence_s)
        opened = False
        try:
            async with self.session.get(self.server + path, params=params, timeout=timeout) as response:
                self._count("watch", kind.plural, response.status, monotonic() - began)
                if response.status != 200:
                    raise ApiError(response.status, response.reason or "", (await response.text())[:500])
                opened = True
                async for line in lines(response.content):
                    yield line
        except (aiohttp.ClientError, TimeoutError) as error:
            if not opened:
                self._count("watch", kind.plural, 0, monotonic() - began)
                raise without_answer(error, f"GET {path}", CALL_LIMIT_S) from error

    async def uids(self, kind: Kind, namespace: str | None, selector: str) -> tuple[list[str], int | None]:
        """Return the uids of all objects that the label selector matches, and the resourceVersion of this list.

        The resourceVersion is None if it is not a number. An empty selector matches all objects.
        """
        found, listed = list[str](), None
        async for page, version in self._metadata_pages(kind, namespace, selector):
            listed = version
            found += [meta["uid"] for meta in page]
        return found, listed

    async def metadata(self, kind: Kind, namespace: str | None, selector: str) -> tuple[list[Body], int | None]:
        """Return name, namespace, uid and resourceVersion of all matching objects, and the resourceVersion of the list.

        The resourceVersion of the list is None if it is not a number. An empty label selector matches all objects.
        """
        found, listed = list[Body](), None
        fields = ("name", "namespace", "uid", "resourceVersion")
        async for page, version in self._metadata_pages(kind, namespace, selector):
            listed = version
            found += [{field: meta.get(field, "") for field in fields} for meta in page]
        return found, listed

    async def _metadata_pages(
        self, kind: Kind, namespace: str | None, selector: str
    ) -> AsyncIterator[tuple[list[Body], int | None]]:
        """Yield the metadata of the objects on each page of a list, and the resourceVersion of the list."""
        accept, token = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", ""
        while True:
            found = await self.page(kind, namespace, selector, METADATA_PAGE, token, accept=accept)
            meta = found.get("metadata", {})
            yield [item["metadata"] for item in found.get("items") or ()], version_number(meta.get("resourceVersion"))
            if not (token := meta.get("continue") or ""):
                return

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Body:
        path = kind.path(body["metadata"].get("namespace"))
        return await self._send("create", "POST", kind.plural, path, body=body, params={"fieldManager": FIELD_OWNER})

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> Body:
        """Replace an object.

        Raise ApiError with ``conflict`` if the object on the server has another resourceVersion than ``body``.
        """
        path = kind.path(body["metadata"].get("namespace"), body["metadata"]["name"])
        return await self._send("update", "PUT", kind.plural, path, body=body, params={"fieldManager": FIELD_OWNER})

    async def apply(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        subresource: str = "",
        *,
        owner: str = FIELD_OWNER,
        force: bool = True,
        strict: bool = False,
        dry_run: bool = False,
    ) -> Body:
        """Apply an object with server-side apply.

        ``owner``: name of the field manager. ``force``: True: take over fields that other field managers own; False:
        such fields are a conflict (ApiError). ``strict``: unknown fields are an error, if the server supports that.
        ``dry_run``: change nothing, and return the object that would result. If ``body`` has a ``metadata.uid``, the
        call changes only the object with this uid. If that does not exist, or another object has its name, the result
        is a conflict.
        """
        path = kind.path(body["metadata"].get("namespace"), body["metadata"]["name"], subresource)
        params = {"fieldManager": owner, "force": str(force).lower()}
        params |= {"fieldValidation": "Strict"} if strict else {}
        params |= {"dryRun": "All"} if dry_run else {}
        return await self._send(
            "apply", "PATCH", kind.plural, path, body=body, params=params, content="application/apply-patch+yaml"
        )

    async def merge(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        patch: Mapping[str, Any],
        subresource: str = "",
        *,
        owner: str = FIELD_OWNER,
    ) -> Body:
        path = kind.path(namespace, name, subresource)
        params = {"fieldManager": owner}
        return await self._send(
            "patch", "PATCH", kind.plural, path, body=patch, params=params, content="application/merge-patch+json"
        )

    async def delete(
        self, kind: Kind, namespace: str | None, name: str, *, uid: str | None = None, grace_s: int | None = None
    ) -> Body | None:
        """Delete an object. Do nothing if it does not exist or has another uid than ``uid``.

        Return the object if it remains for now, such as a pod that is terminating or has a finalizer; None otherwise.
        ``grace_s``: grace period in seconds; None: that of the object.
        """
        options: Body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            answer = await self._send("delete", "DELETE", kind.plural, kind.path(namespace, name), body=options)
        except ApiError as error:
            if not (error.not_found or error.conflict):
                raise
            return None
        return answer if answer.get("kind") == kind.kind else None

    async def version(self) -> tuple[int, int]:
        """Return the major and minor version of Kubernetes on the server, such as (1, 30)."""
        found = await self._send("get", "GET", "version", "/version")
        return int(found["major"]), int(found["minor"].rstrip("+"))

    async def serves(self, kind: Kind) -> bool:
        """Return True if the server serves this kind, according to its discovery."""
        found = await self._discovered(kind.api_version)
        return any(item.get("name") == kind.plural for item in found.get("resources") or ())

    async def versions_of(self, group: str) -> tuple[str, ...]:
        """Return the versions of an API group that the server serves, or an empty tuple if it does not serve any."""
        found = await self._discovered(group)
        return tuple(str(item["version"]) for item in found.get("versions") or ())

    async def _discovered(self, path: str) -> Body:
        """Return what discovery says about an API group or one version of it; empty if the server does not serve it."""
        try:
            return await self._send("get", "GET", "apis", f"/apis/{path}")
        except ApiError as error:
            if not error.not_found:
                raise
            return {}
