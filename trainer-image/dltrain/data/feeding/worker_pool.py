"""Worker processes of one rank, which make the batches of steps to come.

Not torch's DataLoader: it forks the rank (see ``hatch``), or runs the script again in every worker; it answers with
what lies in /dev/shm; it does not know that a step was given up; and a dead worker is noticed after up to five seconds,
when the agent takes the rank for hung.
"""

import contextlib
import itertools
import os
import socket
import sys
from typing import Any

from dltrain.data.feeding import serialization
from dltrain.data.feeding.forking import Child, WorkerForker
from dltrain.data.feeding.source import Request, Source
from dltrain.data.feeding.worker import Head, Says, Trouble
from dltrain.host import cgroup
from dltrain.protocol.errors import SampleError, WorkerLostError

_SIGKILL = 9
_OBITUARY_S = 2.0
"""How long to wait for the way in which a worker ended, once it has."""


class Workers:
    """``count`` processes that take turns. ``ask`` and ``get`` may be called from two threads."""

    def __init__(self, source: Source, count: int, room_nbytes: int | None = None) -> None:
        """Returns before they have started. ``room_nbytes``: what the dataset may take once more.

        Raises ValueError when it cannot be pickled, MemoryError when it is larger, OSError.
        """
        self._tickets = itertools.count(1)
        self._closing = False
        self._oom_kills = cgroup.oom_kills()
        packed = _packed(source, room_nbytes, count)  # one for all; and before anything is started, as it may fail
        try:
            self._forker = WorkerForker(count)
            try:
                self._workers = [_Worker(zygote, packed) for zygote in self._forker.connections]
            except BaseException:
                self._forker.close()
                raise
        finally:
            os.close(packed)

    @property
    def count(self) -> int:
        return len(self._workers)

    def ready(self) -> bool:
        """Whether all have started. Raises as ``get`` does."""
        for worker in self._workers:
            while not worker.ready and (serialization.wait_for(worker.connection, within_s=0) or worker.child.ended(0)):
                self._take(worker)
        return all(worker.ready for worker in self._workers)

    def ask(self, request: Request) -> int:
        """Have a batch made; returns the ticket for ``get``."""
        ticket = next(self._tickets)
        with contextlib.suppress(ConnectionError):  # ``get`` tells how it ended
            serialization.send(self._of(ticket).connection, Head(Says.MAKE, ticket).packed(), request)
        return ticket

    def get(self, ticket: int) -> tuple[Any, float]:
        """The batch, and the seconds that a worker spent on it; None instead of one that was dropped.

        Tickets in the order in which they were given; some may be left out. Raises SampleError, MemoryError and
        WorkerLostError.
        """
        worker = self._of(ticket)
        while True:
            head, content = self._take(worker)
            if head.ticket == ticket and head.says == Says.FAILED:
                raise _error(head, content)
            if head.ticket == ticket:
                return content, head.spent_s

    def drop(self) -> None:
        """Nothing of what was asked for is wanted any more."""
        ticket = next(self._tickets)
        for worker in self._workers:
            with contextlib.suppress(ConnectionError):
                serialization.send(worker.connection, Head(Says.FORGET, ticket).packed(), None)

    def wake(self) -> None:
        """Let ``get`` fail in the thread that waits in it: nothing more is wanted."""
        self._closing = True
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End them, at once."""
        for worker in self._workers:
            worker.close()
        self._forker.close()

    def _of(self, ticket: int) -> "_Worker":
        return self._workers[ticket % len(self._workers)]

    def _take(self, worker: "_Worker") -> tuple[Head, Any]:
        """The next message of a worker."""
        # The process, too: another one that was forked at the same moment may hold the worker's end of the connection.
        while True:
            serialization.wait_for(worker.connection, worker.child)
            if serialization.wait_for(worker.connection, within_s=0):
                message = serialization.receive(worker.connection)
                break
            if worker.child.ended(0) is not None:
                message = None
                break
        if message is None:
            raise self._lost(worker)
        head, content = Head.of(message[0]), message[1]
        if head.says == Says.READY:
            worker.ready = True
        if head.says == Says.FAILED and not head.ticket:
            raise _error(head, content)
        return head, content

    def _lost(self, worker: "_Worker") -> Exception:
        number = self._workers.index(worker)
        exit_ = None if self._closing else worker.child.ended(_OBITUARY_S)
        kills = cgroup.oom_kills()
        if exit_ is not None and exit_.signal == _SIGKILL and kills is not None and kills > (self._oom_kills or 0):
            return MemoryError(
                f"data worker {number} of {self.count} was killed by the kernel for memory: raise the memory limit, or "
                "use fewer workers or a smaller prefetch"
            )
        how = "ended, and its zygote with it" if exit_ is None else f"ended with {exit_}"
        return WorkerLostError(f"data worker {number} of {self.count} {how} while it made a batch; see the log")


class _Worker:
    """Of one of them, our ends."""

    def __init__(self, zygote: socket.socket, packed: int) -> None:
        """``packed``: the source."""
        self.ready = False
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.child = Child(zygote, ("-m", "dltrain.data.feeding.worker"), theirs.fileno())
        serialization.send(self.connection, Head(Says.HELLO).packed(), sys.path)
        socket.send_fds(self.connection, [Head(Says.HELLO).packed()], [packed])

    def close(self) -> None:
        self.connection.close()
        self.child.close()


def _packed(source: Source, room_nbytes: int | None, count: int) -> int:
    try:
        return serialization.pack(source, room_nbytes, count)
    except MemoryError as error:
        raise MemoryError(f"the dataset does not fit into memory once more: {error}") from error
    except OSError:
        raise
    except Exception as error:  # whatever the user's classes raise
        raise ValueError(
            f"dataset: cannot be sent to worker processes: {type(error).__name__}: {error}; open files and connections "
            "in __getitem__ instead, or pass workers=0 to t.loader"
        ) from error


class _InWorkerError(Exception):
    """The traceback of another process."""


def _error(head: Head, trouble: Trouble) -> Exception:
    if trouble.memory:
        return MemoryError(f"in a data worker: {trouble.text}")
    if not head.ticket:
        error: Exception = WorkerLostError(f"data worker: the dataset could not be brought there: {trouble.text}")
    else:
        error = SampleError(trouble.text)
    error.__cause__ = _InWorkerError(f"in a data worker:\n{trouble.trace}")
    return error
