"""A process that makes batches of a user's dataset for one rank: ``python -m dltrain.data.feeding.worker``.

It knows neither MPI nor the device, and ends when its rank closes the connection or ends.
"""

import socket
import struct
import sys
import time
import traceback
from collections import deque
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from dltrain.data.feeding import serialization
from dltrain.data.feeding.source import Request, Source
from dltrain.launch.inherited_socket import taken
from dltrain.protocol.errors import SampleError


class Says(IntEnum):
    """Kinds of message, the first three from the rank."""

    HELLO = 0
    """With ``sys.path``, then once more with the Source."""
    MAKE = 1
    """With a Request."""
    FORGET = 2
    """What was asked for before this ticket is not wanted any more."""
    READY = 3
    MADE = 4
    """With the batch, and the seconds that it took; without a batch if it was not wanted any more."""
    FAILED = 5
    """With a Trouble. On ticket 0: the dataset could not be brought here."""


class Head(NamedTuple):
    says: Says
    ticket: int = 0
    spent_s: float = 0.0

    def packed(self) -> bytes:
        return struct.pack("<Bqd", *self)

    @classmethod
    def of(cls, packed: bytes) -> "Head":
        says, ticket, spent_s = struct.unpack("<Bqd", packed)
        return cls(Says(says), ticket, spent_s)


class Trouble(NamedTuple):
    """An exception, in words: its own class may not be known elsewhere."""

    text: str
    trace: str
    memory: bool
    """A MemoryError."""


def main() -> None:
    connection = taken()
    torch.set_num_threads(1)  # as many workers as there are cores, and none for more
    try:
        source = _unpacked(connection)
    except Exception as error:  # noqa: BLE001 - whatever importing and unpickling the user's classes raises
        text = f"{type(error).__name__}: {error}"
        serialization.send(connection, Head(Says.FAILED).packed(), Trouble(text, traceback.format_exc(), False))
        return
    if source is None:
        return
    serialization.send(connection, Head(Says.READY).packed(), None)
    try:
        _serve(connection, source)
    except ConnectionError:
        return  # the rank has closed the connection


def _unpacked(connection: socket.socket) -> Source | None:
    """What the rank sends first; None when it has left."""
    if (first := serialization.receive(connection)) is None:
        return None
    sys.path[:] = first[1]  # before the dataset, whose modules lie there
    if (second := serialization.receive(connection)) is None:
        return None
    source: Source = second[1]
    return source


def _serve(connection: socket.socket, source: Source) -> None:
    asked: deque[tuple[int, Request]] = deque()
    wanted_from = 0
    while True:
        while not asked or serialization.wait_for(connection, within_s=0):
            if (message := serialization.receive(connection)) is None:
                return
            head, content = Head.of(message[0]), message[1]
            if head.says == Says.FORGET:
                wanted_from = head.ticket
            else:
                asked.append((head.ticket, content))
        ticket, request = asked.popleft()
        if ticket < wanted_from:
            serialization.send(connection, Head(Says.MADE, ticket).packed(), None)
        else:
            _answer(connection, source, ticket, request)


def _answer(connection: socket.socket, source: Source, ticket: int, request: Request) -> None:
    began = time.perf_counter()
    try:
        made: Any = source.make(request)
        says = Says.MADE
    except Exception as error:  # noqa: BLE001 - the user's code
        text = str(error) if isinstance(error, SampleError) else f"{type(error).__name__}: {error}"
        made = Trouble(text, traceback.format_exc(), isinstance(error, MemoryError))
        says = Says.FAILED
    spent_s = time.perf_counter() - began
    try:
        serialization.send(connection, Head(says, ticket, spent_s).packed(), made)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - what pickling the user's batch raises
        text = (
            f"batch of samples {request}: cannot be sent by a worker: {type(error).__name__}: {error}; pass workers=0"
        )
        trouble = Trouble(f"{text} to t.loader", traceback.format_exc(), isinstance(error, MemoryError))
        serialization.send(connection, Head(Says.FAILED, ticket, spent_s).packed(), trouble)


if __name__ == "__main__":
    main()
