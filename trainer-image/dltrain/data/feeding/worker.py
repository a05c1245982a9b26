"""A process that loads batches of a user's dataset for one rank: ``python -m dltrain.data.feeding.worker``.

The process uses neither MPI nor the device. It exits when its rank exits or closes the connection.
"""

import socket
import struct
import sys
import time
import traceback
from collections import deque
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch

from dltrain.data.feeding import serialization
from dltrain.launch.inherited_socket import take
from dltrain.protocol.errors import SampleError


class Maker(Protocol):
    """What a data worker receives at its start, such as a ``Source``. It makes what the rank requests."""

    def make(self, request: Any, /) -> Any: ...


class MessageKind(IntEnum):
    """Kinds of messages between a rank and its data workers. The rank sends HELLO, MAKE and FORGET.

    Workers send the other kinds.
    """

    HELLO = 0
    """Sent twice at the start: first with ``sys.path`` and torch's default dtype, then with the Maker, which contains
    the dataset."""
    MAKE = 1
    """Load a batch. The message contains the request for ``Maker.make``."""
    FORGET = 2
    """Cancel all requests whose ticket (the number of a request) is below the ticket of this message."""
    READY = 3
    MADE = 4
    """A batch and its loading time in seconds. The batch is None if the request was cancelled."""
    FAILED = 5
    """An error, as a RemoteError. If the ticket is 0, the worker could not receive the dataset."""


class Head(NamedTuple):
    kind: MessageKind
    ticket: int = 0
    spent_s: float = 0.0

    def packed(self) -> bytes:
        return struct.pack("<Bqd", *self)

    @classmethod
    def of(cls, packed: bytes) -> "Head":
        kind, ticket, spent_s = struct.unpack("<Bqd", packed)
        return cls(MessageKind(kind), ticket, spent_s)


class RemoteError(NamedTuple):
    """The text and the traceback of an exception that a data worker raised.

    The exception itself is not sent, because its class may not exist in the other process.
    """

    text: str
    trace: str
    memory: bool
    """True if the exception was a MemoryError."""


def main() -> None:
    connection = take()
    torch.set_num_threads(1)  # more threads would not help: there may be as many workers as cores
    try:
        source = _unpacked(connection)
    except Exception as error:  # noqa: BLE001 - unpickling the user's classes may raise anything
        text = f"{type(error).__name__}: {error}"
        serialization.send(
            connection, Head(MessageKind.FAILED).packed(), RemoteError(text, traceback.format_exc(), False)
        )
        return
    if source is None:
        return
    serialization.send(connection, Head(MessageKind.READY).packed(), None)
    try:
        _serve(connection, source)
    except ConnectionError:
        return  # the rank has closed the connection


def _unpacked(connection: socket.socket) -> Maker | None:
    """Receive the dataset from the rank, in a Maker. Return None if the rank has closed the connection."""
    if (first := serialization.receive(connection)) is None:
        return None
    sys.path[:], dtype = first[1]  # set first: unpickling imports the dataset's modules
    torch.set_default_dtype(dtype)
    if (second := serialization.receive(connection)) is None:
        return None
    source: Maker = second[1]
    return source


def _serve(connection: socket.socket, source: Maker) -> None:
    asked: deque[tuple[int, Any]] = deque()
    wanted_from = 0
    while True:
        while not asked or serialization.wait_for(connection, within_s=0):
            if (message := serialization.receive(connection)) is None:
                return
            head, content = Head.of(message[0]), message[1]
            if head.kind == MessageKind.FORGET:
                wanted_from = head.ticket
            else:
                asked.append((head.ticket, content))
        ticket, request = asked.popleft()
        if ticket < wanted_from:
            serialization.send(connection, Head(MessageKind.MADE, ticket).packed(), None)
        else:
            _answer(connection, source, ticket, request)


def _answer(connection: socket.socket, source: Maker, ticket: int, request: Any) -> None:
    began = time.perf_counter()
    try:
        made: Any = source.make(request)
        kind = MessageKind.MADE
    except Exception as error:  # noqa: BLE001 - the user's code
        text = str(error) if isinstance(error, SampleError) else f"{type(error).__name__}: {error}"
        made = RemoteError(text, traceback.format_exc(), isinstance(error, MemoryError))
        kind = MessageKind.FAILED
    spent_s = time.perf_counter() - began
    try:
        serialization.send(connection, Head(kind, ticket, spent_s).packed(), made, in_main_memory=True)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - pickling the user's batch may raise anything
        if isinstance(error, serialization.DeviceTensorError):
            text = (
                f"{error} in a data worker; expected samples in main memory, because each worker would take memory of "
                "the GPU, and dltrain copies batches to the rank's device. Make the tensors on the CPU in __getitem__ "
                "and collate_fn, or pass workers=0 to t.loader"
            )
        else:
            text = (
                f"found a batch that a data worker cannot send ({type(error).__name__}: {error}); expected objects "
                "that pickle supports. Pass workers=0 to t.loader"
            )
        text = f"batch of samples {request}: {text}"
        remote = RemoteError(text, traceback.format_exc(), isinstance(error, MemoryError))
        serialization.send(connection, Head(MessageKind.FAILED, ticket, spent_s).packed(), remote)


if __name__ == "__main__":
    main()
