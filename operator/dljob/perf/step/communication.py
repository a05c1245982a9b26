"""Communication: the time of an all-reduce, by algorithm, in the alpha-beta-gamma model.

A message of m bytes costs alpha + m beta on a link (alpha: latency, beta: 1 / bandwidth), and summing it gamma a
byte (Thakur, Rabenseifner, Gropp 2005; Chan et al. 2007). Every function takes numbers or arrays.
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
    """The slowest link that ranks talk over."""

    latency_s: float
    bandwidth_Bps: float
    reduce_Bps: float = 5e9
    """Speed of adding a received buffer to one's own, on the ranks' processors."""
    name: str = "link"
    near_latency_s: float | None = None
    """Latency of a message between ranks of one node, where ranks share nodes; None: as ``latency_s``."""

    def __post_init__(self) -> None:
        near_s = 0.0 if self.near_latency_s is None else self.near_latency_s
        if not (self.latency_s >= 0 and near_s >= 0 and self.bandwidth_Bps > 0 and self.reduce_Bps > 0):
            raise ValueError(f"{self}: expected latencies of 0 or more and bandwidths above 0")

    @property
    def inside_s(self) -> float:
        """Latency between ranks of one node."""
        return self.latency_s if self.near_latency_s is None else self.near_latency_s


ETHERNET_BANDWIDTH_Bps = 1.25e9
"""10 Gbit/s: what is assumed of a network that no node annotation describes."""
TCP_LATENCY_S = 60e-6
"""Between two pods, through MPI's TCP transport."""
SHARED_MEMORY_LATENCY_S = 2e-6


def _rounds(n: Number) -> Number:
    return np.ceil(np.log2(n))


def ring_s(nbytes: float, n: Number, link: Link, nodes: Number | None = None) -> Number:
    """Reduce-scatter and all-gather around a ring: 2 (n-1) messages of V/n each way (Patarasuk, Yuan 2009).

    2 (n-1) alpha + 2 (n-1)/n V beta + (n-1)/n V gamma: the volume hardly grows with n, the latency does. A part goes
    round once to be summed and once as the sum, n - 1 hops each time, so on ``nodes`` of several ranks in rank order it
    meets alpha on the hops between nodes (one a node, if there are several) and the lower latency on the others.
    """
    part = (n - 1) / n * nbytes
    hops = n - 1 if nodes is None else np.minimum(np.where(np.asarray(nodes) > 1, nodes, 0), n - 1)
    latency_s = hops * link.latency_s + (n - 1 - hops) * link.inside_s
    return 2 * latency_s + 2 * part / link.bandwidth_Bps + part / link.reduce_Bps


def scatter_gather_s(
    nbytes: float, n: Number, link: Link, buckets: int = 1, nodes: Number | None = None
) -> tuple[Number, Number]:
    """The halves of a ring as two steps, sums to their owners and values from them: (reduce-scatter, all-gather).

    (n-1) alpha + (n-1)/n V beta each, the first (n-1)/n V gamma more (Rajbhandari et al. 2020, section 7.1).
    """
    adding_s = np.where(np.asarray(n) > 1, (n - 1) / n * nbytes / link.reduce_Bps, 0.0)
    half = np.where(np.asarray(n) > 1, (buckets * ring_s(nbytes / buckets, n, link, nodes) - adding_s) / 2, 0.0)
    return half + adding_s, half


def tree_s(nbytes: float, n: Number, link: Link) -> Number:
    """A binomial tree sums up to the root and sends down again: ceil(log2 n) (2 alpha + 2 V beta + V gamma)."""
    return _rounds(n) * (2 * link.latency_s + 2 * nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps)


def butterfly_s(nbytes: float, n: Number, link: Link) -> Number:
    """Recursive doubling: log2 n exchanges of V; otherwise the ranks above a power of two fold in and out.

    floor(log2 n) (alpha + V beta + V gamma), plus 2 alpha + 2 V beta + V gamma when n is no power of two.
    """
    exchange = link.latency_s + nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps
    fold = 2 * link.latency_s + 2 * nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps
    whole = np.floor(np.log2(n))
    return whole * exchange + np.where(_rounds(n) > whole, fold, 0.0)


def parameter_server_s(nbytes: float, n: Number, link: Link, servers: int = 1) -> Number:
    """Workers send their gradients to servers, which sum them and send the totals back (Li et al. 2014).

    ``servers`` of the ``n`` ranks only serve, V/s each, so that w = n - s workers train. A server's link takes in w V/s
    and gives it out again, a worker's carries V: 2 alpha + 2 max(w/s, 1) V beta + w/s V gamma. Grows with n.
    """
    load = (n - servers) / servers
    return (
        2 * link.latency_s + 2 * np.maximum(load, 1.0) * nbytes / link.bandwidth_Bps + load * nbytes / link.reduce_Bps
    )


def halving_doubling_s(nbytes: float, n: Number, link: Link, nodes: Number | None = None) -> Number:
    """Recursive halving, then doubling (Rabenseifner 2004): 2 log2 p alpha and a ring's volume, p a power of two.

    Off powers of two p is the one below n, and each of the n - p others first halves the message with a partner, which
    takes its half, and gets the sum in the end: 3 alpha + 2 V beta + V/2 gamma more (Thakur et al. 2005, section 4.3).

    On ``nodes`` of g ranks in rank order the exchanges of the largest parts come first, between neighbours: where g is
    a power of two, log2 g of them stay within nodes and meet the lower latency (their bandwidth is taken to be the
    link's). In the others all g ranks of a node send at once, so that V/g - V/p of each are g times as long.
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
    """Two binary trees, each for half of the message, a rank inner in one and leaf in the other (Sanders et al. 2009).

    Up and down in k chunks: 2 (h + k - 1) (alpha + V beta / k) of h = ceil(log2 n) levels; with the best k that is
    2 (sqrt((h - 1) alpha) + sqrt(V beta))^2, and at least alpha more; each sum costs V gamma, hidden but for the last.
    On ``nodes`` of several ranks the trees span nodes and each node's ranks are a chain (NCCL 2.4; Jeaugey 2019): h =
    ceil(log2 nodes), and n / nodes - 1 hops of the lower latency more.
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
    """Time to sum ``nbytes`` over ``n`` ranks in ``buckets`` equal parts, one after the other; 0 for one rank.

    ``nodes``: that hold them, in rank order; None: a rank each. ``MPI`` lets the library choose: the best of what
    libraries have. ``Torch`` is a ring, as Gloo's; ``NCCL`` takes the faster of a ring and, between nodes, a double
    tree.
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
