"""REST calls to the API server with time limits and retries. An operator writes only as the leader (``may_write``)."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from math import inf
from time import monotonic
from typing import Any

import aiohttp

from dljob.kube.answers import (
    MAX_ANSWER_NBYTES,
    TOO_LARGE,
    Allowance,
    ApiError,
    bounded_text,
    causes,
    decoded,
    lines,
    without_answer,
)
from dljob.kube.kinds import DLJOB, Kind
from dljob.kube.objects.trim import version_number

FIELD_OWNER = "dljob-operator"
CALL_LIMIT_S = 15.0
ATTEMPTS = 4
RETRY_FIRST_S = 0.25
MAX_RETRY_AFTER_S = 32.0
"""Maximum number of seconds to wait before a retry, even if the answer asks for more in its header Retry-After.

The API server asks for at most 32 s (``flowcontrol/dropped_requests_tracker.go``). A proxy may ask for hours, in which
a worker of the operator would do nothing else.
"""
METADATA_PAGE = 100
"""Number of objects on one page of ``Api.metadata`` and ``Api.uids``.

Their ``managedFields`` need 10 times as much memory as the text. The uids of 14,000 pods, which the operator compares
with its cache every 10 minutes, took 28 MB for a moment with pages of 500, and take 7 MB with pages of 100.
"""
FIND_PAGE = 500
"""Number of objects on one page of ``Api.find``, as of kubectl. The time limit is that of a page."""
MAX_LISTS = 4
"""How often ``Api.find`` begins a list, if the API server no longer has the version of the list that was begun."""
_RETRIED = {429, 500, 502, 503, 504}

Body = dict[str, Any]
Requested = Callable[[str, str, int, float], None]
"""Callback after each request. Arguments: verb, resource, HTTP status code (0: no answer), duration in seconds."""


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
        self._max_nbytes = max_nbytes
        self._fitting: dict[tuple[str, str], int] = {}
        """(path, header Accept) of a list whose pages were too large → number of objects on its last page."""
        self.session = session
        self.server = server.rstrip("/")
        self._may_write = may_write or (lambda: True)
        self._requested = requested or (lambda verb, resource, code, seconds: None)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Body:
        if not name:  # The API server would return the list of all objects.
            raise ApiError(404, "NotFound", f"{kind.plural} with an empty name not found")
        return await self._call("get", "GET", kind, kind.path(namespace, name))

    async def metadata_of(self, kind: Kind, namespace: str | None, name: str) -> Body:
        """Return the metadata of an object. The API server sends nothing else of it."""
        accept = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
        path = kind.path(namespace, name)
        found = await self._attempted("get", "GET", kind.plural, path, None, {}, "application/json", accept)
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
                    found = await self._call("list", "GET", kind, kind.path(namespace), params=query, allowed=allowance)
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
                page = await self._attempted("list", "GET", kind.plural, path, None, params, "application/json", accept)
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
                self._requested("watch", kind.plural, response.status, monotonic() - began)
                if response.status != 200:
                    raise ApiError(response.status, response.reason or "", (await response.text())[:500])
                opened = True
                async for line in lines(response.content):
                    yield line
        except (aiohttp.ClientError, TimeoutError) as error:
            if not opened:
                self._requested("watch", kind.plural, 0, monotonic() - began)
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
        return await self._call("create", "POST", kind, path, body=body, params={"fieldManager": FIELD_OWNER})

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> Body:
        """Replace an object.

        Raise ApiError with ``conflict`` if the object on the server has another resourceVersion than ``body``.
        """
        path = kind.path(body["metadata"].get("namespace"), body["metadata"]["name"])
        return await self._call("update", "PUT", kind, path, body=body, params={"fieldManager": FIELD_OWNER})

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
        return await self._call(
            "apply", "PATCH", kind, path, body=body, params=params, content="application/apply-patch+yaml"
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
        return await self._call(
            "patch", "PATCH", kind, path, body=patch, params=params, content="application/merge-patch+json"
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
            answer = await self._call("delete", "DELETE", kind, kind.path(namespace, name), body=options)
        except ApiError as error:
            if not (error.not_found or error.conflict):
                raise
            return None
        return answer if answer.get("kind") == kind.kind else None

    async def version(self) -> tuple[int, int]:
        """Return the major and minor version of Kubernetes on the server, such as (1, 30)."""
        found = await self._attempted("get", "GET", "version", "/version", None, {}, "application/json")
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
            return await self._attempted("get", "GET", "apis", f"/apis/{path}", None, {}, "application/json")
        except ApiError as error:
            if not error.not_found:
                raise
            return {}

    async def _call(
        self,
        verb: str,
        method: str,
        kind: Kind,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        content: str = "application/json",
        allowed: Allowance | None = None,
    ) -> Body:
        return await self._attempted(verb, method, kind.plural, path, body, params or {}, content, allowed=allowed)

    async def _attempted(
        self,
        verb: str,
        method: str,
        resource: str,
        path: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, str],
        content: str,
        accept: str = "application/json",
        allowed: Allowance | None = None,
    ) -> Body:
        """Send a request, repeat it after temporary errors, and return the decoded answer.

        ``method``: HTTP method. ``verb`` and ``resource``: those of the request in the metrics. ``content`` and
        ``accept``: HTTP headers Content-Type and Accept. ``allowed``: the number of bytes that the answer may have,
        which is reduced by its size; None: that of one answer.

        Raise ApiError if the last of ``ATTEMPTS`` attempts fails. Raise it without further attempts if the error is not
        temporary, such as a conflict (code 409), or if ``may_write`` forbids the write.
        """
        attempt = 1
        while True:
            if method != "GET" and not self._may_write():
                raise ApiError(0, "NotLeader", f"{method} {path}: not sent, because this operator is not the leader")
            began = monotonic()
            wait_s = RETRY_FIRST_S * 2 ** (attempt - 1)
            try:
                code, answer, retry_after_s = await self._once(method, path, body, params, content, accept, allowed)
            except (aiohttp.ClientError, TimeoutError) as error:
                self._requested(verb, resource, 0, monotonic() - began)
                failure = without_answer(error, f"{method} {path}", CALL_LIMIT_S)
            else:
                self._requested(verb, resource, code, monotonic() - began)
                if code < 300:
                    return answer
                failure = ApiError(
                    code, answer.get("reason") or "", answer.get("message") or f"{method} {path}", causes(answer)
                )
                if code not in _RETRIED:
                    raise failure
                wait_s = max(wait_s, min(retry_after_s, MAX_RETRY_AFTER_S))
            if attempt == ATTEMPTS:
                raise failure
            attempt += 1
            await asyncio.sleep(wait_s)

    async def _once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, str],
        content: str,
        accept: str,
        allowed: Allowance | None,
    ) -> tuple[int, Body, float]:
        async with self.session.request(
            method,
            self.server + path,
            params=params,
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": content, "Accept": accept},
            timeout=aiohttp.ClientTimeout(total=CALL_LIMIT_S),
        ) as response:
            allowed = allowed or Allowance(inf if params.get("limit") == "1" else self._max_nbytes)
            text = await bounded_text(response, allowed.nbytes)
            if text is None:
                message = f"{method} {path}: found an answer of more than {self._max_nbytes:.0f} bytes; expected less"
                return TOO_LARGE, {"reason": "AnswerTooLarge", "message": message}, 0.0
            allowed.nbytes -= len(text)
            retry_after = response.headers.get("Retry-After", "")
            code, answer = decoded(response.status, text, f"{method} {path}", about_jobs=DLJOB.plural in path)
            return code, answer, float(retry_after) if retry_after.isdigit() else 0.0
