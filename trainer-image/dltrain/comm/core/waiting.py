"""Waiting without burning a CPU that another rank needs.

MPI's own waits poll at full speed. Under a CPU quota that is worse than useless: the time a waiting rank burns is
taken from its own computing, and with more ranks than cores from the others'. Where messages come over sockets the
kernel can wake us when one is there; in shared memory nothing can, and all that is left is to look ever less often.
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
"""Longer than a message between neighbours on one machine takes, shorter than a scheduler's slice."""
_LONGEST_SLEEP_S = 1e-3
LONGEST_LISTEN_S = 10e-3
"""Whoever listens is woken in time; this is for what rings no bell, such as word that a peer died."""
_MOST_RINGS = 256
"""In a row without a message complete, before a bell counts as stuck. A segment comes in far fewer packets."""
_PR_SET_TIMERSLACK = 29
_bells: list[int] = []
_all_ring = False


def reduce_timer_slack() -> None:
    """Let this thread sleep to within 1 µs: Linux adds 50 µs by default, as long as a small message takes."""
    with suppress(AttributeError, OSError):  # another system's libc
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)


def event_queues() -> set[int]:
    """This process's epoll descriptors. An epoll descriptor is readable while one of the sockets in it is ready."""
    found: set[int] = set()
    with suppress(OSError):  # a system without /proc
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if link.readlink().name == "anon_inode:[eventpoll]":
                    found.add(int(link.name))
    return found


def listen(bells: Iterable[int], *, all_ring: bool) -> None:
    """From now on wake up when one of these descriptors is readable: MPI's queues of the sockets to its peers.

    ``all_ring``: whether every peer's messages come over sockets.
    """
    global _all_ring
    _bells[:] = sorted(bell for bell in bells if bell < 1024)  # select(2) takes no others
    _all_ring = all_ring and bool(_bells)


class Backoff:
    """Polls eagerly at first, then ever less often.

    Where every message rings it listens three times as long as it has waited so far, 10 ms at most. Where messages come
    through shared memory it sleeps a tenth of the time waited so far, 1 ms at most: 10 % late, 90 % idle.

    A message may be taken from its socket while another one is tested, and then rings no more: what is awaited is to be
    tested last (``complete``), and where that cannot be, look once more before a pause that ``listens``.
    """

    def __init__(self) -> None:
        self.progressed()

    def progressed(self) -> None:
        """Something arrived: eager again."""
        self._began = time.perf_counter()
        self._rings = 0

    @property
    def waited_s(self) -> float:
        """Since something arrived."""
        return time.perf_counter() - self._began

    @property
    def listens(self) -> bool:
        """Whether ``pause`` would rely on a bell."""
        return _all_ring and self.waited_s >= _SPIN_S

    def pause(self, longest_s: float = LONGEST_LISTEN_S) -> None:
        """``longest_s``: bound of listening, for whoever may have missed a bell."""
        waited = self.waited_s
        if waited < _SPIN_S:
            os.sched_yield()
        elif _bells and self._rings < _MOST_RINGS:
            timeout = min(3 * waited, longest_s) if _all_ring else min(waited / 10, _LONGEST_SLEEP_S)
            self._rings += bool(select.select(_bells, (), (), timeout)[0])
        else:
            time.sleep(min(waited / 10, _LONGEST_SLEEP_S))


def complete(requests: Sequence[Any]) -> bool:
    """Whether all of MPI's ``requests``, also persistent ones, are complete.

    A test of one looks again after it has taken what arrived, and the first that is in vain ends this look: what comes
    for it later rings. MPI's own tests of several look first and take then, silently, what is seen at the next look.
    """
    return all(request.Test() for request in requests)


def wait_until(done: Callable[[], bool]) -> None:
    """Poll ``done`` until it holds."""
    backoff = Backoff()
    while not (done() or (backoff.listens and done())):
        backoff.pause()
