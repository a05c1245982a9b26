"""Count the tries to measure each subject, and let failed requests pause."""

from collections.abc import Callable, Collection, Hashable
from datetime import datetime, timedelta

from dljob.reconcile.probes import MAX_STARTS, Starts, Subject

PAUSE_FIRST_S, MAX_PAUSE_S = 10.0, 600.0
"""Seconds after which a failed request is sent again: they double with each failure in a row, up to the maximum."""


class Tries:
    """The tries to measure each subject since its last measurement, and the time of the last one."""

    def __init__(self) -> None:
        self._starts: dict[Subject, tuple[int, datetime]] = {}

    def begin(self, subject: Subject, now: datetime) -> None:
        self._starts[subject] = (self._starts.get(subject, (0, now))[0] + 1, now)

    def withdraw(self, subject: Subject, before: tuple[int, datetime] | None) -> None:
        """Undo the last ``begin``. ``before``: what ``of`` returned before it."""
        if before is None:
            self._starts.pop(subject, None)
        else:
            self._starts[subject] = before

    def of(self, subject: Subject) -> tuple[int, datetime] | None:
        return self._starts.get(subject)

    def answered_late(self, subject: Subject, began: datetime) -> None:
        """Count a start that was withdrawn because its request got no answer. Its pod exists nevertheless."""
        if (before := self._starts.get(subject)) is not None:
            self._starts[subject] = (before[0] + 1, began)

    def found(self, subject: Subject, began: datetime) -> None:
        """Count the pod of a former leader as the first try, unless there were tries."""
        self._starts.setdefault(subject, (1, began))

    def gave_way(self, subject: Subject) -> None:
        """Let the last try not count."""
        if (before := self._starts.get(subject)) is not None:
            self._starts[subject] = (max(before[0] - 1, 0), before[1])

    def restart(self, needs_measuring: Callable[[Subject], bool]) -> None:
        """Count the tries anew of each subject that needs no measurement. The time of the last try stays."""
        for subject, (_, last) in self._starts.items():
            if not needs_measuring(subject):
                self._starts[subject] = (0, last)

    def left(self, subject: Subject) -> int:
        """Return how many more tries there are."""
        return MAX_STARTS - self._starts.get(subject, (1, None))[0]

    def counts(self, now: datetime) -> dict[Subject, Starts]:
        return {subject: Starts(count, (now - last).total_seconds()) for subject, (count, last) in self._starts.items()}


class Pauses:
    """When failed requests may be sent again."""

    def __init__(self) -> None:
        self._paused: dict[Hashable, tuple[int, datetime]] = {}
        """What the request is for → failures in a row, and when to send the next one."""

    def fail(self, key: Hashable, now: datetime) -> None:
        failures, _ = self._paused.get(key, (0, now))
        pause_s = min(PAUSE_FIRST_S * 2.0 ** min(failures, 32), MAX_PAUSE_S)
        self._paused[key] = failures + 1, now + timedelta(seconds=pause_s)

    def keep(self, wanted: Collection[Hashable]) -> None:
        """Forget the failures of requests that are no longer wanted."""
        self._paused = {key: each for key, each in self._paused.items() if key in wanted}

    def over(self, key: Hashable, now: datetime) -> bool:
        return now >= self._paused.get(key, (0, now))[1]
