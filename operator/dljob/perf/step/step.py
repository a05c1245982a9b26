"""Time of one synchronous data-parallel step: compute, communication, input data and waiting, with its uncertainty.

A step ends when the slowest rank has the sum of all gradients.
"""

from dataclasses import dataclass
from math import ceil, exp, hypot

import numpy as np

from dljob.perf.step.communication import Collective, Link, Number, allreduce_s, scatter_gather_s
from dljob.perf.step.synchronization import agreement_s, straggler_factor

BACKWARD_PART = 2 / 3
"""Fraction of the compute time in the backward pass, which does twice the arithmetic of the forward pass."""
BUCKET_NBYTES = 4 * 2**20
"""Bucket size of the all-reduce, the contract's default. Each bucket starts once the backward pass has filled it."""
OVERLAP_EFFICIENCY = {"cpu": 0.5, "gpu": 0.9}
"""Fraction of the backward pass that can hide communication. On a CPU both compete for the same cores, and MPI
progresses messages only inside calls. A GPU copies while it computes. Both values are assumptions."""

P90 = 1.2816
"""90th percentile of the standard normal distribution."""
SPREAD = {"catalogue": 0.5, "profile": 0.08}
"""Standard deviation of log(measured / predicted) compute time. Predictions from data sheets are within a factor of 2
nine times out of ten; measured times repeat within some per cent."""
LINK_SPREAD = {"catalogue": 0.5, "profile": 0.2}


def buckets(gradient_nbytes: int) -> int:
    return max(1, ceil(gradient_nbytes / BUCKET_NBYTES))


def exposed_s(communication_s: Number, compute_s: Number, parts: int, overlap: Number) -> Number:
    """Return the exposed communication time: the part that does not overlap with backward, at least the last bucket's.

    Bucket i of n is ready when i/n of the backward pass is done, so at most (n-1)/n of the pass hides communication.
    """
    hidden = overlap * BACKWARD_PART * compute_s * (parts - 1) / parts
    return np.maximum(communication_s - hidden, communication_s / parts)


@dataclass(frozen=True)
class Step:
    """Seconds of one step by part. ``step_s`` is the median and ``p90_s`` the 90th percentile."""

    compute_s: float
    communication_s: float
    data_s: float
    waiting_s: float
    """Waiting for stragglers, and the agreement that commits the step."""
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
    """Return a step whose slowest rank computes for ``compute_s`` and waits ``data_s`` for data, on ``nodes`` nodes.

    ``sharded``: ranks shard the optimizer. The reduce-scatter of gradients overlaps with the backward pass; the
    all-gather of new parameters after the update does not.

    ``overlap``: fraction of the backward pass that can hide communication. Spreads are standard deviations of
    log(measured / predicted) of both parts. They are independent, so the step's spread is their root sum of squares
    weighted by time.
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
