"""All-reduce time by algorithm, in the alpha-beta-gamma model.

A message of m bytes takes alpha + m beta on a link (alpha: latency, beta: 1 / bandwidth), and reducing it takes gamma
per byte (Thakur, Rabenseifner, Gropp 2005; Chan et al. 2007). V is the buffer in bytes and n the number of ranks. Every
function accepts numbers or arrays and returns seconds.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlcontract import CollectiveName

Collective = CollectiveName | Literal["NCCL"]
Number = float | NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """The slowest link between the ranks."""

    latency_s: float
    bandwidth_Bps: float
    reduce_Bps: float = 5e9
    """Speed of adding a received buffer to a local one, on the ranks' processors."""
    name: str = "link"
    near_latency_s: float | None = None
    """Latency between ranks of one node, if ranks share nodes; None: ``latency_s``."""

    def __post_init__(self) -> None:
        near_s = 0.0 if self.near_latency_s is None else self.near_latency_s
        if not (self.latency_s >= 0 and near_s >= 0 and self.bandwidth_Bps > 0 and self.reduce_Bps > 0):
            raise ValueError(f"{self}: expected latencies of 0 or more and bandwidths above 0")

    @property
    def inside_s(self) -> float:
        """Return the latency between ranks of one node."""
        return self.latency_s if self.near_latency_s is None else self.near_latency_s


ETHERNET_BANDWIDTH_Bps = 1.25e9
"""10 Gbit/s, assumed for a network that no node annotation describes."""
TCP_LATENCY_S = 60e-6
"""Latency between two pods with MPI's TCP transport."""
SHARED_MEMORY_LATENCY_S = 2e-6


def _rounds(n: Number) -> Number:
    return np.ceil(np.log2(n))


def ring_s(nbytes: float, n: Number, link: Link, nodes: Number | None = None) -> Number:
    """Return the time of a ring: reduce-scatter and all-gather, 2 (n-1) messages of V/n (Patarasuk, Yuan 2009).

    2 (n-1) alpha + 2 (n-1)/n V beta + (n-1)/n V gamma: the volume hardly grows with n, the latency does. Each part
    travels n - 1 hops to be reduced and n - 1 hops as the sum. On ``nodes`` of several ranks in rank order, hops
    between nodes (one per node, if there are several) take alpha, and the others the lower latency within a node.
    """
    part = (n - 1) / n * nbytes
    hops = n - 1 if nodes is None else np.minimum(np.where(np.asarray(nodes) > 1, nodes, 0), n - 1)
    latency_s = hops * link.latency_s + (n - 1 - hops) * link.inside_s
    return 2 * latency_s + 2 * part / link.bandwidth_Bps + part / link.reduce_Bps


def scatter_gather_s(
    nbytes: float, n: Number, link: Link, buckets: int = 1, nodes: Number | None = None
) -> tuple[Number, Number]:
    """Return the times of the two halves of a ring: (reduce-scatter, all-gather).

    (n-1) alpha + (n-1)/n V beta each, and (n-1)/n V gamma more for the first (Rajbhandari et al. 2020, section 7.1).
    """
    adding_s = np.where(np.asarray(n) > 1, (n - 1) / n * nbytes / link.reduce_Bps, 0.0)
    half = np.where(np.asarray(n) > 1, (buckets * ring_s(nbytes / buckets, n, link, nodes) - adding_s) / 2, 0.0)
    return half + adding_s, half


def tree_s(nbytes: float, n: Number, link: Link) -> Number:
    """Return the time of a binomial tree, reduce then broadcast: ceil(log2 n) (2 alpha + 2 V beta + V gamma)."""
    return _rounds(n) * (2 * link.latency_s + 2 * nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps)


def butterfly_s(nbytes: float, n: Number, link: Link) -> Number:
    """Return the time of recursive doubling: log2 n exchanges of V.

    floor(log2 n) (alpha + V beta + V gamma). If n is not a power of two, the ranks above one exchange with partners
    before and after: 2 alpha + 2 V beta + V gamma more.
    """
    exchange = link.latency_s + nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps
    fold = 2 * link.latency_s + 2 * nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps
    whole = np.floor(np.log2(n))
    return whole * exchange + np.where(_rounds(n) > whole, fold, 0.0)


def parameter_server_s(nbytes: float, n: Number, link: Link, servers: int = 1) -> Number:
    """Return the time of parameter servers that reduce the workers' gradients and send the sums back (Li et al. 2014).

    ``servers`` (s) of the ``n`` ranks only serve, V/s each, so w = n - s workers train. A server's link receives w V/s
    and sends as much; a worker's link carries V: 2 alpha + 2 max(w/s, 1) V beta + w/s V gamma. This grows with n.
    """
    load = (n - servers) / servers
    return (
        2 * link.latency_s + 2 * np.maximum(load, 1.0) * nbytes / link.bandwidth_Bps + load * nbytes / link.reduce_Bps
    )


def halving_doubling_s(nbytes: float, n: Number, link: Link, nodes: Number | None = None) -> Number:
    """Return the time of recursive halving, then doubling (Rabenseifner 2004): 2 log2 p alpha and a ring's volume.

    p is the largest power of two up to n. Each of the n - p other ranks first combines its message by halves with a
    partner and receives the sum in the end: 3 alpha + 2 V beta + V/2 gamma more (Thakur et al. 2005, section 4.3).

    On ``nodes`` of g ranks in rank order, the exchanges of the largest parts come first, between neighbours. If g is a
    power of two, log2 g of them stay within nodes and take the lower latency (their bandwidth is assumed to be the
    link's). In the other exchanges all g ranks of a node send at once, so V/g - V/p of each take g times as long.
    """
    rounds = np.floor(np.log2(n))
    group = np.maximum(np.asarray(n) / (n if nodes is None else nodes), 1.0)
    aligned = np.log2(group)
    inside = np.minimum(np.where(aligned == np.floor(aligned), aligned, 0.0), rounds)
    near, far = 1 - 2.0**-inside, 2.0**-inside - 2.0**-rounds
    latency_s = inside * link.inside_s + (rounds - inside) * link.latency_s
    volume, part = (near + group * far) * nbytes, (near + far) * nbytes
    whole = 2 * latency_s + 2 * volume / link.bandwidth_Bps + part / link.reduce_Bps
    fold = 3 * link.latency_s + 2 * nbytes / link.bandwidth_Bps + nbytes / 2 / link.reduce_Bps
    return whole + np.where(_rounds(n) > rounds, fold, 0.0)


def double_tree_s(nbytes: float, n: Number, link: Link, nodes: Number | None = None) -> Number:
    """Return the time of a double binary tree, each tree for half of the message (Sanders et al. 2009).

    Each rank is an inner node of one tree and a leaf of the other. In k chunks over h = ceil(log2 n) levels, up and
    down take 2 (h + k - 1) (alpha + V beta / k). With the best k that is 2 (sqrt((h - 1) alpha) + sqrt(V beta))^2, and
    at least alpha more. Reductions take V gamma each and overlap, except for the last. On ``nodes`` of several ranks
    the trees span nodes and each node's ranks form a chain (NCCL 2.4; Jeaugey 2019): h = ceil(log2 nodes), and
    n / nodes - 1 more hops of the lower latency.
    """
    over = n if nodes is None else nodes
    levels_s = np.maximum(_rounds(over) - 1, 0) * link.latency_s + (np.ceil(n / over) - 1) * link.inside_s
    pipelined = (np.sqrt(levels_s) + np.sqrt(nbytes / link.bandwidth_Bps)) ** 2
    return np.asarray(2 * (pipelined + link.latency_s) + nbytes / link.reduce_Bps)


def allreduce_s(
    collective: Collective,
    nbytes: float,
    n: Number,
    link: Link,
    buckets: int = 1,
    servers: int = 1,
    nodes: Number | None = None,
) -> Number:
    """Return the time to all-reduce ``nbytes`` over ``n`` ranks in ``buckets`` equal, sequential parts; 0 for one rank.

    ``nodes``: number of nodes of the ranks, in rank order; None: one rank per node. ``MPI`` is modelled as the fastest
    of butterfly, halving-doubling and ring, because the library chooses. ``Torch`` is a ring, as in Gloo. ``NCCL`` is
    the faster of a ring and, between nodes, a double tree.
    """
    part = nbytes / buckets
    if collective in ("Ring", "Torch"):
        one = ring_s(part, n, link, nodes)
    elif collective == "NCCL":
        ring, over = ring_s(part, n, link, nodes), np.asarray(n if nodes is None else nodes)
        one = np.where(over > 1, np.minimum(ring, double_tree_s(part, n, link, nodes)), ring)
    elif collective == "Tree":
        one = tree_s(part, n, link)
    elif collective == "Butterfly":
        one = butterfly_s(part, n, link)
    elif collective == "HalvingDoubling":
        one = halving_doubling_s(part, n, link, nodes)
    elif collective == "ParameterServer":
        one = parameter_server_s(part, n, link, servers)
    else:
        one = np.minimum(butterfly_s(part, n, link), halving_doubling_s(part, n, link, nodes))
        one = np.minimum(one, ring_s(part, n, link, nodes))
    return np.where(np.asarray(n) > 1, buckets * one, 0.0)
