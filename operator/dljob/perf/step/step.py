"""Time of a synchronous data-parallel step (compute, communication, input data, waiting) and its uncertainty.

A step ends when the slowest rank has the sum of all gradients.
"""

from dataclasses import dataclass
from math import ceil, exp, hypot

import numpy as np

from dljob.perf.step.communication import Collective, Link, Number, allreduce_s, layered_server_s, scatter_gather_s
from dljob.perf.step.synchronization import agreement_s, straggler_factor

BACKWARD_PART = 2 / 3
"""Fraction of the compute time that the backward pass takes: it does twice the arithmetic of the forward pass."""
BUCKET_NBYTES = 4 * 2**20
"""Default size of a bucket of gradients in bytes, which operator and trainer share. The all-reduce of a bucket starts
as soon as the backward pass has filled it."""
OVERLAP_EFFICIENCY = {"cpu": 0.5, "gpu": 0.9}
"""Fraction of the backward pass that can hide communication. On a CPU, computing and communication compete for cores,
and MPI progresses messages only inside calls. A GPU copies while it computes. Both values are assumptions."""

P90 = 1.2816
"""90th percentile of the standard normal distribution."""
SPREAD = {"catalogue": 0.5, "probe": 0.3, "profile": 0.08}
"""Standard deviation of log(measured / predicted) for the compute time, by the source of the prediction.

``catalogue``: data sheets. With 0.5, nine of ten steps take less than 1.9 times the prediction. ``probe``: measured
hardware, but never this model; benchmarks/perfmodel/first_prediction.py found 0.2 for computing on one core.
``profile``: measurements of this model, which repeat within some per cent."""
LINK_SPREAD = {"catalogue": 0.5, "probe": 0.4, "profile": 0.2}
"""Standard deviation of log(measured / predicted) for communication, by the source of the prediction.

``catalogue``: an assumed or stated bandwidth. ``probe``: a link that the hardware probe measured, but not this
collective. ``profile``: a link that a run of the job's model measured."""


def buckets(gradient_nbytes: int, bucket_nbytes: int = BUCKET_NBYTES) -> int:
    """Return the number of buckets (parts that are reduced one after another) of a gradient; at least 1."""
    return max(1, ceil(gradient_nbytes / bucket_nbytes))


def exposed_s(communication_s: Number, compute_s: Number, parts: int, overlap: Number) -> Number:
    """Return the communication time that does not overlap with the backward pass, but at least that of one bucket.

    ``communication_s``: seconds of the whole all-reduce. ``parts``: number n of buckets. Bucket i is ready when i/n of
    the backward pass is done, so at most (n-1)/n of the pass hides communication. ``overlap``: maximum fraction of the
    pass that can hide communication. ``compute_s``: the computing time of the whole step.
    """
    hidden = overlap * BACKWARD_PART * compute_s * (parts - 1) / parts
    return np.maximum(communication_s - hidden, communication_s / parts)


@dataclass(frozen=True)
class Step:
    """The parts of a step's time in seconds. ``step_s`` is the median of their sum, ``p90_s`` the 90th percentile."""

    compute_s: float
    communication_s: float
    data_s: float
    waiting_s: float
    """Time in which ranks wait for stragglers and agree that all of them have the sum of the gradients."""
    spread: float
    """Standard deviation of log(measured / predicted) of the whole step time."""

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
    micro_batches: int = 1,
    tensors: int = 1,
    bucket_nbytes: int = BUCKET_NBYTES,
    packing: float = 1.0,
    exchanged_s: float | None = None,
) -> Step:
    """Predict the time of a synchronous step, and its uncertainty, from the times of its slowest rank.

    This rank computes for ``compute_s`` seconds and waits for input for ``data_s`` seconds. The time of the all-reduce
    and of waiting for other ranks follows from the other parameters.

    ``link``: slowest link between the ranks. ``servers``: number of ranks that are parameter servers, used only by the
    collective ParameterServer. ``nodes``: number of nodes that hold the ranks; None: one rank per node.

    ``overlap``: fraction of the backward pass that can hide communication. ``sharded``: True if ranks shard the
    optimizer. Then the reduce-scatter of gradients overlaps with the backward pass, but the all-gather of new
    parameters after the update does not. ``micro_batches``: number of equal micro-batches in ``compute_s``, of which
    only the last one overlaps with communication. ``tensors``: number of parameter tensors, used only by LayeredServer,
    whose gathers overlap with the backward pass and whose broadcast does not. ``bucket_nbytes``: size of a bucket.
    ``packing``: time of the slowest rank, divided by the mean of all ranks, if they share cores unevenly.
    ``exchanged_s``: seconds of the collectives that a script starts itself (``exchanges_s``), in place of the
    all-reduce; None: there is the all-reduce.

    ``compute_spread`` applies to computing and input, ``link_spread`` to communication and waiting. Both are standard
    deviations of log(measured / predicted). The two errors are independent, so the step's spread is the root of the sum
    of both squares, each weighted by its part of the step time.
    """
    parts = buckets(gradient_nbytes, bucket_nbytes)
    total = allreduce_s(collective, float(gradient_nbytes), float(ranks), link, parts, servers, nodes, tensors)
    last_s = compute_s / micro_batches
    communication_s = float(exposed_s(total, last_s, parts, overlap))
    if sharded:
        to_owners, from_owners = scatter_gather_s(float(gradient_nbytes), float(ranks), link, parts, nodes)
        communication_s = float(exposed_s(to_owners, last_s, parts, overlap) + from_owners)
    if collective == "LayeredServer" and ranks > 1:
        to_server, from_server = layered_server_s(float(gradient_nbytes), float(ranks), link, tensors)
        communication_s = float(exposed_s(to_server, last_s, tensors, overlap) + from_server)
    if exchanged_s is not None:
        communication_s = exchanged_s
    waiting_s = compute_s * (straggler_factor(ranks) * packing - 1) + agreement_s(ranks, link.latency_s)
    whole = compute_s + communication_s + data_s + waiting_s
    known = compute_s + data_s
    spread = hypot(known * compute_spread, (whole - known) * link_spread) / whole
    return Step(compute_s, communication_s, data_s, waiting_s, spread)
