"""Numbers at the end (tail) of the gradient buffer, which ranks sum together with the gradients.

With these numbers, ranks exchange losses and times and agree on the actions after a step, without an extra message.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Shared(NamedTuple):
    """Values that a rank appends to its gradient buffer (the tail), so that ranks sum them together with the gradients.

    ``stop``, ``save``, ``keep``: 1 if this rank requests to stop, to save a checkpoint, or to save the training state
    to its pod's memory; else 0. In the tail, the times of each rank follow these values.
    """

    loss: float = 0.0
    """This rank's mean loss times its weight."""
    logged: float = 0.0
    """This rank's weight if it logged a loss, else 0. The sum of ``loss`` over that of ``logged`` is the mean loss."""
    stop: float = 0.0
    save: float = 0.0
    keep: float = 0.0
    square: float = 0.0
    """Squared norm of this rank's part of the previous step's gradient. 0 if every rank has the whole gradient."""
    within: float = 0.0
    """Weight times squared norm of this rank's local gradient, for AdaScale and the gradient noise scale."""
    weighed: float = 0.0
    """1 if this rank called ``t.weigh`` in this step. The sum over ranks is the number of ranks that called it."""
    weight: float = 0.0
    """The weight, such as a number of tokens, that this rank passed to ``t.weigh`` in this step; 0 without a call."""
    copies: float = 0.0
    """1 if this rank can copy the state to its pod's memory. The sum over ranks is the number of such ranks."""
    ending: float = 0.0
    """1 if this rank's stream has only one complete batch left, so that the next step is the last one of the epoch."""


class Agreed(NamedTuple):
    """The content of the tail (the end of the gradient buffer) after it was summed over ranks.

    ``shared``: the values of ``Shared``, summed over ranks. The lists contain one time in seconds for each rank, from
    the rank's previous step: the arguments ``compute_s`` (in ``computed``), ``exposed_s`` (in ``exposed``) and
    ``demanded_s`` (in ``demanded``) that the rank passed to ``pack``.
    """

    shared: Shared
    computed: list[float]
    exposed: list[float]
    demanded: list[float]


def length(ranks: int) -> int:
    """Return the length of the tail (the values after the gradients in the buffer) for a number of ranks."""
    return len(Shared()) + 3 * ranks


def pack(
    shared: Shared, rank: int, ranks: int, compute_s: float, exposed_s: float, demanded_s: float = 0.0
) -> list[float]:
    """Return this rank's values for the tail (the end of the gradient buffer): ``shared``, then the times of all ranks.

    The times of other ranks are 0. The times of this rank are those of its previous step, in seconds. ``compute_s``:
    computing. ``exposed_s``: communication that did not overlap with computing. ``demanded_s``: the estimated duration
    of the step if the rank computed without waiting (see ``stopwatch.Budget``), or 0 if unknown.
    """
    by_rank = [0.0] * (3 * ranks)
    by_rank[rank::ranks] = compute_s, exposed_s, demanded_s
    return [*shared, *by_rank]


def unpack(total: Sequence[float], ranks: int) -> Agreed:
    """Split the tail (the end of the gradient buffer) after the sum over ranks into the sums of the packed values.

    ``total``: the values of the tail. ``ranks``: the number of ranks.
    """
    own, times = total[: len(Shared())], list(total[len(Shared()) :])
    return Agreed(Shared(*own), *(times[i * ranks : (i + 1) * ranks] for i in range(3)))


WEIGHED = Shared._fields.index("weighed")
WEIGHT = Shared._fields.index("weight")
WITHIN = Shared._fields.index("within")
"""Indices in the tail of the fields of ``Shared`` with these names."""
