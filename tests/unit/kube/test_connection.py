"""Sessions with an API server over TLS: connections whose requests were given up close with the session."""

import gc
import json
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import kopf
import pytest

from dljob.controller.connection import Connection
from dljob.kube import Api, ApiError
from dljob.kube.background import BackgroundLoop
from dljob.kube.kinds import DLJOB
from dljob.kube.pki import issue

EVENT = json.dumps({"type": "ADDED", "object": {"metadata": {"name": "mlp"}}}).encode() + b"\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


class MuteServer:
    """A server that sends one event to each watch, and then neither reads nor closes: it answers no TLS close either."""

    def __init__(self, folder: Path) -> None:
        made = self.credentials = issue("api", "kube-system", "api", "cluster.local", datetime.now(UTC))
        (folder / "cert").write_bytes(made.cert)
        (folder / "key").write_bytes(made.key)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(folder / "cert", folder / "key")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.open: list[ssl.SSLSocket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listening.accept()
            except OSError:
                return
            try:
                each = self._tls.wrap_socket(plain, server_side=True)
            except OSError:  # The client has refused the certificate.
                continue
            self.open.append(each)
            each.recv(65536)
            each.sendall(HEAD + f"{len(EVENT):x}\r\n".encode() + EVENT + b"\r\n")

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self.open:
            each.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MuteServer]:
    with closing(MuteServer(tmp_path)) as found:
        yield found


def watched(server: MuteServer, name: str | None) -> bytes:
    """Return the first event of a watch that verifies the certificate of the server. ``name``: the name in it."""
    address = f"https://127.0.0.1:{server.port}"
    info = kopf.ConnectionInfo(server=address, ca_data=server.credentials.ca_cert)
    connection = Connection(info, server_name=name)

    async def session() -> bytes:
        async with connection.session() as opened:
            return await first_event(Api(opened, address))

    with BackgroundLoop("test") as loop:
        return loop.call(session())


def test_certificate_is_verified_for_the_name_of_the_kubeconfig(server: MuteServer) -> None:
    """Fixed bug: ``tls-server-name`` had no effect, such as behind a tunnel to the API server."""
    assert json.loads(watched(server, "api"))["type"] == "ADDED"


@pytest.mark.parametrize("name", [None, "other"])
def test_certificate_for_another_name_is_refused(server: MuteServer, name: str | None) -> None:
    with pytest.raises(ApiError, match=r"(?i)certificate"):
        watched(server, name)


async def first_event(api: Api) -> bytes:
    events = api.watch(DLJOB, "n", "", "1", 60, 60.0)
    async for line in events:
        await events.aclose()  # type: ignore[attr-defined]
        return line
    raise AssertionError("no event")


def test_watch_that_was_given_up_leaves_no_open_connection(server: MuteServer) -> None:
    address = f"https://127.0.0.1:{server.port}"
    connection = Connection(kopf.ConnectionInfo(server=address, insecure=True))

    async def session() -> bytes:
        async with connection.session() as opened:
            return await first_event(Api(opened, address))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        with BackgroundLoop("test") as loop:
            assert json.loads(loop.call(session()))["type"] == "ADDED"
        gc.collect()
    assert [str(each.message) for each in caught] == []
