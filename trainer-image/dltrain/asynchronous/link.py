"""Messages between workers and the parameter server, which answers requests one by one.

A worker sends a request, with its gradient if it has one, and waits for the reply. If the worker may continue, the
reply includes the parameters. Messages are point-to-point and go through main memory.
"""

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dltrain.comm.core.collective import host_array
from dltrain.comm.core.fault_tolerance import translate
from dltrain.comm.core.waiting import complete, wait_until
from dltrain.comm.process_group import ProcessGroup

_LONGEST_NBYTES = 2**24
_HEADER, _BODY = 1, 2
"""MPI tags of the two kinds of messages: the numbers of a request or reply, and the tensor that follows them."""


class RequestKind(IntEnum):
    PARAMETERS = 0
    UPDATE = 1
    """An update of the parameters. The gradient follows in further messages."""
    NOTHING = 2
    """A step in which this worker had no samples. No gradient follows."""


class ReplyKind(IntEnum):
    GO_ON = 0
    """The worker may start its next step. The parameters follow in further messages."""
    PAUSE = 1
    """All ranks now run a collective operation, such as for a checkpoint. Afterwards, the worker must request
    parameters."""
    OVER = 2
    """All workers have done all of their steps. The final parameters follow in further messages."""


class Request(NamedTuple):
    kind: float
    rate: float = 0.0
    """Learning rate of the update."""
    samples: float = 0.0
    pause: float = 0.0
    """1 if the worker requests a pause for a checkpoint or a stop, else 0."""


class Reply(NamedTuple):
    kind: float
    staleness: float = 0.0
    ahead: float = 0.0
    samples: float = 0.0
    """Number of samples in all updates of all workers so far."""


class Link:
    """One rank's side of the connection between workers and parameter server.

    While the rank waits, it calls ``alive`` every ``alive_s`` seconds, so that its agent does not treat it as hung.
    """

    def __init__(self, process_group: ProcessGroup, alive: Callable[[], None], alive_s: float = 1.0) -> None:
        self._process_group, self._alive, self._alive_s = process_group, alive, alive_s
        self._alive_at = time.perf_counter()
        self.waited_s = 0.0
        """Total time that this rank has waited for messages, in seconds."""

    def send(self, header: Request | Reply, peer: int, body: Tensor | None = None) -> None:
        self._wait([self._process_group.comm.Isend(np.array(header, dtype=np.float64), peer, _HEADER)])
        if body is not None:
            self._wait([self._process_group.comm.Isend(part, peer, _BODY) for part in _parts(body)])

    def reply(self, peer: int) -> Reply:
        """Receive the reply of the parameter server, which is rank ``peer``."""
        header = np.empty(len(Reply._fields))
        self._wait([self._process_group.comm.Irecv(header, peer, _HEADER)])
        return Reply(*header)

    def body(self, room: Tensor, peer: int) -> None:
        """Receive into ``room`` the tensor that rank ``peer`` sends after its request or reply."""
        self._wait([self._process_group.comm.Irecv(part, peer, _BODY) for part in _parts(room)])

    def request(self) -> tuple[int, Request]:
        """Receive the next request. Return the worker's rank and the request.

        If several workers wait, Open MPI serves them in rank order. There is one receive for all workers. With one
        receive per worker, testing one receive could take another worker's message without waking the server.
        """
        from mpi4py import MPI

        header, status = np.empty(len(Request._fields)), MPI.Status()
        try:
            expected = self._process_group.comm.Irecv(header, MPI.ANY_SOURCE, _HEADER)
            self._until(lambda: bool(expected.Test(status)))
        except MPI.Exception as error:
            raise translate(error) from error
        return int(status.source), Request(*header)

    def _wait(self, requests: list[Any]) -> None:
        from mpi4py import MPI

        try:
            self._until(lambda: complete(requests))
        except MPI.Exception as error:
            raise translate(error) from error

    def _until(self, done: Callable[[], bool]) -> None:
        began = time.perf_counter()

        def poll() -> bool:
            if time.perf_counter() - self._alive_at >= self._alive_s:
                self._alive_at = time.perf_counter()
                self._alive()
            return done()

        wait_until(poll)
        self.waited_s += time.perf_counter() - began


def _parts(tensor: Tensor) -> list[Any]:
    flat, longest = host_array(tensor), _LONGEST_NBYTES // tensor.itemsize
    return [flat[begin : begin + longest] for begin in range(0, len(flat), longest)]
