"""A web server on loopback that serves real git repositories with ``git http-backend``."""

import base64
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_IDENTITY = {f"GIT_{role}_{what}": "test@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
GIT_ENVIRONMENT = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent", **_IDENTITY}


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, without the user's settings, and return its output."""
    found = subprocess.run(
        ["git", *arguments], cwd=folder, env=GIT_ENVIRONMENT, check=True, capture_output=True, text=True, timeout=120
    )
    return found.stdout.strip()


def commit(folder: Path, message: str = "change") -> str:
    """Commit everything in a repository, which is made if there is none. Return the hash of the commit."""
    if not (folder / ".git").exists():
        git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


class GitServer(ThreadingHTTPServer):
    """Serve the repositories below ``root``."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.password: str | None = None
        """Password that requests must have, with any user; None: none."""
        self.status: int | None = None
        """Status of all responses; None: those of git."""
        self.only_advertised = False
        """True: refuse commits that no branch or tag points to, as some servers do that are not git's own."""
        self.requests: list[str] = []

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: GitServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", "0"))))

    def _answer(self, body: bytes) -> None:
        path, _, query = self.path.partition("?")
        self.server.requests.append(path)
        if self.server.status is not None:
            return self._content(self.server.status, b"", "text/plain")
        given = self.headers.get("Authorization", "").removeprefix("Basic ")
        if self.server.password not in (None, base64.b64decode(given).decode().partition(":")[2]):
            return self._content(401, b"", "text/plain")
        if self.server.only_advertised and b"deepen" in body:
            text = b"ERR want 0123456789abcdef not valid\n"
            refusal = b"%04x%s" % (len(text) + 4, text)
            return self._content(200, refusal, "application/x-git-upload-pack-result")
        environment = {
            **GIT_ENVIRONMENT,
            "GIT_PROJECT_ROOT": str(self.server.root), "GIT_HTTP_EXPORT_ALL": "1", "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "PATH_INFO": path, "QUERY_STRING": query, "REQUEST_METHOD": self.command, "CONTENT_LENGTH": str(len(body)),
            "CONTENT_TYPE": self.headers.get("Content-Type", ""), "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
        }  # fmt: skip
        found = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True, timeout=120)
        head, _, content = found.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().splitlines() if ": " in line)
        return self._content(int(headers.get("Status", "200").split()[0]), content, headers.get("Content-Type", ""))

    def _content(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(root: Path) -> Iterator[GitServer]:
    """Serve the repositories below ``root`` inside the context. The one in ``root/a`` is at ``/a/.git``."""
    server = GitServer(root)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
