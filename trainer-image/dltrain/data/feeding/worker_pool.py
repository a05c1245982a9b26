"""Worker processes of one rank, which load the batches of future steps.

torch's DataLoader is not used, for four reasons. It forks the rank, which is not safe (see ``forking``), or runs the
script again in every worker. It uses /dev/shm, whose size is limited. It cannot cancel requests of abandoned steps.
It may notice a dead worker only after five seconds, when the agent already reports a hang.
"""

import contextlib
import itertools
import os
import socket
import sys
from typing import Any

import torch

from dltrain.data.feeding import serialization
from dltrain.data.feeding.forking import Child, WorkerForker
from dltrain.data.feeding.worker import Head, Maker, MessageKind, RemoteError
from dltrain.host import cgroup
from dltrain.protocol.errors import SampleError, WorkerLostError

_SIGKILL = 9
_EXIT_STATUS_S = 2.0
"""Seconds to wait for the exit status of a worker that has closed its connection."""


class Workers:
    """``count`` worker processes of this rank, each of which loads every ``count``-th requested batch.

    Different threads may call ``ask`` and ``get``.
    """

    def __init__(
        self, source: Maker, count: int, room_nbytes: int | None = None, *, in_main_memory: bool = False
    ) -> None:
        """Start the processes without waiting for them.

        ``source``: the dataset and how to make batches of it; each worker gets a copy. ``room_nbytes``: memory limit
        for all copies of the dataset, in bytes; None: no limit. ``in_main_memory``: True if the dataset must have no
        tensor on a GPU, which each worker would open too. Raise ValueError if it has one, or if the dataset cannot be
        pickled, MemoryError if its copies exceed the limit, and OSError if a process cannot be started.
        """
        self._tickets = itertools.count(1)
        self._closing = False
        self._oom_kills = cgroup.oom_kills()
        # once for all workers; before any process, because it may fail
        packed = _packed(source, room_nbytes, count, in_main_memory=in_main_memory)
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
        """Return True if all workers have started, so that they can load batches. Do not wait.

        Raise MemoryError or WorkerLostError if a worker failed to start.
        """
        for worker in self._workers:
            while not worker.ready and (serialization.wait_for(worker.connection, within_s=0) or worker.child.ended(0)):
                self._take(worker)
        return all(worker.ready for worker in self._workers)

    def ask(self, request: Any, number: int | None = None) -> int:
        """Request a batch from worker ``number``, by default the next one. Return the ticket for it.

        The ticket is a number that ``get`` takes to return this batch.
        """
        ticket = next(self._tickets)
        while number is not None and ticket % len(self._workers) != number:
            ticket = next(self._tickets)
        with contextlib.suppress(ConnectionError):  # ``get`` reports how the worker ended
            serialization.send(self._of(ticket).connection, Head(MessageKind.MAKE, ticket).packed(), request)
        return ticket

    def get(self, ticket: int) -> tuple[Any, float]:
        """Return the batch for ``ticket``, and the seconds that a worker spent on it. A cancelled batch is None.

        The tickets of a worker must be used in the order in which ``ask`` returned them, but some may be skipped. Raise
        SampleError if the user's dataset failed, and MemoryError or WorkerLostError if the worker failed.
        """
        worker = self._of(ticket)
        while True:
            head, content = self._take(worker)
            if head.ticket == ticket and head.kind == MessageKind.FAILED:
                raise _error(head, content)
            if head.ticket == ticket:
                return content, head.spent_s

    def drop(self) -> None:
        """Cancel all requests whose loading has not begun. ``get`` returns None for the batch of such a request."""
        ticket = next(self._tickets)
        for worker in self._workers:
            with contextlib.suppress(ConnectionError):
                serialization.send(worker.connection, Head(MessageKind.FORGET, ticket).packed(), None)

    def wake(self) -> None:
        """Close the connections, so that a thread that waits in ``get`` gets an error. Call this before ``close``.

        Otherwise, the thread could not end, and the caller could not wait for it.
        """
        self._closing = True
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill the workers, whether or not they are loading batches, and close the connections to them."""
        for worker in self._workers:
            worker.close()
        self._forker.close()

    def _of(self, ticket: int) -> "_Worker":
        return self._workers[ticket % len(self._workers)]

    def _take(self, worker: "_Worker") -> tuple[Head, Any]:
        """Wait for the next message of a worker, and return its head and content.

        Raise the error that the worker reports if it could not receive the dataset, and MemoryError or WorkerLostError
        if the worker has ended.
        """
        # Also wait for the end of the process. The connection alone does not show it if another process, forked at the
        # same moment, has inherited the worker's socket.
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
        if head.kind == MessageKind.READY:
            worker.ready = True
        if head.kind == MessageKind.FAILED and not head.ticket:
            raise _error(head, content)
        return head, content

    def _lost(self, worker: "_Worker") -> Exception:
        number = self._workers.index(worker)
        exit_ = None if self._closing else worker.child.ended(_EXIT_STATUS_S)
        kills = cgroup.oom_kills()
        if exit_ is not None and exit_.signal == _SIGKILL and kills is not None and kills > (self._oom_kills or 0):
            return MemoryError(
                f"data worker {number} of {self.count} was killed by the kernel for lack of memory. Raise the memory "
                "limit, or use fewer workers or a smaller prefetch"
            )
        how = "ended together with its zygote" if exit_ is None else f"ended with {exit_}"
        return WorkerLostError(f"data worker {number} of {self.count} {how} while it loaded a batch. See the log")


class _Worker:
    """The rank's side of one worker process."""

    def __init__(self, zygote: socket.socket, packed: int) -> None:
        """Start the process. ``zygote``: connection to the zygote. ``packed``: descriptor of the serialized Maker."""
        self.ready = False
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.child = Child(zygote, ("-m", "dltrain.data.feeding.worker"), theirs.fileno())
        settings = sys.path, torch.get_default_dtype()
        serialization.send(self.connection, Head(MessageKind.HELLO).packed(), settings)
        socket.send_fds(self.connection, [Head(MessageKind.HELLO).packed()], [packed])

    def close(self) -> None:
        self.connection.close()
        self.child.close()


def _packed(source: Maker, room_nbytes: int | None, count: int, *, in_main_memory: bool) -> int:
    try:
        return serialization.pack(source, room_nbytes, count, in_main_memory=in_main_memory)
    except serialization.DeviceTensorError as error:
        raise ValueError(
            f"dataset: {error}, which each worker would open too. Move its tensors to the CPU: batches are copied to "
            "the rank's device"
        ) from error
    except MemoryError as error:
        raise MemoryError(f"the dataset's copies for data-loading workers do not fit into memory: {error}") from error
    except OSError:
        raise
    except Exception as error:  # the user's classes may raise anything
        raise ValueError(
            f"dataset: cannot be sent to worker processes: {type(error).__name__}: {error}. Open files and connections "
            "in __getitem__ instead, or pass workers=0 to t.loader"
        ) from error


class _InWorkerError(Exception):
    """The traceback of a worker process as text. It becomes the cause of the error that the rank raises."""


def _error(head: Head, remote: RemoteError) -> Exception:
    if remote.memory:
        return MemoryError(f"in a data worker: {remote.text}")
    if not head.ticket:
        error: Exception = WorkerLostError(f"data worker: the dataset could not be transferred: {remote.text}")
    else:
        error = SampleError(remote.text)
    error.__cause__ = _InWorkerError(f"in a data worker:\n{remote.trace}")
    return error
