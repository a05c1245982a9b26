"""All-reduce time over message size and ranks, from two sizes: alpha, beta and a pipelining term.

A library cuts a message of V bytes in chunks and pipelines them. With the best chunk a pipeline of fixed cost A and
streaming cost B V takes A + B V + 2 sqrt(A B V) (Thakur et al. 2005, minimised over the chunk); libraries overlap part
of it, which leaves

    t(V) = A + B V + 2 k sqrt(A B V),    k = 0.3.

k = 0 is the alpha-beta line. Over ranks B is a bus's: B n / (2 (n - 1)) = c + d / n, from two counts; A is linear in n.
"""

from dataclasses import dataclass

import numpy as np

from dljob.perf.fit.fitting import Floats, checked

OVERLAPPED = 0.3
"""k, and the sizes below: fixed on NCCL over A100, where 0.2 to 0.7 are a tenth off the best; V100 only scored."""
SMALL_PART, LARGE_PART = 1 / 16, 3 / 4
"""Of the largest message of interest, the two sizes to probe."""


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce's time over the message, for ``ranks``."""

    ranks: int
    fixed_s: float
    per_byte_s: float

    def seconds(self, nbytes: Floats | float) -> Floats:
        """Seconds of ``nbytes``."""
        v = np.asarray(nbytes, dtype=float)
        cross = 2 * OVERLAPPED * np.sqrt(self.fixed_s * self.per_byte_s * v)
        return np.asarray(self.fixed_s + self.per_byte_s * v + cross)

    @property
    def bus_s(self) -> float:
        """Seconds a byte and link direction: what is left of ``per_byte_s`` without the 2 (n-1)/n of a ring."""
        return self.per_byte_s * self.ranks / (2 * (self.ranks - 1))


def from_two_sizes(ranks: int, small: tuple[float, float], large: tuple[float, float]) -> AllReduce:
    """The curve through two (bytes, seconds) measurements.

    When the larger message took less than its bytes' share of time at zero latency could explain, latency is 0.
    Raises ValueError for sizes not in order, fewer than 2 ranks, or what is not finite and above 0.
    """
    (v0, t0), (v1, t1) = small, large
    checked("all-reduce (bytes, seconds)", [v0, t0, v1, t1])
    if ranks < 2 or not v0 < v1:
        raise ValueError(f"{ranks} ranks, {v0:g} and {v1:g} bytes: expected 2 ranks or more and the smaller size first")
    if t1 <= t0:  # nothing but latency was measured
        return AllReduce(ranks, t0, 1e-3 * t1 / v1)
    if t1 / v1 >= t0 / v0:
        return AllReduce(ranks, 0.0, t1 / v1)

    def fixed(per_byte_s: float) -> float:
        """A from the small message: a root of A + 2 k sqrt(B v) sqrt(A) + B v - t = 0."""
        middle = OVERLAPPED * np.sqrt(per_byte_s * v0)
        return float((np.sqrt(middle**2 - per_byte_s * v0 + t0) - middle) ** 2)

    low, high = 0.0, min(t0 / v0, t1 / v1)
    for _ in range(100):
        middle = (low + high) / 2
        if float(AllReduce(ranks, fixed(middle), middle).seconds(v1)) > t1:
            high = middle
        else:
            low = middle
    return AllReduce(ranks, fixed(low), low)


def between(few: AllReduce, many: AllReduce, ranks: int) -> AllReduce:
    """The curve of a number of ranks from those of two others on the same kind of link. Exact at both."""
    if not few.ranks < many.ranks or ranks < 2:
        raise ValueError(
            f"{few.ranks} and {many.ranks} ranks known, {ranks} asked: expected two rising counts, 2 or more"
        )
    along = (1 / few.ranks - 1 / ranks) / (1 / few.ranks - 1 / many.ranks)
    bus_s = max(few.bus_s + along * (many.bus_s - few.bus_s), 0.1 * min(few.bus_s, many.bus_s))
    steps = (ranks - few.ranks) / (many.ranks - few.ranks)
    fixed_s = max(few.fixed_s + steps * (many.fixed_s - few.fixed_s), 0.0)
    return AllReduce(ranks, fixed_s, bus_s * 2 * (ranks - 1) / ranks)
