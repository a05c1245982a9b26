"""Measure the link to another pod by TCP. One pod serves (``--serve``), the other connects to it (``--peer``)."""

import socket
import time
from statistics import median

from dlcontract.hardware import LinkRate

ROUND_TRIPS = 200
SENT_NBYTES = 256 * 2**20
CHUNK_NBYTES = 2**20
MAX_S = 2.0
CONNECT_S = 20.0
"""Seconds to wait for the other pod, which may still start."""
_IDLE_S = 10.0
_PING, _DATA, _END = b"p", b"d", b"e"


def serve(server: socket.socket, seconds: float) -> int:
    """Answer peers for ``seconds`` seconds. Return the number of peers that connected.

    ``server``: a listening TCP socket, which is closed at the end.
    """
    served = 0
    with server:
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            server.settimeout(left_s)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                break
            served += 1
            with connection:
                connection.settimeout(_IDLE_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    _answer(connection)
                except OSError:
                    continue  # the peer has gone
    return served


def _answer(connection: socket.socket) -> None:
    buffer = bytearray(CHUNK_NBYTES)
    while kind := connection.recv(1):
        if kind == _PING:
            connection.sendall(_PING)
        elif kind == _DATA:
            left = CHUNK_NBYTES
            while left and (got := connection.recv_into(buffer, left)):
                left -= got
        elif kind == _END:
            connection.sendall(_END)


def measure(host: str, port: int) -> LinkRate:
    """Return the latency and the bandwidth of the link to a peer that serves. Raise OSError if there is no peer.

    The latency is half of the median time of a round trip of one byte. The bandwidth is that of up to ``SENT_NBYTES``
    bytes, until the peer has confirmed the last one.
    """
    with _connected(host, port) as connection:
        connection.settimeout(_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(ROUND_TRIPS):
            begin = time.perf_counter()
            _exchange(connection, _PING)
            times.append(time.perf_counter() - begin)
        chunk, sent, begin = _DATA + bytes(CHUNK_NBYTES), 0, time.perf_counter()
        while sent < SENT_NBYTES and time.perf_counter() - begin < MAX_S:
            connection.sendall(chunk)
            sent += CHUNK_NBYTES
        _exchange(connection, _END)
        bandwidth_Bps = sent / max(time.perf_counter() - begin, 1e-9)
    latency_s = float(f"{max(median(times) / 2, 1e-9):.4g}")
    return LinkRate(latency_s=latency_s, Bps=float(f"{bandwidth_Bps:.4g}"), peer=host[:96])


def _exchange(connection: socket.socket, kind: bytes) -> None:
    connection.sendall(kind)
    if connection.recv(1) != kind:
        raise ConnectionError("the peer closed the connection")


def _connected(host: str, port: int) -> socket.socket:
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=5.0)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
