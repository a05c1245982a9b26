"""The read-only HTTP server for Prometheus and the kubelet: /metrics, /healthz and /readyz."""

import asyncio
import contextlib
from collections.abc import Callable
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_REQUEST_S = 5.0


class Health:
    """An HTTP server for Prometheus and the kubelet's probes.

    ``unready``: a function that returns the reason why the pod is not ready, or None if it is ready.
    """

    def __init__(self, registry: CollectorRegistry, unready: Callable[[], str | None]) -> None:
        self._registry, self._unready = registry, unready

    async def listen(self, host: str | None, port: int) -> None:
        """Start the server and return. It serves until the process ends.

        ``host``: the address at which it listens; None: all addresses. Raise OSError if ``port`` is in use.
        """
        await asyncio.start_server(self._serve, host, port, limit=8192)

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return (HTTP status, content type, body) of the response to a request for ``path``, such as /metrics.

        The status of /readyz is 503 while the pod is not ready, and the body says why. Other paths get 404.
        """
        text = "text/plain; charset=utf-8"
        match path.partition("?")[0]:
            case "/metrics":
                return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
            case "/healthz":
                return 200, text, b"ok\n"
            case "/readyz":
                why = self._unready()
                return (200, text, b"ok\n") if why is None else (503, text, f"not ready: {why}\n".encode())
            case _:
                return 404, text, b"not found; expected /metrics, /healthz or /readyz\n"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_REQUEST_S):
                words = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split(" ", 2)
                valid = len(words) == 3 and words[0] in ("GET", "HEAD")
                status, kind, body = self.answer(words[1]) if valid else (405, "text/plain", b"GET and HEAD only\n")
                head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
                head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode() + (b"" if words[:1] == ["HEAD"] else body))
                await writer.drain()
        writer.close()
