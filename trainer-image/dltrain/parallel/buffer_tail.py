"""Numbers at the end (tail) of the gradient buffer, which ranks sum together with the gradients.

With these numbers, ranks exchange losses and times and agree on the actions after a step, without an extra message.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Shared(NamedTuple):
    """A rank's values in the tail, which are summed over ranks at every step. ``stop``, ``save``, ``keep``: requests.

    In the tail, the times of each rank follow these values.
    """

    loss: float = 0.0
    """This rank's mean loss times its weight."""
    logged: float = 0.0
    """Weight of the samples whose loss was logged."""
    stop: float = 0.0
    save: float = 0.0
    keep: float = 0.0
    square: float = 0.0
    """Squared norm of this rank's part of the previous step's gradient. 0 if every rank has the whole gradient."""
    within: float = 0.0
    """Weight times squared norm of this rank's local gradient, for AdaScale and the gradient noise scale."""
    weighed: float = 0.0
    """Number of ranks that called ``weigh``."""
    weight: float = 0.0
    """Sum of the weights passed to ``weigh``, such as numbers of tokens."""


class Agreed(NamedTuple):
    """The shared values, summed over ranks, and lists of each rank's times in the previous step, in seconds."""

    shared: Shared
    computed: list[float]
    exposed: list[float]
    demanded: list[float]


def length(ranks: int) -> int:
    """Return the number of values in the tail for a number of ranks."""
    return len(Shared()) + 3 * ranks


def pack(
    shared: Shared, rank: int, ranks: int, compute_s: float, exposed_s: float, demanded_s: float = 0.0
) -> list[float]:
    """Return this rank's values for the tail. The times are those of this rank's previous step, in seconds.

    ``compute_s``: computing. ``exposed_s``: communication that did not overlap with computing. ``demanded_s``: the time
    in which the rank gets the CPU time that it needs for a step (see ``stopwatch.Budget``), or 0 if unknown.
    """
    by_rank = [0.0] * (3 * ranks)
    by_rank[rank::ranks] = compute_s, exposed_s, demanded_s
    return [*shared, *by_rank]


def unpack(total: Sequence[float], ranks: int) -> Agreed:
    """Split the tail, summed over ranks, into its fields."""
    own, times = total[: len(Shared())], list(total[len(Shared()) :])
    return Agreed(Shared(*own), *(times[i * ranks : (i + 1) * ranks] for i in range(3)))


WEIGHED = Shared._fields.index("weighed")
WEIGHT = Shared._fields.index("weight")
WITHIN = Shared._fields.index("within")
