"""A small client of the Kubernetes API for the services of the embedded cluster. It uses only the standard library."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Object = dict[str, Any]


class ApiError(Exception):
    """The API server answered with an HTTP status of 400 or more."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """A client of one API server. It is thread-safe, because each request has its own connection.

    `pki`: folder with the certificates. `name`: name of the client certificate (files NAME.crt and NAME.key).
    """

    def __init__(self, address: str, port: int, pki: Path, name: str) -> None:
        self._address, self._port = address, port
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / f"{name}.crt", pki / f"{name}.key")

    def request(self, method: str, path: str, body: Any = None, content: str = "application/json") -> Object:
        """Send a request and return the answer. Raise ApiError for an error status, and OSError without an answer."""
        connection = http.client.HTTPSConnection(self._address, self._port, context=self._tls, timeout=30)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": content})
            answer = connection.getresponse()
            data = answer.read()
            if answer.status >= 400:
                raise ApiError(answer.status, data.decode(errors="replace")[:500])
            return json.loads(data) if data[:1] == b"{" else {}
        finally:
            connection.close()

    def ready(self) -> bool:
        """Return True if the server reports that it is ready."""
        try:
            self.request("GET", "/readyz")
        except (OSError, ApiError, http.client.HTTPException):
            return False
        return True

    def ensure(self, path: str, body: Object) -> None:
        """Create an object unless it exists. Do not change an existing object."""
        try:
            self.request("POST", path, body)
        except ApiError as refusal:
            if refusal.status != 409:
                raise

    def watch(self, path: str, listed: Object) -> Iterator[Object]:
        """Yield the changes after `listed` (the answer to a list request for `path`), until the watch ends."""
        version = listed["metadata"]["resourceVersion"]
        connection = http.client.HTTPSConnection(self._address, self._port, context=self._tls, timeout=330)
        try:
            connection.request("GET", f"{path}?watch=1&timeoutSeconds=300&resourceVersion={version}")
            for line in connection.getresponse():
                event: Object = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event
        finally:
            connection.close()
