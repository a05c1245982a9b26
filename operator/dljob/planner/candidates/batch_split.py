"""Split the global batch into local batch sizes so that the slowest rank finishes as early as possible.

The split is the exact optimum over whole numbers if a rank's time never decreases with its batch. All ranks can finish
by time T if and only if the samples that they can process by T add up to the global batch or more. This sum never
decreases with T, so bisection over T finds the optimum. Equal ranks are handled together, so the running time does not
depend on the number of ranks.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import nextafter

from dlcontract import replica_batches
from dljob.perf.fit.curve import Curve


@dataclass(frozen=True)
class Kind:
    """A set of equal ranks in a plan, which have the same step times and the same memory.

    ``ranks``: number of ranks in the set. The global batch is divided among the ranks of all sets. ``curve``: step time
    of one rank as a function of its local batch size. ``largest_batch``: the largest local batch in samples that fits
    into the memory of one rank.
    """

    curve: Curve
    ranks: int
    largest_batch: int


FEW = 32
"""Number of local batch sizes, over all kinds, at which the bisection no longer halves the interval of times.

If the step times of at most this number are in the interval, the search tries only these times.
"""


def _by(kind: Kind, seconds: float) -> int:
    """Return the largest local batch that fits into the memory of a rank of ``kind`` and takes at most ``seconds``.

    Return at least 1, because every worker must have a sample.
    """
    return max(1, min(kind.largest_batch, kind.curve.whole_samples(seconds)))


def split(kinds: Sequence[Kind], batch: int) -> list[list[int]] | None:
    """Return a list of local batch sizes for each kind, which minimize the time of the slowest rank.

    The sizes add up to ``batch``. A list has a size for each rank of the kind, the larger sizes first. Return None if
    the batch does not fit into memory or if there are more ranks than samples.
    """
    if sum(k.ranks for k in kinds) > batch or any(k.largest_batch < 1 for k in kinds):
        return None
    if sum(k.ranks * k.largest_batch for k in kinds) < batch:
        return None
    if sum(k.ranks for k in kinds) == batch:
        return [[1] * k.ranks for k in kinds]
    if len(kinds) == 1:
        return [even(batch, kinds[0].ranks)]
    low, high = _bracket(kinds, batch)
    each = [_by(k, high) for k in kinds]
    totals = [k.ranks * b for k, b in zip(kinds, each, strict=True)]
    surplus = sum(totals) - batch
    # Remove the surplus samples; this never makes the slowest rank later. Take them from the kinds that can process
    # fewer samples by ``low`` than by ``high``, in proportion to the difference. If a kind's time does not change with
    # the batch, as on a GPU that waits for its host, the difference is more than one sample per rank.
    spare = [t - k.ranks * _by(k, low) for t, k in zip(totals, kinds, strict=True)]
    removed = [surplus * s // sum(spare) for s in spare] if surplus else [0] * len(kinds)
    for i in sorted(range(len(kinds)), key=lambda i: kinds[i].ranks):
        removed[i] += (more := min(spare[i] - removed[i], surplus - sum(removed)))
        assert more >= 0, "the spare samples cover the surplus"
    totals = [t - n for t, n in zip(totals, removed, strict=True)]
    return [even(total, kind.ranks) for total, kind in zip(totals, kinds, strict=True)]


def _bracket(kinds: Sequence[Kind], batch: int) -> tuple[float, float]:
    """Return (low, high): ``high`` is the least seconds in which all ranks together can process ``batch`` samples.

    ``low`` is the next smaller floating-point number. Only step times of whole local batch sizes matter. So the
    bisection over times ends as soon as at most ``FEW`` of them are left in the interval, and a second bisection over
    these follows.
    """
    low, high = 0.0, max(k.curve.seconds(min(batch, k.largest_batch)) for k in kinds)
    fewest, most = [1] * len(kinds), [_by(k, high) for k in kinds]
    while sum(most) - sum(fewest) > FEW:
        middle = (low + high) / 2
        if not low < middle < high:  # ``low`` and ``high`` are neighbouring floating-point numbers
            return low, high
        each = [_by(k, middle) for k in kinds]
        if sum(k.ranks * b for k, b in zip(kinds, each, strict=True)) >= batch:
            high, most = middle, each
        else:
            low, fewest = middle, each
    whole = {k.curve.seconds(n) for k, a, b in zip(kinds, fewest, most, strict=True) for n in range(a, b + 1)}
    times = sorted(t for t in whole if low < t <= high)
    first = bisect_left(times, batch, key=lambda t: sum(k.ranks * _by(k, t) for k in kinds))
    return nextafter(times[first], 0.0), times[first]


def even(batch: int, ranks: int) -> list[int]:
    """Split ``batch`` into ``ranks`` whole numbers that differ by at most one, the larger ones first."""
    return list(replica_batches(batch, ranks))


def even_split(kinds: Sequence[Kind], batch: int) -> list[list[int]] | None:
    """Return a list of local batch sizes for each kind. All ranks get the same size, regardless of their speed.

    If ``batch`` is not divisible by the number of ranks, some of the first ranks get one more sample than the others.

    Return None if a size is below 1 or does not fit into memory.
    """
    shares = even(batch, sum(k.ranks for k in kinds))
    result, at = [], 0
    for kind in kinds:
        result.append(shares[at : at + kind.ranks])
        at += kind.ranks
    fits = all(part[-1] >= 1 and part[0] <= kind.largest_batch for part, kind in zip(result, kinds, strict=True))
    return result if fits else None
