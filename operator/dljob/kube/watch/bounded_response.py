"""A class of aiohttp responses that applies the limits of ``kube.objects.bounds`` before kopf decodes an object."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import aiohttp

from dljob.kube.objects.bounds import bounded_event, bounded_list
from dljob.kube.objects.trim import version_number
from dljob.kube.rest import lines

Listed = Callable[[str | None, Iterable[str], int | None], None]
"""Callback for each complete list: its namespace (None: all), the uids in it, and its resourceVersion."""


def bounded_responses(active: Callable[[], None], listed: Listed) -> type[aiohttp.ClientResponse]:
    """Return a class of responses for an aiohttp session with which kopf lists and watches DLJobs.

    ``active`` is called for each event, bookmark and page of a list, to show that the watch works. It is not called
    when a watch begins, because a broken watch may begin, and then send nothing. ``listed`` is called after the last
    page of each list, with the list's namespace, uids and resourceVersion.
    """
    uids: dict[str | None, list[str]] = {}

    class BoundedResponse(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> "BoundedResponse":
            await super().start(connection)
            if self.status == 200 and "watch" in self.url.query:
                self.content = _BoundedLines(self.content, active)  # type: ignore[assignment]
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
            present += [item["metadata"]["uid"] for item in page["items"]]
            meta = page.get("metadata") or {}
            if not meta.get("continue"):
                listed(namespace, uids.pop(namespace), version_number(meta.get("resourceVersion")))

    return BoundedResponse


class _BoundedLines:
    """The response body of a watch, in whole lines. ``bounded_event`` replaces objects that are too large."""

    def __init__(self, content: aiohttp.StreamReader, active: Callable[[], None]) -> None:
        self._content, self._active = content, active

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
        async for line in lines(self._content):
            self._active()
            yield bounded_event(line) + b"\n"
