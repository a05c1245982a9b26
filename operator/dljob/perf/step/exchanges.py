"""Time of the collectives that a script starts itself (``Collectives``), over gloo between ranks on CPUs.

The algorithms are those of gloo and of ``ProcessGroupGloo`` in PyTorch 2.13, in the alpha-beta-gamma model
(``perf.step.communication``): rings for all-reduce and all-gather, a binomial tree for a broadcast, and log2 n rounds
for a barrier (Hensgen, Finkel, Manber 1988). A reduce-scatter is an all-reduce of a copy.

Gloo sends over TCP, also within a node. A message wakes the thread that waits for the socket, which wakes the thread of
the collective, which wakes that of the script. On one machine, this takes longer than the message itself.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from dljob.perf.step.backends import backend
from dljob.perf.step.communication import AnyLink, Link, Number, ring_s
from dljob.perf.step.step import exposed_s
from dljob.perf.workload.observed import Collectives

HOP_S = 2.6e-4
"""Seconds of a gloo message between two ranks of a node without its bytes, on the host of ``structure.CALL_S``.

benchmarks/perfmodel/host_calls/gloo.py measured 0.22 to 0.28 ms on an idle virtual machine, where threads wait for idle
cores to wake up, and 0.11 to 0.16 ms on a busy one. The call of the collective itself is in ``CALL_S``."""
IN_BACKWARD = ("all_reduce", "reduce_scatter")
"""Kinds of collectives that DistributedDataParallel and FSDP start during the backward pass."""


def over_gloo(link: AnyLink, nodes: Number, hop_s: Number) -> AnyLink:
    """Return ``link``, which carries messages of MPI, with the latencies and bandwidths that gloo has on it.

    ``nodes``: number of nodes on which the ranks run; ``hop_s``: seconds of a message within a node without its bytes.
    Both may be arrays with a value for each link of an array.
    """
    ratios, on_one = backend("Gloo"), np.asarray(nodes) <= 1
    far_s = np.maximum(hop_s, ratios.between.latency * np.asarray(link.latency_s))
    latency_s = np.where(on_one, hop_s, far_s)
    part = np.where(on_one, ratios.within.bandwidth, ratios.between.bandwidth)
    bandwidth_Bps = part * np.asarray(link.bandwidth_Bps)
    if isinstance(link, Link):
        near_Bps = None if link.near_bandwidth_Bps is None else ratios.within.bandwidth * link.near_bandwidth_Bps
        return replace(
            link,
            latency_s=float(latency_s),
            bandwidth_Bps=float(bandwidth_Bps),
            near_latency_s=float(hop_s),
            near_bandwidth_Bps=near_Bps,
        )
    inside_Bps = ratios.within.bandwidth * link.inside_Bps
    hops_s = np.full_like(latency_s, hop_s)
    return replace(link, latency_s=latency_s, bandwidth_Bps=bandwidth_Bps, inside_s=hops_s, inside_Bps=inside_Bps)


def collective_s(kind: str, nbytes: float, n: Number, link: AnyLink, nodes: Number | None = None) -> Number:
    """Return the seconds of one collective of gloo over ``n`` ranks with a buffer of ``nbytes`` bytes; 0 for one rank.

    The buffer has the parts of all ranks: V = ``nbytes``, latency alpha, beta = 1 / bandwidth, and gamma seconds to
    reduce or copy a byte.

    all_reduce, reduce: a ring (``ring_s``). reduce_scatter: the same after a copy, V gamma more. all_gather: each rank
    passes n - 1 parts on, each as two segments, 2 (n-1) alpha + (n-1)/n V beta, and copies them. broadcast:
    ceil(log2 n) (alpha + V beta). barrier: ceil(log2 n) alpha. gather: alpha + (n-1)/n V beta. all_to_all: (n-1) alpha
    + (n-1)/n V beta. message: alpha + V beta. Any other kind counts as an all-reduce. ``link``: as gloo uses it
    (``over_gloo``). ``nodes``: number of nodes, which hold the ranks in rank order; None: one rank per node.
    """
    count = np.asarray(n, dtype=float)
    part, rounds = (count - 1) / count, np.ceil(np.log2(count))
    byte_s = 1 / np.asarray(link.bandwidth_Bps)
    found: Number
    if kind == "all_gather":
        found = ring_s(nbytes / 2, n, link, nodes)
    elif kind == "broadcast":
        found = rounds * (link.latency_s + nbytes * byte_s)
    elif kind == "barrier":
        found = rounds * link.latency_s
    elif kind == "gather":
        found = link.latency_s + part * nbytes * byte_s
    elif kind == "all_to_all":
        found = (count - 1) * link.latency_s + part * nbytes * byte_s
    elif kind == "message":
        found = link.latency_s + nbytes * byte_s
    else:
        found = ring_s(nbytes, n, link, nodes)
        found = found + (nbytes / link.reduce_Bps if kind == "reduce_scatter" else 0.0)
    return np.where(count > 1, found, 0.0)


def exchanges_s(
    collectives: Sequence[Collectives],
    compute_s: Number,
    n: Number,
    link: AnyLink,
    nodes: Number,
    overlap: Number,
    cores: Number = 1.0,
    copied_Bps: Number = inf,
) -> Number:
    """Return the seconds by which the collectives of a step make it longer; 0 for one rank.

    Gloo's threads need the cores of the rank for each message, and for each byte that they send or receive. So the
    latencies of all collectives count, and the seconds of the bytes on a link of ``copied_Bps`` bytes per second,
    divided by the ``cores`` of a rank if it has several. The rest of the bytes' time overlaps with the backward pass if
    the kind is in ``IN_BACKWARD`` (``exposed_s``). On one node, nothing is left. All other collectives are waited for.

    ``compute_s``: seconds of the computing that overlaps. ``overlap``: fraction of the backward pass that can hide
    communication. ``link``: as gloo uses it. Numbers, or arrays of equal shape.
    """
    total: Number = 0.0
    fast_Bps = np.maximum(link.bandwidth_Bps, copied_Bps)
    faster: AnyLink = (
        replace(link, bandwidth_Bps=float(fast_Bps))
        if isinstance(link, Link)
        else replace(link, bandwidth_Bps=fast_Bps)
    )
    for each in collectives:
        one = np.asarray(collective_s(each.kind, each.nbytes / each.count, n, link, nodes))
        if each.kind not in IN_BACKWARD:
            total = total + each.count * one
            continue
        waking = np.asarray(collective_s(each.kind, 0.0, n, link, nodes))
        unlimited = collective_s(each.kind, each.nbytes / each.count, n, faster, nodes)
        copied, sent = each.count * (unlimited - waking), each.count * (one - unlimited)
        felt = np.where(sent > 0, exposed_s(sent, compute_s, each.count, overlap), 0.0)
        total = total + each.count * waking + copied / np.maximum(1.0, cores) + felt
    return np.where(np.asarray(n) > 1, total, 0.0)
