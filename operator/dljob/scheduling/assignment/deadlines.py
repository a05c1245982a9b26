"""Decide whether other devices make a job miss its deadline. No job is made late for jobs that are not late."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """Other devices for a job. ``due_s``: the remaining seconds with which it meets its deadline; None: it has none.

    ``before_s``, ``after_s``: its remaining seconds with the devices before and after; infinite if it waits.
    """

    due_s: float | None
    before_s: float
    after_s: float

    @property
    def makes_late(self) -> bool:
        """Return True if the job misses its deadline only because of the change."""
        return self.due_s is not None and self.before_s <= self.due_s < self.after_s

    @property
    def rescues(self) -> bool:
        """Return True if the job meets its deadline only because of the change."""
        return self.due_s is not None and self.after_s <= self.due_s < self.before_s


def spoils_deadline(change: Change, others: Iterable[Change]) -> bool:
    """Return True if a change makes a job late, and none of the ``others``, for which it is, is in time because of it.

    The changes of the others follow from this change: without it, they keep what they have.
    """
    return change.makes_late and not any(other.rescues for other in others)
