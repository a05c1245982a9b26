"""Numbers that travel with the gradients, in the tail of their buffer.

Ranks agree by them on what happens after a step, without a message.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Shared(NamedTuple):
    """What ranks share at every step, before the times of each rank; the sum over ranks is what counts."""

    loss: float = 0.0
    """This rank's part of the batch's mean loss."""
    logged: float = 0.0
    """Part of the batch whose loss was logged."""
    stop: float = 0.0
    save: float = 0.0
    keep: float = 0.0
    square: float = 0.0
    """Squared norm of the gradient before, where no rank holds all of it."""
    within: float = 0.0
    """Weight times squared norm of the rank's own gradient; what AdaScale measures."""
    weighed: float = 0.0
    """Ranks that weigh their loss themselves."""
    weight: float = 0.0
    """What they weigh it by, such as tokens."""


class Agreed(NamedTuple):
    """Sums over ranks of what each shared, and the times of the step before by rank."""

    shared: Shared
    computed: list[float]
    exposed: list[float]
    demanded: list[float]


def length(ranks: int) -> int:
    """Numbers in the tail of a world of so many ranks."""
    return len(Shared()) + 3 * ranks


def pack(
    shared: Shared, rank: int, ranks: int, compute_s: float, exposed_s: float, demanded_s: float = 0.0
) -> list[float]:
    """This rank's part of the tail; the times are those of its step before.

    ``demanded_s``: how long its CPU time takes to come by (``measure.Budget``); 0 where that is unknown.
    """
    by_rank = [0.0] * (3 * ranks)
    by_rank[rank::ranks] = compute_s, exposed_s, demanded_s
    return [*shared, *by_rank]


def unpack(total: Sequence[float], ranks: int) -> Agreed:
    """From the summed tail."""
    own, times = total[: len(Shared())], list(total[len(Shared()) :])
    return Agreed(Shared(*own), *(times[i * ranks : (i + 1) * ranks] for i in range(3)))


WEIGHED = Shared._fields.index("weighed")
WEIGHT = Shared._fields.index("weight")
WITHIN = Shared._fields.index("within")
