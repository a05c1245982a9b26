"""Model the all-reduce time over message size and ranks from two sizes, with alpha, beta and a pipelining term.

A library cuts a message of V bytes in chunks and pipelines them. With the best chunk size a pipeline of fixed cost A
and streaming cost B V takes A + B V + 2 sqrt(A B V) (Thakur et al. 2005, minimised over the chunk size). Libraries
overlap part of it:

    t(V) = A + B V + 2 k sqrt(A B V),    k = 0.3.

k = 0 is the alpha-beta line. Over n ranks, the inverse bus bandwidth B n / (2 (n - 1)) = c + d / n is fitted to two
counts, and A is linear in n.
"""

from dataclasses import dataclass

import numpy as np

from dljob.perf.fit.fitting import Floats, checked

OVERLAPPED = 0.3
"""k. This and the sizes below were fitted to NCCL on A100, where 0.2 to 0.7 are within a tenth of the best; V100 was
only scored."""
SMALL_PART, LARGE_PART = 1 / 16, 3 / 4
"""The two sizes to probe, relative to the largest message of interest."""


@dataclass(frozen=True)
class AllReduce:
    """Time of an all-reduce over the message size, for ``ranks``."""

    ranks: int
    fixed_s: float
    per_byte_s: float

    def seconds(self, nbytes: Floats | float) -> Floats:
        """Return the seconds of an all-reduce of ``nbytes``."""
        v = np.asarray(nbytes, dtype=float)
        cross = 2 * OVERLAPPED * np.sqrt(self.fixed_s * self.per_byte_s * v)
        return np.asarray(self.fixed_s + self.per_byte_s * v + cross)

    @property
    def bus_s(self) -> float:
        """Seconds per byte and link direction: ``per_byte_s`` without the factor 2 (n-1)/n of a ring."""
        return self.per_byte_s * self.ranks / (2 * (self.ranks - 1))


def from_two_sizes(ranks: int, small: tuple[float, float], large: tuple[float, float]) -> AllReduce:
    """Return the curve through two (bytes, seconds) measurements.

    Latency is 0 if the time grows at least in proportion to the bytes. Raise ValueError for sizes that are not in
    order, fewer than 2 ranks, or values that are not finite and above 0.
    """
    (v0, t0), (v1, t1) = small, large
    checked("all-reduce (bytes, seconds)", [v0, t0, v1, t1])
    if ranks < 2 or not v0 < v1:
        raise ValueError(f"{ranks} ranks, {v0:g} and {v1:g} bytes: expected 2 ranks or more and the smaller size first")
    if t1 <= t0:  # only latency was measured
        return AllReduce(ranks, t0, 1e-3 * t1 / v1)
    if t1 / v1 >= t0 / v0:
        return AllReduce(ranks, 0.0, t1 / v1)

    def fixed(per_byte_s: float) -> float:
        """Return A from the small message: a root of A + 2 k sqrt(B v) sqrt(A) + B v - t = 0."""
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
    """Return the curve of ``ranks`` from the curves of two other counts on the same kind of link. Exact at both."""
    if not few.ranks < many.ranks or ranks < 2:
        raise ValueError(f"{few.ranks} and {many.ranks} ranks given for {ranks}: expected two rising counts, 2 or more")
    along = (1 / few.ranks - 1 / ranks) / (1 / few.ranks - 1 / many.ranks)
    bus_s = max(few.bus_s + along * (many.bus_s - few.bus_s), 0.1 * min(few.bus_s, many.bus_s))
    steps = (ranks - few.ranks) / (many.ranks - few.ranks)
    fixed_s = max(few.fixed_s + steps * (many.fixed_s - few.fixed_s), 0.0)
    return AllReduce(ranks, fixed_s, bus_s * 2 * (ranks - 1) / ranks)
