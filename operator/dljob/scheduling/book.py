"""The book of reservations: which job reserves what, and since when.

A plan that the operator has just accepted counts at once, before the API server stores it. From then on, reservations
are derived from stored objects, so that another replica that becomes the leader derives the same ones.
"""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace

from dljob.scheduling.reservations import Reservation

Key = tuple[str, str]
"""Namespace and name of a job."""
PATIENCE_S = 60.0
"""Seconds after which a reservation ends if no pod of the job was created or placed meanwhile.

The StatefulSet controller and the scheduler start hundreds of pods in this time. Without the limit, a job whose pods
never come (a full quota, a node selector that no node has) would block these devices for everybody.
"""


@dataclass(frozen=True, slots=True)
class _Entry:
    reservations: tuple[Reservation, ...]
    state: Hashable
    since_s: float
    expired: bool = False


class ReservationBook:
    """All reservations, by job: those of accepted plans that are not stored yet, and those of stored objects.

    A reservation expires ``patience_s`` seconds after it was made or renewed, or after the last progress of its job
    (``derive``).
    ``now_s`` and other times are seconds of one clock that the caller chooses. The book reads no clock.
    """

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._accepted: dict[Key, _Entry] = {}
        """Reservations of plans that are accepted but not stored yet."""
        self._stored: dict[Key, _Entry] = {}
        self.version = 0
        """It increases whenever the reservations in force change, also when one expires.

        Callers compare it with an earlier value to see if a result that depends on reservations is still valid.
        """

    def accept(self, key: Key, reservations: tuple[Reservation, ...], now_s: float) -> None:
        """Reserve the resources of a new plan that is not stored yet, and start the time limit of this reservation.

        It replaces the reservation of an earlier plan of the job that was not stored either. If ``reservations`` is
        empty, only remove that earlier reservation.
        """
        self._put(self._accepted, key, _Entry(reservations, None, now_s) if reservations else None)

    def adjust(self, key: Key, reservations: tuple[Reservation, ...], now_s: float) -> None:
        """Update what a plan that is not stored yet reserves.

        If the plan reserves nothing yet, or something else, store ``reservations`` and restart the time limit. Do
        nothing if it reserves the same already, or if its reservation has expired.
        """
        old = self._accepted.get(key)
        if old is None or (not old.expired and old.reservations != reservations):
            self.accept(key, reservations, now_s)

    def release(self, key: Key) -> None:
        """End the reservation made by ``accept``. Call this once the job's plan has been stored, or has been refused.

        Reservations derived from the job's stored objects remain.
        """
        self._put(self._accepted, key, None)

    def accepted(self, key: Key) -> bool:
        """Return True if a plan of the job that is not stored yet reserves something, and this has not expired."""
        entry = self._accepted.get(key)
        return entry is not None and not entry.expired

    def ageing(self, now_s: float) -> list[Key]:
        """Return the jobs with a plan that is not stored yet whose reservation has used up half of its time limit.

        Reservations that have expired do not count.
        """
        return [
            key
            for key, entry in self._accepted.items()
            if not entry.expired and now_s - entry.since_s >= self._patience_s / 2
        ]

    def renew(self, key: Key, now_s: float) -> None:
        """Restart the time limit of what a plan reserves that is not stored yet. Do nothing if it has expired."""
        entry = self._accepted.get(key)
        if entry is not None and not entry.expired:
            self._accepted[key] = replace(entry, since_s=now_s)

    def derive(self, key: Key, state: Hashable, reservations: tuple[Reservation, ...], now_s: float) -> None:
        """Set what the stored objects of a job reserve. Empty ``reservations``: nothing any more.

        ``state``: a value that changes when the job makes progress, for example when a pod is placed. A new state
        restarts the time limit of the reservations. With an equal state, the time limit goes on, and an expired
        reservation stays expired.
        """
        old = self._stored.get(key)
        if not reservations:
            self._put(self._stored, key, None)
        elif old is None or old.state != state:
            self._put(self._stored, key, _Entry(reservations, state, now_s))
        elif old.reservations != reservations:
            self._put(self._stored, key, _Entry(reservations, state, old.since_s, old.expired))

    def drop(self, key: Key) -> None:
        """Remove all reservations of a job."""
        self.release(key)
        self._put(self._stored, key, None)

    def clear(self) -> None:
        for key in {*self._accepted, *self._stored}:
            self.drop(key)

    def expire(self, now_s: float) -> None:
        """End the reservations that have reached their time limit (``patience_s`` seconds)."""
        for entries in (self._accepted, self._stored):
            for key, entry in list(entries.items()):
                if not entry.expired and now_s - entry.since_s >= self._patience_s:
                    self._put(entries, key, _Entry(entry.reservations, entry.state, entry.since_s, expired=True))

    def holds(self, key: Key) -> bool:
        """Return True if the job has a reservation that has not expired."""
        return any(key in entries and not entries[key].expired for entries in (self._accepted, self._stored))

    def reserved(self, key: Key) -> tuple[Reservation, ...]:
        """Return the reservations of one job that have not expired; empty if there are none.

        Return those of its plan that is not stored yet, or else those of its stored objects.
        """
        return next((_counting(each[key]) for each in (self._accepted, self._stored) if _counting(each.get(key))), ())

    def current(
        self, without: Key | None = None, namespace: str | None = None, ended: Collection[Key] = ()
    ) -> tuple[Reservation, ...]:
        """Return the reservations that have not expired, of all jobs except ``without`` and those in ``ended``.

        ``namespace``: return only those of jobs in this namespace; None: in all namespaces. If a job has a plan that is
        not stored yet, the reservations of this plan count instead of those of its stored plan.
        """
        entries = {**self._stored, **{key: entry for key, entry in self._accepted.items() if not entry.expired}}
        return tuple(
            reservation
            for key, entry in sorted(entries.items())
            if key != without and key not in ended and namespace in (None, key[0]) and not entry.expired
            for reservation in entry.reservations
        )

    def _put(self, entries: dict[Key, _Entry], key: Key, entry: _Entry | None) -> None:
        old = entries.get(key)
        if entry is None:
            entries.pop(key, None)
        else:
            entries[key] = entry
        if _counting(old) != _counting(entry):
            self.version += 1


def _counting(entry: _Entry | None) -> tuple[Reservation, ...]:
    return entry.reservations if entry is not None and not entry.expired else ()
