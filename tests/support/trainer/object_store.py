"""An S3 server on this machine (moto's), which can refuse or damage requests."""

import contextlib
import io
import json
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs

import botocore.session
from moto import backends
from moto.moto_api._internal.models import moto_api_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from dltrain.object_store.client import _loader

# moto lists its own folder with every request.
_MODULES = tuple(backends.list_of_moto_modules())
backends.list_of_moto_modules = lambda: _MODULES


class Server:
    """The server. ``port``: its TCP port on this machine."""

    def __init__(self, host: str) -> None:
        self._rules: list[list[Any]] = []
        self.requests: list[str] = []
        """The S3 operations that were requested, in order."""
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(host, 0, self._handle, threaded=True)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def environ(self, host: str = "127.0.0.1") -> dict[str, str]:
        """Return the environment variables of a process that uses the server. ``host``: this machine's address."""
        return {
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "key",
            "AWS_ENDPOINT_URL": f"http://{host}:{self.port}",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "*",
        }

    def refuse(self, operation: str, status: int, code: str, times: int = 2**31, key: str = "", skip: int = 0) -> None:
        """Answer requests for ``operation`` on keys that contain ``key`` with an error. ``skip``: let some pass first.

        The status 0 closes the connection after half of the request's or answer's body.
        """
        self._rules.append([operation, status, code, times, key, skip])

    def allow_all(self) -> None:
        self._rules.clear()

    def client(self) -> Any:
        """Return a client of the server. All clients share what botocore reads from files."""
        session = botocore.session.Session()
        session.register_component("data_loader", _loader())
        return session.create_client(
            "s3", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id="id", aws_secret_access_key="key",
        )  # fmt: skip

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        found = self.client().list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())
        return [each["Key"] for each in found]

    def last_commit(self, bucket: str, prefix: str = "") -> dict[str, Any]:
        """Return the content of the newest commit marker."""
        key = max(key for key in self.keys(bucket, prefix) if "/commits/" in key)
        content: dict[str, Any] = json.loads(self.client().get_object(Bucket=bucket, Key=key)["Body"].read())
        return content

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, environ: dict[str, Any], start: Any) -> Any:
        operation, path = _operation(environ), environ["PATH_INFO"]
        self.requests.append(operation)
        for rule in self._rules:
            if rule[0] == operation and rule[3] > 0 and rule[4] in path:
                if rule[5] > 0:
                    rule[5] -= 1
                    continue
                rule[3] -= 1
                return _refused(environ, start, rule[1], rule[2], lambda: self._app(environ, start))
        return self._app(environ, start)


def _operation(environ: dict[str, Any]) -> str:
    """Return the name of the operation of a request to S3, or to STS, which gives keys for a workload identity."""
    method, query = environ["REQUEST_METHOD"], parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):  # not S3, but STS
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        environ["wsgi.input"] = io.BytesIO(body)
        return str(parse_qs(body.decode())["Action"][0])
    key = environ["PATH_INFO"].strip("/").partition("/")[2]
    if method == "POST":
        return (
            "DeleteObjects"
            if "delete" in query
            else ("CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload")
        )
    if method == "PUT":
        return "UploadPart" if "partNumber" in query else ("PutObject" if key else "CreateBucket")
    if method == "GET":
        return "GetObject" if key else ("ListMultipartUploads" if "uploads" in query else "ListObjectsV2")
    return "HeadObject" if method == "HEAD" else "AbortMultipartUpload"


def _refused(environ: dict[str, Any], start: Any, status: int, code: str, answer: Any) -> Any:
    length = int(environ.get("CONTENT_LENGTH") or 0)
    body = environ["wsgi.input"].read(length)
    if status == 0:
        if code == "lost answer":
            environ["wsgi.input"] = io.BytesIO(body)
            list(answer())
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError(code)
    error = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
    # S3 and STS answer differently. STS is asked at the root of the server.
    text = (error if environ["PATH_INFO"].strip("/") else f"<ErrorResponse>{error}</ErrorResponse>").encode()
    start(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
    # An answer to HEAD has no body. Clients would read one as the next answer of the connection.
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [text]


@contextlib.contextmanager
def server(host: str = "127.0.0.1") -> Iterator[Server]:
    """Run a server with the bucket ``models``."""
    running = Server(host)
    try:
        moto_api_backend.reset()  # The server's content is the same in all tests of this process.
        running.client().create_bucket(Bucket="models")
        yield running
    finally:
        running.close()
