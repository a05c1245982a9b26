"""The recommendation service: an HTTP server that returns the plan of a DLJob on a cluster.

``POST /v1/plan`` accepts ``{"job": …, "cluster": …, "profiles": …}`` as JSON (see ``recommendation.answer``) and
returns the plan. ``GET /healthz`` returns ok. The service is stateless, reads no cluster and needs no permissions.
"""

import json
import socket
import time
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore
from typing import Any

from dljob.cluster import ClusterView
from dljob.cluster.energy import DAY_S
from dljob.job.plan.recommendation import Constants, answer

MAX_NBYTES = 8 * 2**20
"""Maximum size of a request body in bytes. A cluster of 10,000 nodes takes about 2 MB."""
AT_ONCE = 8
"""Maximum number of connections that are served at the same time. Further ones wait in the kernel's queue."""
READ_LIMIT_S = 10.0


class Service(ThreadingHTTPServer):
    """HTTP server that answers requests for recommendations (the plan of a DLJob) until ``shutdown`` is called.

    ``address``: host and port to listen on. ``view``: cluster for requests that contain no cluster; None: such requests
    are refused. ``constants``: (model, device type) → measured constants, for requests without profiles.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], view: ClusterView | None = None, constants: Constants | None = None):
        self.view, self.constants = view, constants or {}
        self._slots = BoundedSemaphore(AT_ONCE)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._slots.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()


class _Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"
    server_version = "dljob"
    sys_version = ""
    timeout = READ_LIMIT_S

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self._reply(HTTPStatus.OK, {"status": "ok"})
        elif self.path == "/v1/plan":
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "method: found GET; expected POST with a JSON body")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f"path: found {self.path[:100]}; expected POST /v1/plan or GET /healthz")

    def do_POST(self) -> None:
        if self.path != "/v1/plan":
            self._refuse(HTTPStatus.NOT_FOUND, f"path: found {self.path[:100]}; expected POST /v1/plan or GET /healthz")
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "Content-Length: found none; expected the body's size in bytes")
        elif int(length) > MAX_NBYTES:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body: found {length} bytes; expected at most {MAX_NBYTES}"
            )
        else:
            self._plan(self.rfile.read(int(length)))

    def _plan(self, body: bytes) -> None:
        try:
            begin_s, now = time.time() % DAY_S, datetime.now(UTC)
            reply = answer(json.loads(body), self.server.view, self.server.constants, begin_s, now)
        except RecursionError:
            self._refuse(HTTPStatus.BAD_REQUEST, "body: found JSON nested too deeply; expected a DLJob and a cluster")
        except json.JSONDecodeError as error:
            self._refuse(
                HTTPStatus.BAD_REQUEST, f"body: found invalid JSON ({error}); expected an object with job and cluster"
            )
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        else:
            self._reply(HTTPStatus.OK, reply)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        # The rest of the request is not read, so the connection cannot serve another request.
        self.close_connection = True
        self._reply(status, {"error": message})

    def _reply(self, status: HTTPStatus, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Do not log requests."""
