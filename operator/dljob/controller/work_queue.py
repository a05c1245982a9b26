"""A queue of keys for several workers. It merges duplicates and supports delays and exponential back-off.

Two workers never process the same key at the same time: a key that is added while a worker processes it is queued
again when that worker is done. A key that is already in the queue is not added again. If a key is added with several
delays, it is due after the one that ends first. Urgent keys come first. While other keys are ready too, at least one of
``URGENT_IN_A_ROW`` consecutive keys is not urgent. While no worker runs, ``pause`` keeps the queue from growing. Use a
queue in one event loop only.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K")

BACKOFF_FIRST_S = 0.2
MAX_BACKOFF_S = 120.0
URGENT_IN_A_ROW = 8


class WorkQueue(Generic[K]):
    def __init__(self, urgent: Callable[[K], bool] = lambda key: False) -> None:
        """``urgent``: returns True for keys that come before others that are ready.

        At least one of ``URGENT_IN_A_ROW`` consecutive keys is not urgent, if there are such keys.
        """
        self._urgent = urgent
        self._first: deque[K] = deque()
        """Urgent keys that are ready."""
        self._ready: deque[K] = deque()
        self._in_a_row = 0
        """Number of urgent keys that workers have taken since the last key that is not urgent."""
        self._waiting: set[K] = set()
        """Keys that are ready, and keys that were added while a worker processed them."""
        self._busy: dict[K, float] = {}
        """Keys that a worker processes, with the time of the event loop when it began."""
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._processed: set[K] = set()
        """Keys that workers have taken and not forgotten. Workers may keep something for each of them."""
        self._paused = False
        self._wakeup = asyncio.Event()

    def __len__(self) -> int:
        return len(self._first) + len(self._ready)

    def stuck(self, limit_s: float) -> str | None:
        """Return a message if a worker has processed the same key for longer than ``limit_s`` seconds, or None.

        The liveness probe calls this to restart an operator that hangs.
        """
        busy = list(self._busy.items())  # A copy, because the thread of the probes asks while workers go on.
        if not busy:
            return None
        key, began = min(busy, key=lambda item: item[1])
        busy_s = asyncio.get_running_loop().time() - began
        return f"{key} has been processed for {busy_s:.0f} s" if busy_s > limit_s else None

    def pause(self) -> None:
        """Drop all keys, and ignore those that are added until ``resume`` is called."""
        self._paused = True
        for timer in self._timers.values():
            timer.cancel()
        self._first.clear()
        self._ready.clear()
        self._waiting.clear()
        self._timers.clear()
        self._failures.clear()

    def resume(self, keys: Iterable[K]) -> None:
        """Accept keys again after ``pause``, and add ``keys``.

        Also add the keys that workers have taken before and not forgotten: their jobs may have been deleted meanwhile.
        """
        self._paused = False
        for key in {**dict.fromkeys(keys), **dict.fromkeys(self._processed)}:
            self.add(key)

    def add(self, key: K) -> None:
        if self._paused:
            return
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._waiting:
            return
        self._waiting.add(key)
        if key not in self._busy:
            self._make_ready(key)

    def _make_ready(self, key: K) -> None:
        (self._first if self._urgent(key) else self._ready).append(key)
        self._wakeup.set()

    def add_after(self, key: K, delay_s: float) -> None:
        """Add the key after ``delay_s`` seconds, unless it is in the queue already or is due earlier."""
        if self._paused:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, delay_s)
        timer = self._timers.get(key)
        if key in self._waiting or (timer is not None and timer.when() <= due):
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._due, key)

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def get(self) -> K:
        """Wait for the next key and return it. No worker gets the same key again before ``done`` is called for it.

        Other tasks always run before this returns. Otherwise, a worker that processes many keys without I/O, such as
        those of deleted jobs, would block the event loop.
        """
        await asyncio.sleep(0)
        while not (self._first or self._ready):
            self._wakeup.clear()
            await self._wakeup.wait()
        urgent = self._first and (not self._ready or self._in_a_row < URGENT_IN_A_ROW - 1)
        self._in_a_row = self._in_a_row + 1 if urgent else 0
        key = (self._first if urgent else self._ready).popleft()
        self._waiting.discard(key)
        self._busy[key] = asyncio.get_running_loop().time()
        self._processed.add(key)
        return key

    def done(self, key: K) -> None:
        self._busy.pop(key, None)
        if key in self._waiting:
            self._make_ready(key)

    def failed(self, key: K) -> float:
        """Add the key again after a delay that doubles with each consecutive failure. Return the delay in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay_s = min(MAX_BACKOFF_S, BACKOFF_FIRST_S * 2.0 ** min(failures, 32))
        self.add_after(key, delay_s)
        return delay_s

    def succeeded(self, key: K) -> None:
        self._failures.pop(key, None)

    def forget(self, key: K) -> None:
        """Drop the failure count and the delayed addition of a key whose job no longer exists."""
        self._failures.pop(key, None)
        self._processed.discard(key)
        if timer := self._timers.pop(key, None):
            timer.cancel()
