"""Waiting for MPI without using CPU time that ranks need for computing.

MPI's own waits poll at full speed. Under a CPU quota, this takes CPU time from the rank's own computing, and with more
ranks than cores, from other ranks. If messages arrive over sockets, the kernel can wake the process. If messages
arrive in shared memory, it cannot, so this module polls at increasing intervals.
"""

import ctypes
import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_SPIN_S = 50e-6
"""Seconds of continuous polling at the beginning of a wait.

They are longer than a message within a machine takes, and shorter than the scheduler's time slice.
"""
_LONGEST_SLEEP_S = 1e-3
LONGEST_LISTEN_S = 10e-3
"""Maximum seconds to listen on sockets. The limit bounds the delay of events that no socket shows, such as a lost
peer."""
_MAX_WAKEUPS = 256
"""Number of wake-ups without a complete message after which a wait no longer uses sockets. The packets of one segment
cause far fewer wake-ups."""
_PR_SET_TIMERSLACK = 29
_descriptors: list[int] = []
_all_wake = False


def reduce_timer_slack() -> None:
    """Set this thread's timer slack to 1 µs. Linux's default of 50 µs is as long as a small message takes."""
    with suppress(AttributeError, OSError):  # the libc of another system
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)


def event_queues() -> set[int]:
    """Return this process's epoll descriptors, which are readable while one of their sockets is ready."""
    found: set[int] = set()
    with suppress(OSError):  # a system without /proc
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                if link.readlink().name == "anon_inode:[eventpoll]":
                    found.add(int(link.name))
    return found


def listen(descriptors: Iterable[int], *, all_wake: bool) -> None:
    """From now on, let ``Backoff.pause`` return when one of ``descriptors`` is readable.

    ``descriptors``: MPI's epoll descriptors, which cover the sockets of this rank's peers. ``all_wake``: True if
    the messages of every peer arrive over sockets.
    """
    global _all_wake
    _descriptors[:] = sorted(number for number in descriptors if number < 1024)  # the limit of select(2)
    _all_wake = all_wake and bool(_descriptors)


class Backoff:
    """Determine the pauses between the polls of one wait: none at first, then increasing pauses.

    If every message arrives over a socket, ``pause`` listens for three times the time waited so far, at most 10 ms. If
    messages can arrive in shared memory, ``pause`` sleeps for a tenth of the time waited so far, at most 1 ms. A
    message is then noticed at most 10 % late, and the CPU is idle for 90 % of the wait.

    A test of another MPI request may read the awaited message from its socket, so that this socket does not wake the
    rank. Callers must therefore test the awaited request last (see ``complete``). If that is impossible, they must test
    it again before a pause that ``listens``.
    """

    def __init__(self) -> None:
        self.progressed()

    def progressed(self) -> None:
        """Restart with continuous polling, because a message has arrived and the next one may follow soon."""
        self._began = time.perf_counter()
        self._wakeups = 0

    @property
    def waited_s(self) -> float:
        """Return the seconds since ``progressed`` was called last or the wait began."""
        return time.perf_counter() - self._began

    @property
    def listens(self) -> bool:
        """Return True if the next ``pause`` would end as soon as a message arrives, because all messages use sockets.

        Return False if messages can arrive in shared memory, or while ``pause`` would return at once.
        """
        return _all_wake and self.waited_s >= _SPIN_S

    def pause(self, longest_s: float = LONGEST_LISTEN_S) -> None:
        """Pause before the next poll, for at most ``longest_s`` seconds. A message on a socket ends the pause early.

        ``longest_s`` applies only if all messages arrive over sockets. A caller that may miss a wake-up passes a small
        value.
        """
        waited = self.waited_s
        if waited < _SPIN_S:
            os.sched_yield()
        elif _descriptors and self._wakeups < _MAX_WAKEUPS:
            timeout = min(3 * waited, longest_s) if _all_wake else min(waited / 10, _LONGEST_SLEEP_S)
            self._wakeups += bool(select.select(_descriptors, (), (), timeout)[0])
        else:
            time.sleep(min(waited / 10, _LONGEST_SLEEP_S))


def complete(requests: Sequence[Any]) -> bool:
    """Return True if all MPI ``requests``, also persistent ones, are complete.

    Requests are tested one by one, because MPI's test of one request checks it again after reading messages. The first
    incomplete request ends this call, so a later message for it wakes the rank. MPI's tests of several requests check
    first and read messages afterwards, so a message that they read would wait for the next test.
    """
    return all(request.Test() for request in requests)


def wait_until(done: Callable[[], bool]) -> None:
    """Call ``done`` repeatedly until it returns True, with increasing pauses in which the CPU is free."""
    backoff = Backoff()
    while not (done() or (backoff.listens and done())):
        backoff.pause()
