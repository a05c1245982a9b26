"""How long a job may wait while others overtake it."""

from collections.abc import Sequence

from dljob.scheduling.assignment.types import Option

PATIENCE = 2.0
"""A waiting job is overdue after this multiple of the seconds that it would take on an empty cluster."""
MIN_WAIT_S = 900.0
"""Seconds before which no waiting job is overdue, so that very short jobs do not lead to a queue without an order."""


def is_overdue(waited_s: float, options: Sequence[Option]) -> bool:
    """Return True if a job with these options has waited ``waited_s`` seconds, and must not be overtaken any longer."""
    fastest_s = min((option.seconds for option in options), default=0.0)
    return waited_s >= max(MIN_WAIT_S, PATIENCE * fastest_s)
