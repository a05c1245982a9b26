"""One training step: compute, communication, data and waiting put together, with how sure the figure is.

Bulk-synchronous data parallelism: a step ends when the slowest rank has the sum of all gradients.
"""

from dataclasses import dataclass
from math import ceil, exp, hypot

import numpy as np

from dljob.perf.step.communication import Collective, Link, Number, allreduce_s, scatter_gather_s
from dljob.perf.step.synchronization import agreement_s, straggler_factor

BACKWARD_PART = 2 / 3
"""Of a step's computing: the backward pass does twice the arithmetic of the forward pass."""
BUCKET_NBYTES = 4 * 2**20
"""Gradients are summed in buckets of this size, each as soon as backward has filled it; the contract's default."""
OVERLAP_EFFICIENCY = {"cpu": 0.5, "gpu": 0.9}
"""Of the backward pass, what can hide communication. On a CPU both want the same cores, and MPI moves messages only
inside calls; a GPU's copies run beside its arithmetic. Assumptions."""

P90 = 1.2816
"""Standard deviations above the median where nine of ten normal variables lie below."""
SPREAD = {"catalogue": 0.5, "profile": 0.08}
"""Standard deviation of the logarithm of (measured / predicted) compute time: figures of data sheets are within a
factor 2 nine times of ten, measured ones repeat within some per cent."""
LINK_SPREAD = {"catalogue": 0.5, "profile": 0.2}


def buckets(gradient_nbytes: int) -> int:
    return max(1, ceil(gradient_nbytes / BUCKET_NBYTES))


def exposed_s(communication_s: Number, compute_s: Number, parts: int, overlap: Number) -> Number:
    """Communication that is felt: what does not fit beside the backward pass, at least the last bucket's.

    Bucket i of n is ready when i/n of the backward pass is done, so at most (n-1)/n of it hides anything.
    """
    hidden = overlap * BACKWARD_PART * compute_s * (parts - 1) / parts
    return np.maximum(communication_s - hidden, communication_s / parts)


@dataclass(frozen=True)
class Step:
    """Seconds of one step, by part; ``step_s`` is the median, nine of ten lie below ``p90_s``."""

    compute_s: float
    communication_s: float
    data_s: float
    waiting_s: float
    """Stragglers and the agreement that commits the step."""
    spread: float
    """Standard deviation of log(measured / predicted)."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s + self.data_s + self.waiting_s

    @property
    def p90_s(self) -> float:
        return self.step_s * exp(P90 * self.spread)


def step(
    compute_s: float,
    data_s: float,
    collective: Collective,
    gradient_nbytes: int,
    ranks: int,
    link: Link,
    overlap: float,
    compute_spread: float,
    link_spread: float,
    servers: int = 1,
    nodes: int | None = None,
    sharded: bool = False,
) -> Step:
    """A step whose slowest rank computes for ``compute_s`` and waits ``data_s`` for data; ``nodes`` hold the ranks.

    ``sharded``: ranks share out the update. Gradients go to their owners beside the backward pass, and new parameters
    come from them after the update, when nothing hides them.

    ``overlap``: of the backward pass, the part that can hide communication. Spreads are those of log(measured /
    predicted) of either part, independent of each other, so that the step's is their mean weighted by time.
    """
    parts = buckets(gradient_nbytes)
    total = allreduce_s(collective, float(gradient_nbytes), float(ranks), link, parts, servers, nodes)
    communication_s = float(exposed_s(total, compute_s, parts, overlap))
    if sharded:
        to_owners, from_owners = scatter_gather_s(float(gradient_nbytes), float(ranks), link, parts, nodes)
        communication_s = float(exposed_s(to_owners, compute_s, parts, overlap) + from_owners)
    waiting_s = compute_s * (straggler_factor(ranks) - 1) + agreement_s(ranks, link.latency_s)
    whole = compute_s + communication_s + data_s + waiting_s
    known = compute_s + data_s
    spread = hypot(known * compute_spread, (whole - known) * link_spread) / whole
    return Step(compute_s, communication_s, data_s, waiting_s, spread)
