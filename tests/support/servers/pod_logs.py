"""The logs of pods as the API server answers them, with the times of their lines and as a stream."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from aiohttp import web

LINES_A_SECOND = 4
"""Number of lines with times in the same second. ``sinceTime`` has no fractions, so that their order matters."""


@dataclass
class PodLogs:
    """``opened``: the parameters of each request, by pod. ``denied``: True: nobody may read logs."""

    opened: defaultdict[str, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))
    denied: bool = False
    _lines: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _over: set[str] = field(default_factory=set)
    """Pods whose container has ended."""
    _breaks: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How often the connections to the log of a pod were broken."""
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def write(self, pod: str, *lines: str) -> None:
        async with self._changed:
            for line in lines:
                number = len(self._lines[pod])
                fraction = f"{number % LINES_A_SECOND / LINES_A_SECOND:.2f}"[1:].rstrip("0").rstrip(".")
                at = f"2026-01-01T00:00:{number // LINES_A_SECOND:02}{fraction}Z"
                self._lines[pod].append(f"{at} {line}\n")
            self._changed.notify_all()

    async def end(self, pod: str) -> None:
        async with self._changed:
            self._over.add(pod)
            self._changed.notify_all()

    async def cut(self, pod: str) -> None:
        """Break the connections to a log, as a restart of the API server does."""
        async with self._changed:
            self._breaks[pod] += 1
            self._changed.notify_all()

    async def answer(self, request: web.Request, pod: str) -> web.StreamResponse:
        query = dict(request.query)
        self.opened[pod].append(query)
        if self.denied:
            return web.json_response({"kind": "Status", "code": 403}, status=403)
        if pod not in self._lines:
            return web.json_response({"kind": "Status", "code": 400}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        since = query.get("sinceTime", "").rstrip("Z")
        first = len(self._lines[pod]) - int(query["tailLines"]) if "tailLines" in query else 0
        sent, breaks = max(0, first), self._breaks[pod]
        while True:
            for line in self._lines[pod][sent:] if self._breaks[pod] == breaks else ():
                if line >= since:
                    await response.write(line.encode())
                sent += 1
            if query["follow"] == "false" or pod in self._over or self._breaks[pod] != breaks:
                return response
            async with self._changed:
                if sent == len(self._lines[pod]) and pod not in self._over and self._breaks[pod] == breaks:
                    await self._changed.wait()
