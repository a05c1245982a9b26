"""The Kubernetes API calls of an agent.

The Kubernetes client library is not used, because it takes 60 MB in every pod.
"""

import asyncio
import base64
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 10.0
_WATCH_S = 300


class ApiError(Exception):
    """The API server answered with an error. ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status

    @classmethod
    def of(cls, status: int, answer: bytes) -> "ApiError":
        """Create the error from a response body, which is a Status object or arbitrary text of a proxy."""
        try:
            message = json.loads(answer)["message"]
        except (ValueError, KeyError, TypeError):
            message = answer[:200].decode(errors="replace")
        return cls(status, str(message))


@dataclass(frozen=True)
class KubeApi:
    """Access to the ConfigMaps of one namespace. Methods raise ApiError, OSError and TimeoutError."""

    host: str
    port: int
    namespace: str
    token_file: Path
    tls: ssl.SSLContext

    @classmethod
    def in_cluster(cls, namespace: str) -> "KubeApi":
        """Return a client that uses the service account of this process's pod. Raise ValueError outside a pod."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (SERVICE_ACCOUNT / "token").is_file():
            raise ValueError(
                f"KUBERNETES_SERVICE_HOST: found {host!r}; expected this variable and a service account token, as in "
                "a pod. Outside a cluster, set DLJOB_API=off"
            )
        return cls(
            host,
            int(port),
            namespace,
            SERVICE_ACCOUNT / "token",
            ssl.create_default_context(cafile=SERVICE_ACCOUNT / "ca.crt"),
        )

    async def get(self, name: str) -> dict[str, Any]:
        """Return the ConfigMap ``name`` as the dictionary of its JSON."""
        answer = await self._call("GET", self._path(name))
        try:
            result: dict[str, Any] = json.loads(answer)
        except ValueError as error:
            raise ConnectionError(f"found {len(answer)} bytes of an answer of the API server; expected more") from error
        return result

    async def patch_data(self, name: str, data: dict[str, str]) -> None:
        """Set the keys of ``data`` in the ``data`` field of the ConfigMap ``name``. Other keys remain."""
        await self._call("PATCH", self._path(name), json.dumps({"data": data}).encode())

    async def patch_files(self, name: str, files: Mapping[str, bytes | None], resource_version: str) -> None:
        """Set the keys of ``files`` in the ``binaryData`` field of the ConfigMap ``name``. None deletes a key.

        Other keys remain. Raise ApiError with the status 409 if the ConfigMap has another version than
        ``resource_version``.
        """
        value = {key: data if data is None else base64.b64encode(data).decode() for key, data in files.items()}
        patch = {"metadata": {"resourceVersion": resource_version}, "binaryData": value}
        await self._call("PATCH", self._path(name), json.dumps(patch).encode())

    async def watch(self, name: str, resource_version: str) -> AsyncIterator[dict[str, Any]]:
        """Yield the watch events of the ConfigMap ``name`` that follow its version ``resource_version``.

        The iteration ends when the server closes the watch, after at most about 5 minutes. Only the waits for the
        server are limited: a limit on the whole iteration could cancel the caller while it handles an event.
        """
        end_s = asyncio.get_running_loop().time() + _WATCH_S + _TIMEOUT_S
        query = f"?watch=true&fieldSelector=metadata.name%3D{name}&resourceVersion={resource_version}"
        query += f"&timeoutSeconds={_WATCH_S}"
        reader, writer = await self._open("GET", self._path("").rstrip("/") + query, b"")
        try:
            async with asyncio.timeout_at(end_s):
                status, chunked = await _head(reader)
                if status != 200:
                    raise ApiError.of(status, await reader.read(65536))
            parts, pending = _body(reader, chunked), b""
            while True:
                async with asyncio.timeout_at(end_s):
                    part = await anext(parts, None)
                if part is None:
                    return
                *lines, pending = (pending + part).split(b"\n")
                for line in lines:
                    yield json.loads(line)
        finally:
            writer.transport.abort()  # A regular TLS shutdown could outlast the event loop.

    def _path(self, name: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/configmaps/{name}"

    async def _call(self, method: str, path: str, body: bytes = b"") -> bytes:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await self._open(method, path, body)
            try:
                status, chunked = await _head(reader)
                answer = b"".join([part async for part in _body(reader, chunked)])
            finally:
                writer.transport.abort()
        if status >= 300:
            raise ApiError.of(status, answer)
        return answer

    async def _open(self, method: str, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls, limit=2**22)
        host = f"[{self.host}]" if ":" in self.host else self.host
        token = self.token_file.read_text().strip()  # Read for each call, because Kubernetes rotates the token.
        head = [
            f"{method} {path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            f"Authorization: Bearer {token}",
            "Accept: application/json",
            *(["Content-Type: application/merge-patch+json"] if method == "PATCH" else []),
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        return reader, writer


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Read the head of an HTTP response. Return (HTTP status, True if the body has a chunked transfer encoding)."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError as error:
        raise ConnectionError(
            "the API server closed the connection without an answer; expected an HTTP response"
        ) from error
    status = head.split(" ", 2)[1:2]
    if not (status and status[0].isdecimal()):
        raise ConnectionError(f"found {head[:80]!r}; expected an HTTP response of the API server")
    return int(status[0]), "transfer-encoding: chunked" in head.lower()


async def _body(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Yield the body of an HTTP response in pieces. ``chunked``: True if it has a chunked transfer encoding.

    The iteration ends after the last chunk or, without chunks, at the end of the connection.
    """
    try:
        while chunked and (size := int((await reader.readline()).split(b";")[0] or b"0", 16)):
            yield (await reader.readexactly(size + 2))[:-2]
    except asyncio.IncompleteReadError:
        return
    while not chunked and (part := await reader.read(65536)):
        yield part
