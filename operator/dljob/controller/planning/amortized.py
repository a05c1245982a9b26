"""Values over all jobs, whose computation takes long with thousands of jobs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from math import inf
from typing import Generic, TypeVar
from weakref import ReferenceType, ref

from dljob.job.observed import JobSeen

YIELD_EVERY = 20
"""Number of jobs after which a loop over all jobs lets other tasks run."""
FACTOR = 20.0
"""Minimum time between two computations, in multiples of the time that the last one took: at most 5 % of a core."""

T = TypeVar("T")


class Amortized(Generic[T]):
    """A value that is computed again if what it depends on has changed, but only if that takes little of the time.

    With few jobs, it is therefore always up to date, and with thousands, it may be some seconds old.
    """

    def __init__(self, make: Callable[[], T], clock: Callable[[], float]) -> None:
        self._make, self._clock = make, clock
        self._known: tuple[Hashable, T] | None = None
        self._again_s = -inf

    def of(self, state: Hashable) -> T:
        """Return the value. ``state``: it changes whenever the value may change."""
        began_s = self._clock()
        if self._known is None or (self._known[0] != state and began_s >= self._again_s):
            self._known = state, self._make()
            took_s = self._clock() - began_s
            self._again_s = began_s + (1 + FACTOR) * took_s
        return self._known[1]

    def forget(self) -> None:
        self._known, self._again_s = None, -inf


class OfEachJob(Generic[T]):
    """A value of each job that depends only on its spec and status. It is computed again after each change of these.

    It does not keep earlier versions of the jobs in memory.
    """

    def __init__(self, make: Callable[[JobSeen], T]) -> None:
        self._make = make
        self._known: dict[tuple[str, str], tuple[ReferenceType[JobSeen], T]] = {}

    def of(self, job: JobSeen) -> T:
        known = self._known.get(job.key)
        if known is None or known[0]() is not job:
            known = self._known[job.key] = ref(job), self._make(job)
        return known[1]

    def forget_others(self, keys: Iterable[tuple[str, str]]) -> None:
        """Forget all jobs except those with the given keys."""
        self._known = {key: self._known[key] for key in keys if key in self._known}


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield all items, and let other tasks run after every ``YIELD_EVERY`` of them."""
    for i, item in enumerate(list(items), 1):
        yield item
        if i % YIELD_EVERY == 0:
            await asyncio.sleep(0)
