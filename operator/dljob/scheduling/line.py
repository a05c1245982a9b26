"""Lines of waiting jobs in the order of the queue.

Before each plan, the operator looks for the first job in line. To find the place of all jobs for that takes time in
proportion to the square of their number, for example after a takeover by another operator. A ``Line`` finds only the
places of those jobs again that have changed. Jobs of one namespace have the same share of the cluster, which changes
with each plan, but not the order among them. They are therefore sorted without it, and namespaces are merged.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from heapq import heapify, heappop, heapreplace
from typing import Generic, TypeVar

from dljob.scheduling.order import Place, QueuedJob

Key = tuple[str, str]
T = TypeVar("T")
_Entry = tuple[Place, Key, QueuedJob, T]
"""A job, with its place as if its namespace held nothing."""


class Line(Mapping[Key, T], Generic[T]):
    """Waiting jobs. Iteration is in the order in which they were put, and ``in_order`` in that of the queue.

    Use it in one event loop only.
    """

    def __init__(
        self,
        look: Callable[[T], QueuedJob],
        share: Callable[[str], float],
        now: Callable[[], datetime],
        state: Callable[[], Hashable] = lambda: None,
    ) -> None:
        """``look``: returns what the place of a job depends on. ``share``: returns ``QueuedJob.share`` by namespace.

        ``state``: a value that changes if the places of all jobs may have changed for other reasons than time.
        """
        self._look, self._share, self._now, self._state = look, share, now, state
        self._jobs: dict[Key, T] = {}
        self._entries: dict[Key, _Entry[T]] = {}
        self._sorted: dict[str, list[_Entry[T]]] = {}
        """The sorted entries by namespace. A list does not change any more, because an iteration may use it."""
        self._latest: list[tuple[datetime, Key]] = []
        """Latest starts, sorted. After its latest start, a job has another place."""
        self._changed = set[Key]()
        self._sorted_for: tuple[datetime, Hashable] | None = None

    def __getitem__(self, key: Key) -> T:
        return self._jobs[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, key: object) -> bool:
        return key in self._jobs

    def put(self, key: Key, job: T) -> None:
        """Add a job, or replace it."""
        self._jobs.pop(key, None)
        self._jobs[key] = job
        self._changed.add(key)

    def remove(self, key: Key) -> None:
        """Remove a job. Do nothing if it is not in line."""
        if self._jobs.pop(key, None) is not None:
            self._changed.add(key)

    def clear(self) -> None:
        self._changed.update(self._jobs)
        self._jobs.clear()

    def look_again(self, key: Key) -> None:
        """Note that the place of a job may have changed."""
        if key in self._jobs:
            self._changed.add(key)

    def in_order(self, namespace: str | None = None) -> Iterator[tuple[QueuedJob, T]]:
        """Return the jobs as they are now, in the order of the queue. ``namespace``: only those of one namespace.

        Later changes of the line do not change the result.
        """
        self._sort()
        names = self._sorted if namespace is None else self._sorted.keys() & {namespace}
        return _merged([(self._share(name), self._sorted[name]) for name in names])

    def place_of(self, key: Key) -> int:
        """Return the place of a job in the line, from 1. The job must be in it."""
        self._sort()
        mine = _with_share(self._entries[key], self._share(key[0]))
        return 1 + sum(
            bisect_left(entries, mine, key=partial(_with_share, share=self._share(name)))
            for name, entries in self._sorted.items()
        )

    def _sort(self) -> None:
        now, state = self._now(), self._state()
        if self._sorted_for is None or state != self._sorted_for[1] or now < self._sorted_for[0]:
            self._changed.update(self._jobs)
        for latest, key in self._latest:
            if latest > now:
                break
            self._changed.add(key)
        self._sorted_for = now, state
        by_namespace: dict[str, list[Key]] = {}
        for key in self._changed:
            by_namespace.setdefault(key[0], []).append(key)
        self._changed.clear()
        for namespace, keys in by_namespace.items():
            entries = self._replaced(self._sorted.get(namespace, []), keys)
            if entries:
                self._sorted[namespace] = entries
            else:
                self._sorted.pop(namespace, None)

    def _replaced(self, entries: list[_Entry[T]], keys: Collection[Key]) -> list[_Entry[T]]:
        """Return the entries of a namespace after some of its jobs have changed."""
        entries = entries.copy()
        for key in keys:
            old = self._entries.pop(key, None)
            if old is not None:
                del entries[bisect_left(entries, old[:2], key=_without_share)]
                if (latest := old[2].latest_start) is not None:
                    del self._latest[bisect_left(self._latest, (latest, key))]
            if key in self._jobs:
                job = replace(self._look(self._jobs[key]), share=0.0)
                self._entries[key] = new = (job.place, key, job, self._jobs[key])
                insort(entries, new, key=_without_share)
                if job.latest_start is not None:
                    insort(self._latest, (job.latest_start, key))
        return entries


def _with_share(entry: _Entry[T], share: float) -> tuple[Place, Key]:
    return replace(entry[2], share=share).place, entry[1]


def _without_share(entry: _Entry[T]) -> tuple[Place, Key]:
    return entry[:2]


def _merged(lines: list[tuple[float, list[_Entry[T]]]]) -> Iterator[tuple[QueuedJob, T]]:
    """Yield the jobs of several namespaces in the order of the queue. ``lines``: share and entries of each."""

    def head(which: int, at: int) -> tuple[Place, Key, int, int, QueuedJob]:
        share, entries = lines[which]
        job = replace(entries[at][2], share=share)
        return job.place, entries[at][1], which, at, job

    heads = [head(which, 0) for which in range(len(lines))]
    heapify(heads)
    while heads:
        _, _, which, at, job = heads[0]
        if at + 1 < len(lines[which][1]):
            heapreplace(heads, head(which, at + 1))
        else:
            heappop(heads)
        yield job, lines[which][1][at][3]
