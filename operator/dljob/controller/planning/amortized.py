"""Values over all jobs, whose computation takes long with thousands of jobs."""

from collections.abc import Callable, Hashable
from math import inf
from typing import Generic, TypeVar

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
