"""A class of aiohttp responses that applies the limits of ``kube.objects.bounds`` before kopf decodes an object.

kopf ends the whole operator after an answer 403 or 410, after errors of the server for a minute, and after most ERROR
events. One namespace that is deleted while others are watched, or a change of the leader of etcd, would be enough. The
responses end the request instead as a broken connection does, after which kopf lists the objects again.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from dljob.kube.answers import ApiError, lines
from dljob.kube.kinds import DLJOB
from dljob.kube.objects.bounds import bounded_event, bounded_list, loads
from dljob.kube.objects.trim import version_number
from dljob.kube.watch.permission import Permission
from dljob.kube.watch.reflector import back_off_s

log = logging.getLogger("dljob.kube.watch")

LEFT_TO_KOPF = (401, 429)
"""HTTP status codes that kopf handles itself: it logs in again, or waits as long as the API server asks."""
Listed = Callable[[str | None, Iterable[str], int | None], None]
"""Callback for each complete list: its namespace (None: all), the uids in it, and its resourceVersion."""
Received = Callable[[Mapping[str, Any]], None]
"""Callback for each object in an event of a watch, or in a list."""
Signed = Callable[[str | None], None]
"""Callback for a sign that the watch of a namespace (None: of all) works."""
Refused = Callable[[str | None], None]
"""Callback for each request that the API server forbids: the namespace (None: all)."""


def bounded_responses(
    asked: Signed,
    active: Signed,
    listed: Listed,
    received: Received,
    refused: Refused,
    silence_s: float,
) -> type[aiohttp.ClientResponse]:
    """Return a class of responses for an aiohttp session with which kopf lists and watches DLJobs.

    ``asked`` is called for each such request that was sent, to show that kopf's task for the watch runs. ``active`` is
    called for each event, bookmark and page of a list, to show that the watch works. It is not called when a watch
    begins, because a broken watch may begin, and then send nothing. ``listed`` is called after the last page of each
    list, with the list's namespace, uids and resourceVersion. ``received`` is called for each object that kopf
    receives. ``refused`` is called for each request that the API server forbids. A watch that sends nothing for
    ``silence_s`` seconds raises TimeoutError, and kopf opens it again. After any other failure, the response waits and
    raises ClientPayloadError, after which kopf goes on, too.
    """
    uids: dict[str | None, list[str]] = {}
    failures: dict[str | None, int] = defaultdict(int)
    """Number of failures in a row by namespace."""
    expiries: dict[str | None, int] = defaultdict(int)
    """Number of watches in a row by namespace that ended with the code 410 before their first event."""
    permissions: dict[str | None, Permission] = {}

    async def expire(namespace: str | None) -> None:
        """Wait before kopf lists the objects again after the code 410, except after the first in a row."""
        expiries[namespace] += 1
        if (repeated := expiries[namespace] - 1) > 0:
            delay_s = back_off_s(repeated)
            where = f" in {namespace}" if namespace else ""
            log.warning("the watch of dljobs%s expires at its beginning; retrying in %.1f s", where, delay_s)
            await asyncio.sleep(delay_s)

    async def fail(namespace: str | None, verb: str, error: ApiError) -> None:
        """Log a failure of kopf's list or watch, wait, and raise ClientPayloadError."""
        failures[namespace] += 1
        delay_s = back_off_s(failures[namespace])
        where = f" in {namespace}" if namespace else ""
        if error.forbidden:
            permissions.setdefault(namespace, Permission(DLJOB, namespace)).refused(verb, error)
            refused(namespace)
        else:
            log.warning("the %s of dljobs%s failed (%s); retrying in %.1f s", verb, where, error, delay_s)
        await asyncio.sleep(delay_s)
        raise aiohttp.ClientPayloadError(str(error))

    def works(namespace: str | None, verb: str) -> None:
        failures.pop(namespace, None)
        if permission := permissions.get(namespace):
            permission.granted(verb)

    class BoundedResponse(aiohttp.ClientResponse):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if self._about_jobs:
                asked(self._namespace)

        @property
        def _about_jobs(self) -> bool:
            """False for a request of kopf's for something else, such as the kinds that the API server has."""
            return DLJOB.plural in self.url.path.split("/")

        @property
        def _namespace(self) -> str | None:
            parts = self.url.path.split("/")
            return parts[parts.index("namespaces") + 1] if "namespaces" in parts else None

        async def start(self, connection: Any) -> "BoundedResponse":
            watches = "watch" in self.url.query
            async with asyncio.timeout(silence_s if watches else None):
                await super().start(connection)
            if not self._about_jobs:
                return self
            namespace, verb = self._namespace, "watch" if watches else "list"
            if watches and self.status == 410:
                await expire(namespace)
                self.status, self.content = 200, _Expired()  # type: ignore[assignment]
                return self
            if self.status >= 400 and self.status not in LEFT_TO_KOPF:
                await fail(namespace, verb, ApiError(self.status, self.reason or "", f"GET {self.url.path}"))
            if self.status == 200:
                works(namespace, verb)
                if watches:
                    self.content = self._bounded_lines(namespace)  # type: ignore[assignment]
            return self

        def _bounded_lines(self, namespace: str | None) -> "_BoundedLines":
            def heard(*, error: bool) -> None:
                active(namespace)
                if not error:
                    expiries.pop(namespace, None)

            async def failed(error: ApiError) -> None:
                if error.code == 410:  # kopf lists the objects again.
                    await expire(namespace)
                else:
                    await fail(namespace, "watch", error)

            return _BoundedLines(self.content, heard, received, failed, silence_s)

        async def json(self, **_: Any) -> Any:
            text = await self.read()
            if self._about_jobs:
                active(self._namespace)
            if self.status != 200:
                return bounded_list(text) if text else {}
            # Decoding a large list takes long, and the heartbeat of the Lease must not wait for it.
            found = await asyncio.to_thread(bounded_list, text)
            if "items" in found:
                self._note(found)
            return found

        def _note(self, page: dict[str, Any]) -> None:
            """Collect the uids of the objects on a page of a list. If it is the last page, pass them to ``listed``."""
            namespace = self._namespace
            if "continue" not in self.url.query:
                uids[namespace] = []
            present = uids.setdefault(namespace, [])
            for item in page["items"]:
                received(item)
            present += [item["metadata"]["uid"] for item in page["items"]]
            meta = page.get("metadata") or {}
            if not meta.get("continue"):
                listed(namespace, uids.pop(namespace), version_number(meta.get("resourceVersion")))

    return BoundedResponse


class _Expired:
    """The response body of a watch that the API server refuses as too old, in the form in which kopf expects this."""

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        yield b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}\n'


class _BoundedLines:
    """The response body of a watch, in whole lines. ``bounded_event`` replaces objects that are too large."""

    def __init__(
        self,
        content: aiohttp.StreamReader,
        heard: Callable[..., None],
        received: Received,
        failed: Callable[[ApiError], Awaitable[None]],
        silence_s: float,
    ) -> None:
        """``heard``: called for each event with ``error=True`` for an ERROR event, and False for others.

        ``failed``: called for an ERROR event. It raises an error, unless kopf handles the event itself.
        """
        self._content, self._heard, self._received, self._silence_s = content, heard, received, silence_s
        self._failed = failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        """Yield lines. Raise TimeoutError after a silence.

        Only the wait for a line is limited. kopf's own limit goes on while kopf handles an event, and cancels kopf's
        task for the watch then, which ends it for good.
        """
        following = lines(self._content)
        while True:
            async with asyncio.timeout(self._silence_s):
                line = await anext(following, None)
            if line is None:
                return
            safe = bounded_event(line)
            with suppress(ValueError):  # kopf says what is wrong with a line that is not JSON.
                event = loads(safe)
                about, is_error = event["object"], event["type"] == "ERROR"
                self._heard(error=is_error)
                if is_error:
                    await self._failed(
                        ApiError(about.get("code") or 500, about.get("reason") or "", about.get("message") or "")
                    )
                self._received(about)
            yield safe + b"\n"
