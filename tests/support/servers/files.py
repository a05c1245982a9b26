"""A web server on loopback with ranges and ETags, which can simulate faults."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.etags = True
        self.cuts = 0
        """Number of responses that end in the middle of their body."""
        self.longest_nbytes = 2**60
        """Maximum length of a body, after which the connection is dropped."""
        self.answers: list[int] = []
        """Statuses of the next responses, before files are served again. A negative last one is repeated."""
        self.authorization: str | None = None
        """Authorization header that requests must have."""
        self.redirects: dict[str, str] = {}
        self.gets: list[tuple[str, int]] = []
        """Path and first byte of every GET request."""
        self.heads = 0
        self.sent_nbytes = 0
        self.seen_authorizations: set[str | None] = set()
        self.gate: threading.Event | None = None
        """Bodies that do not begin at byte 0 wait for this event."""
        self.lock = threading.Lock()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.server.heads += 1
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        server, path = self.server, self.path.partition("?")[0]
        server.seen_authorizations.add(self.headers.get("Authorization"))
        if server.authorization not in (None, self.headers.get("Authorization")):
            return self._status(HTTPStatus.UNAUTHORIZED)
        if server.answers:
            status = server.answers[0]
            if status > 0:
                server.answers.pop(0)
            return self._status(HTTPStatus(abs(status)))
        if path in server.redirects:
            return self._status(HTTPStatus.FOUND, Location=server.redirects[path])
        if path not in server.files:
            return self._status(HTTPStatus.NOT_FOUND)
        content = server.files[path]
        begin, end = 0, len(content)
        requested = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if server.ranges else None
        if requested:
            begin, end = int(requested[1]), min(end, int(requested[2]) + 1) if requested[2] else end
        self.send_response(HTTPStatus.PARTIAL_CONTENT if requested else HTTPStatus.OK)
        self.send_header("Content-Length", str(end - begin))
        if server.etags:
            self.send_header("ETag", f'"{sha256(content).hexdigest()[:8]}"')
        if requested:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.end_headers()
        if body:
            self._body(path, content, begin, end)
        return None

    def _body(self, path: str, content: bytes, begin: int, end: int) -> None:
        server = self.server
        with server.lock:
            server.gets.append((path, begin))
            cut = server.cuts > 0 and end - begin > 1
            server.cuts -= cut
        if server.gate is not None and begin > 0:
            server.gate.wait(30)
        whole, end = end, min((begin + end) // 2 if cut else end, begin + server.longest_nbytes)
        self.close_connection = end < whole
        try:
            self.wfile.write(content[begin:end])
        except (BrokenPipeError, ConnectionResetError):
            return
        with server.lock:
            server.sent_nbytes += end - begin

    def _status(self, status: HTTPStatus, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serving() -> Iterator[FileServer]:
    server = FileServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        if server.gate is not None:
            server.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
