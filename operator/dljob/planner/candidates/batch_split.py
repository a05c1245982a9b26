"""The split: how many samples each rank gets, so that the slowest rank is done as early as possible.

Exact over whole numbers for any nondecreasing times: a finishing time T is possible if and only if the batches that
the ranks can do by T, added up, reach the global batch, and that sum never falls with T; so bisection over T finds
the optimum. Ranks of one kind are taken together, so the cost does not depend on how many there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dljob.perf.fit.curve import Curve


@dataclass(frozen=True)
class Kind:
    """``ranks`` equal ranks: their time over batch, and the most samples that fit in memory."""

    curve: Curve
    ranks: int
    largest_batch: int


def _by(kind: Kind, seconds: float) -> int:
    """Most samples a rank of the kind gets when it must be done in ``seconds``: at least 1, every worker has one."""
    return max(1, min(kind.largest_batch, kind.curve.whole_samples(seconds)))


def split(kinds: Sequence[Kind], batch: int) -> list[list[int]] | None:
    """Samples of each rank, by kind, largest first; they sum to ``batch`` and the slowest rank is as fast as can be.

    None when memory does not hold the batch or there are more ranks than samples.
    """
    if sum(k.ranks for k in kinds) > batch or any(k.largest_batch < 1 for k in kinds):
        return None
    if sum(k.ranks * k.largest_batch for k in kinds) < batch:
        return None
    if sum(k.ranks for k in kinds) == batch:
        return [[1] * k.ranks for k in kinds]
    low = 0.0
    high = max(k.curve.seconds(min(batch, k.largest_batch)) for k in kinds)
    while True:
        middle = (low + high) / 2
        if not low < middle < high:  # neighbours: nothing lies between two floating-point numbers
            break
        if sum(k.ranks * _by(k, middle) for k in kinds) >= batch:
            high = middle
        else:
            low = middle
    each = [_by(k, high) for k in kinds]
    totals = [k.ranks * b for k, b in zip(kinds, each, strict=True)]
    surplus = sum(totals) - batch
    # Whatever is taken away leaves the optimum. It comes from the kinds that only just make it, in proportion to what
    # each got at the last moment: more than one sample each when a time is flat, as on a GPU that waits for its host.
    spare = [t - k.ranks * _by(k, low) for t, k in zip(totals, kinds, strict=True)]
    taken = [surplus * s // sum(spare) for s in spare] if surplus else [0] * len(kinds)
    for i in sorted(range(len(kinds)), key=lambda i: kinds[i].ranks):
        taken[i] += (more := min(spare[i] - taken[i], surplus - sum(taken)))
        assert more >= 0, "what is spare covers the surplus"
    totals = [t - n for t, n in zip(totals, taken, strict=True)]
    return [even(total, kind.ranks) for total, kind in zip(totals, kinds, strict=True)]


def even(batch: int, ranks: int) -> list[int]:
    """``batch`` in ``ranks`` parts that differ by at most one, larger ones first."""
    return [batch // ranks + (i < batch % ranks) for i in range(ranks)]


def even_split(kinds: Sequence[Kind], batch: int) -> list[list[int]] | None:
    """The same share for every rank, whatever its speed (one more for the first ones if it does not divide)."""
    shares = even(batch, sum(k.ranks for k in kinds))
    result, at = [], 0
    for kind in kinds:
        result.append(shares[at : at + kind.ranks])
        at += kind.ranks
    fits = all(part[-1] >= 1 and part[0] <= kind.largest_batch for part, kind in zip(result, kinds, strict=True))
    return result if fits else None
