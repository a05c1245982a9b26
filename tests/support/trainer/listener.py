"""The agent's side of the rank socket: it records the messages of ranks and can ask them to stop."""

import contextlib
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from dltrain.protocol.rank_messages import RankMessage, Stop, rank_message_adapter

T = TypeVar("T")
LAST = b"last\n"
"""Sent by the listener to itself: connections are accepted in order."""


class Listener:
    """Listens at ``path`` while in use. A thread appends to ``messages``."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "s")
        self.messages: list[RankMessage] = []
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._ended = 0
        """Number of connections whose messages have all been read."""
        self._last = False
        """True when the connection of ``wait_for_ends`` has been accepted, and so all before it."""
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.path)
        self._server.listen()
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()  # It may have accepted a connection that is not in the list yet.
        for connection in (self._server, *self._connections):
            connection.close()
        Path(self.path).unlink(missing_ok=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._connections.append(connection)
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            for line in lines:
                if line == LAST:
                    self._last = True
                    break
                with self._changed:
                    self.messages.append(rank_message_adapter.validate_json(line))
                    self._changed.notify_all()
        with self._changed:
            self._ended += 1
            self._changed.notify_all()

    @property
    def connections(self) -> int:
        """Number of connections of ranks so far."""
        return len(self._connections) - self._last

    def of(self, kind: type[T]) -> list[T]:
        """Return the messages of one kind so far."""
        return [message for message in self.messages if isinstance(message, kind)]

    def wait_for(self, kind: type[Any], count: int, timeout_s: float = 30) -> None:
        """Wait until ``count`` messages of a kind have arrived."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: len(self.of(kind)) >= count, timeout_s)
        assert arrived, f"{len(self.of(kind))} {kind.__name__} after {timeout_s} s; received {self.messages}"

    def wait_for_ends(self, timeout_s: float = 30) -> None:
        """Wait until all messages of all connections have been read, after the ranks have ended."""
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self.path)
            last.sendall(LAST)
        with self._changed:
            read = self._changed.wait_for(lambda: self._last and self._ended == len(self._connections), timeout_s)
        assert read, f"{self._ended} of {len(self._connections)} connections have ended after {timeout_s} s"

    def stop(self, grace_s: float = 30, at_step: int | None = None) -> None:
        """Ask every rank to stop within ``grace_s`` seconds."""
        for connection in self._connections:
            connection.sendall(Stop(grace_s=grace_s, at_step=at_step).to_json().encode() + b"\n")
