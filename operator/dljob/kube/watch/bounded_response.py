"""A class of aiohttp responses that applies the limits of ``kube.objects.bounds`` before kopf decodes an object."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from dljob.kube.answers import lines
from dljob.kube.objects.bounds import bounded_event, bounded_list
from dljob.kube.objects.trim import version_number

Listed = Callable[[str | None, Iterable[str], int | None], None]
"""Callback for each complete list: its namespace (None: all), the uids in it, and its resourceVersion."""
Received = Callable[[Mapping[str, Any]], None]
"""Callback for each object in an event of a watch, or in a list."""


def bounded_responses(
    asked: Callable[[], None],
    active: Callable[[], None],
    listed: Listed,
    received: Received,
    silence_s: float,
) -> type[aiohttp.ClientResponse]:
    """Return a class of responses for an aiohttp session with which kopf lists and watches DLJobs.

    ``asked`` is called for each request that was sent, to show that kopf's task for the watch runs. ``active`` is
    called for each event, bookmark and page of a list, to show that the watch works. It is not called when a watch
    begins, because a broken watch may begin, and then send nothing. ``listed`` is called after the last page of each
    list, with the list's namespace, uids and resourceVersion. ``received`` is called for each object that kopf
    receives. A watch that sends nothing for ``silence_s`` seconds raises TimeoutError, and kopf opens it again.
    """
    uids: dict[str | None, list[str]] = {}

    class BoundedResponse(aiohttp.ClientResponse):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            asked()

        async def start(self, connection: Any) -> "BoundedResponse":
            if "watch" not in self.url.query:
                await super().start(connection)
                return self
            async with asyncio.timeout(silence_s):
                await super().start(connection)
            if self.status == 200:
                self.content = _BoundedLines(self.content, active, received, silence_s)  # type: ignore[assignment]
            return self

        async def json(self, **_: Any) -> Any:
            text = await self.read()
            active()
            if self.status != 200:
                return bounded_list(text) if text else {}
            # Decoding a large list takes long, and the heartbeat of the Lease must not wait for it.
            found = await asyncio.to_thread(bounded_list, text)
            if "items" in found:
                self._note(found)
            return found

        def _note(self, page: dict[str, Any]) -> None:
            """Collect the uids of the objects on a page of a list. If it is the last page, pass them to ``listed``."""
            parts = self.url.path.split("/")
            namespace = parts[parts.index("namespaces") + 1] if "namespaces" in parts else None
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


class _BoundedLines:
    """The response body of a watch, in whole lines. ``bounded_event`` replaces objects that are too large."""

    def __init__(
        self, content: aiohttp.StreamReader, active: Callable[[], None], received: Received, silence_s: float
    ) -> None:
        self._content, self._active, self._received, self._silence_s = content, active, received, silence_s

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
            self._active()
            safe = bounded_event(line)
            with suppress(ValueError):  # kopf says what is wrong with a line that is not JSON.
                self._received(json.loads(safe)["object"])
            yield safe + b"\n"
