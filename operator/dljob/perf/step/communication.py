"""Time of each all-reduce algorithm in the alpha-beta-gamma model.

A message of m bytes takes alpha + m beta seconds on a link (alpha: latency, beta: 1 / bandwidth). Reducing it takes
gamma seconds per byte (Thakur, Rabenseifner, Gropp 2005; Chan et al. 2007). V is the size of the buffer in bytes and n
the number of ranks. Every function accepts numbers or arrays and returns seconds.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlcontract import CollectiveName

Collective = CollectiveName | Literal["NCCL"]
Number = float | NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth of the slowest link between the ranks (``planner.candidates.options.link_of`` finds it).

    Between nodes, the bandwidth is that of a node's network, over all its network cards.
    """

    latency_s: float
    bandwidth_Bps: float
    reduce_Bps: float = 5e9
    """Bytes per second at which a rank adds a received buffer to its own."""
    name: str = "link"
    near_latency_s: float | None = None
    """Latency between ranks on the same node. None: the same as ``latency_s``."""
    near_bandwidth_Bps: float | None = None
    """Bandwidth of a rank to others on the same node, in one direction. None: it never limits a collective."""

    def __post_init__(self) -> None:
        near_s = 0.0 if self.near_latency_s is None else self.near_latency_s
        bandwidths = (self.bandwidth_Bps, self.reduce_Bps, self.inside_Bps)
        if not (self.latency_s >= 0 and near_s >= 0 and min(bandwidths) > 0):
            raise ValueError(f"link: found {self}; expected latencies of 0 or more and bandwidths above 0")

    @property
    def inside_s(self) -> float:
        """Return the latency between ranks on the same node, in seconds."""
        return self.latency_s if self.near_latency_s is None else self.near_latency_s

    @property
    def inside_Bps(self) -> float:  # noqa: N802 - the unit is part of the name
        """Return the bytes per second between ranks on the same node; infinite if ``near_bandwidth_Bps`` is None."""
        return inf if self.near_bandwidth_Bps is None else self.near_bandwidth_Bps


@dataclass(frozen=True)
class Links:
    """The slowest links of many sets of ranks, as arrays with one element for each; see ``Link``."""

    latency_s: NDArray[np.float64]
    bandwidth_Bps: NDArray[np.float64]
    reduce_Bps: NDArray[np.float64]
    inside_s: NDArray[np.float64]
    inside_Bps: NDArray[np.float64]


AnyLink = Link | Links

ETHERNET_BANDWIDTH_Bps = 1.25e9
"""Network bandwidth (10 Gbit/s) that is assumed if it was not measured and no node's annotation states it."""
TCP_LATENCY_S = 60e-6
"""Latency between two pods with MPI's TCP transport, assumed if it was not measured."""
SHARED_MEMORY_LATENCY_S = 2e-6


def _rounds(n: Number) -> Number:
    return np.ceil(np.log2(n))


def ring_s(nbytes: float, n: Number, link: AnyLink, nodes: Number | None = None) -> Number:
    """Return the seconds of a ring all-reduce over ``n`` ranks: a reduce-scatter, then an all-gather.

    A rank sends 2 (n-1) messages of V/n bytes (Patarasuk, Yuan 2009). The time is 2 (n-1) alpha + 2 (n-1)/n V beta +
    (n-1)/n V gamma, with V = ``nbytes``, latency alpha, beta = 1 / bandwidth, and gamma seconds to reduce a byte. The
    latency part grows with n, but the volume hardly does. Each of n parts of the buffer travels n - 1 hops to be
    reduced, and then its sum travels n - 1 hops. If ``nodes`` nodes hold several ranks each, in rank order, one hop per
    node leaves the node and takes alpha. The other hops take the lower latency within a node. All hops carry the same
    bytes at the same time, so the slower of network and links within a node (NVLink, PCIe) sets the pace.
    """
    part = (n - 1) / n * nbytes
    bandwidth_Bps = np.where(np.asarray(n) > (n if nodes is None else nodes), link.inside_Bps, inf)
    bandwidth_Bps = np.minimum(bandwidth_Bps, link.bandwidth_Bps)
    hops = n - 1 if nodes is None else np.minimum(np.where(np.asarray(nodes) > 1, nodes, 0), n - 1)
    latency_s = hops * link.latency_s + (n - 1 - hops) * link.inside_s
    return 2 * latency_s + 2 * part / bandwidth_Bps + part / link.reduce_Bps


def scatter_gather_s(
    nbytes: float, n: Number, link: AnyLink, buckets: int = 1, nodes: Number | None = None
) -> tuple[Number, Number]:
    """Return the seconds of the two halves of a ring all-reduce over ``n`` ranks: (reduce-scatter, all-gather).

    With a sharded optimizer, the ranks update their shards between the two halves. Each half takes (n-1) alpha +
    (n-1)/n V beta, with V = ``nbytes``, latency alpha and beta = 1 / bandwidth. The reduce-scatter takes (n-1)/n V
    gamma more, with gamma seconds to reduce a byte (Rajbhandari et al. 2020, section 7.1). ``buckets``: number of equal
    parts of the buffer that are reduced one after another. ``nodes``: number of nodes that hold the ranks; None: one
    rank per node.
    """
    adding_s = np.where(np.asarray(n) > 1, (n - 1) / n * nbytes / link.reduce_Bps, 0.0)
    half = np.where(np.asarray(n) > 1, (buckets * ring_s(nbytes / buckets, n, link, nodes) - adding_s) / 2, 0.0)
    return half + adding_s, half


def tree_s(nbytes: float, n: Number, link: AnyLink) -> Number:
    """Return the seconds of an all-reduce over ``n`` ranks along a binomial tree: first reduce, then broadcast.

    The time is ceil(log2 n) (2 alpha + 2 V beta + V gamma). V is ``nbytes``, alpha the latency, beta = 1 / bandwidth,
    and gamma the seconds to reduce a byte.
    """
    return _rounds(n) * (2 * link.latency_s + 2 * nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps)


def butterfly_s(nbytes: float, n: Number, link: AnyLink) -> Number:
    """Return the seconds of an all-reduce over ``n`` ranks by recursive doubling: log2 n exchanges of the whole buffer.

    The time is floor(log2 n) (alpha + V beta + V gamma), with V = ``nbytes``, latency alpha, beta = 1 / bandwidth, and
    gamma seconds to reduce a byte. If n is not a power of two, the ranks above the largest power of two send their
    buffers to partners before the exchanges and receive the sums afterwards. That takes 2 alpha + 2 V beta + V gamma
    more.
    """
    exchange = link.latency_s + nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps
    fold = 2 * link.latency_s + 2 * nbytes / link.bandwidth_Bps + nbytes / link.reduce_Bps
    whole = np.floor(np.log2(n))
    return whole * exchange + np.where(_rounds(n) > whole, fold, 0.0)


def parameter_server_s(nbytes: float, n: Number, link: AnyLink, servers: int = 1) -> Number:
    """Return the seconds in which parameter servers reduce the workers' gradients and send the sums back.

    The model is that of Li et al. 2014. The parameters have V = ``nbytes`` bytes. Of the n ranks, s = ``servers`` are
    parameter servers. Each server holds V/s bytes of the parameters and does not train, so w = n - s ranks are workers.
    A server receives w V/s bytes and sends as many. A worker sends V bytes and receives as many. The time grows with n:
    2 alpha + 2 max(w/s, 1) V beta + w/s V gamma, with latency alpha, beta = 1 / bandwidth, and gamma seconds to reduce
    a byte.
    """
    load = (n - servers) / servers
    return (
        2 * link.latency_s + 2 * np.maximum(load, 1.0) * nbytes / link.bandwidth_Bps + load * nbytes / link.reduce_Bps
    )


Gather = Literal["Serial", "Tree"]


def layered_server_s(
    nbytes: float, n: Number, link: AnyLink, tensors: int = 1, gather: Gather = "Serial", message_s: float = 0.0
) -> tuple[Number, Number]:
    """Return the seconds in which a layered server gets all gradients, and those of its broadcast: (gather, broadcast).

    Rank 0 of n ranks is the server. The gradient has V = ``nbytes`` bytes in L = ``tensors`` tensors. As the backward
    pass reaches a tensor, the server gathers it from the n - 1 workers and adds it up. With more than two ranks, each
    of these L gathers takes 2 ceil(log2 n) alpha more, because its ranks wait for each other (alpha: latency, beta =
    1 / bandwidth, gamma: seconds to add a byte). The sum over all tensors depends only on L and V:

    ``gather`` Serial: the server receives one worker's message after another: L (n-1) alpha + (n-1) V (beta + gamma).
    Tree: a binomial tree in which inner ranks forward the rows of their subtrees: L ceil(log2 n) alpha + (n-1) V
    (beta + gamma), because the server's link still carries every row. ``message_s``: further seconds that the server
    spends on each message of a serial gather, or on each level of a tree, such as for matching and copying.

    The broadcast of the updated parameters follows a binomial tree: ceil(log2 n) (alpha + V beta). The sums are those
    of Chan et al. 2007, sections 4 and 6.
    """
    workers, levels = n - 1, _rounds(n)
    messages = workers if gather == "Serial" else levels
    synchronizing_s = tensors * np.where(np.asarray(n) > 2, 2 * levels, 0.0) * link.latency_s
    volume_s = workers * nbytes * (1 / link.bandwidth_Bps + 1 / link.reduce_Bps)
    gathering_s = tensors * messages * (link.latency_s + message_s) + volume_s + synchronizing_s
    return gathering_s, levels * (link.latency_s + nbytes / link.bandwidth_Bps)


def halving_doubling_s(nbytes: float, n: Number, link: AnyLink, nodes: Number | None = None) -> Number:
    """Return the seconds of an all-reduce over ``n`` ranks by recursive halving, then doubling (Rabenseifner 2004).

    The ranks add up V = ``nbytes`` bytes. Let p be the largest power of two up to n, alpha the latency of a message,
    beta the seconds to send a byte, and gamma the seconds to add a byte. If n = p, the time is
    2 log2(p) alpha + 2 (p - 1)/p V beta + (p - 1)/p V gamma. If n > p, each of the n - p remaining ranks first combines
    its buffer with that of one of the p ranks, and gets the sum from it in the end. This takes
    3 alpha + 2 V beta + V/2 gamma more (Thakur et al. 2005, section 4.3).

    ``nodes``: number of nodes, each with g consecutive ranks; None: one rank per node. If g is a power of two, the
    first log2(g) exchanges, which carry most bytes, stay within a node. They have the lower latency there, and the
    link's bandwidth. In all other exchanges, the g ranks of a node share its link. They send V/g - V/p bytes each,
    which therefore take g times as long.
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


def double_tree_s(nbytes: float, n: Number, link: AnyLink, nodes: Number | None = None) -> Number:
    """Return the seconds of an all-reduce over ``n`` ranks along two binary trees, each for half of the message.

    The algorithm is that of Sanders et al. 2009. V = ``nbytes``, alpha is the latency, beta = 1 / bandwidth, and gamma
    the seconds to reduce a byte. Each rank is an inner node of one tree and a leaf of the other. If k chunks travel up
    and down h = ceil(log2 n) levels, that takes 2 (h + k - 1) (alpha + V beta / k). With the optimal number of chunks,
    the time is 2 (sqrt((h - 1) alpha) + sqrt(V beta))^2. This optimum can be at a k below 1. At least one chunk must
    travel, so 2 alpha are added. Each reduction takes V gamma. All reductions but one overlap with sending, so V gamma
    is added once. If nodes hold several ranks, the trees span ``nodes`` nodes and a node's ranks form a chain (NCCL
    2.4; Jeaugey 2019). Then h is ceil(log2 nodes), and each direction has n / nodes - 1 more hops with the lower
    latency within a node.

    A node's network carries 2 V in each direction, and so do the links of each rank within a node. Two nodes are an
    exception: each sends V/2 up one tree and V/2 down the other, so the network carries V (NCCL's maintainers: issue
    946 of NVIDIA/nccl).
    """
    over = n if nodes is None else nodes
    levels_s = np.maximum(_rounds(over) - 1, 0) * link.latency_s + (np.ceil(n / over) - 1) * link.inside_s
    part = np.where(np.asarray(over) == 2, 0.5, 1.0)
    inside = np.where(np.asarray(n) > over, 1 / link.inside_Bps, 0.0)
    pipelined = (np.sqrt(levels_s) + np.sqrt(nbytes * np.maximum(part / link.bandwidth_Bps, inside))) ** 2
    return np.asarray(2 * (pipelined + link.latency_s) + nbytes / link.reduce_Bps)


def allreduce_s(
    collective: Collective,
    nbytes: float,
    n: Number,
    link: AnyLink,
    buckets: int = 1,
    servers: int = 1,
    nodes: Number | None = None,
    tensors: int = 1,
) -> Number:
    """Return the seconds to all-reduce ``nbytes`` bytes over ``n`` ranks with ``collective``; 0 for one rank.

    ``buckets``: number of equal parts that are reduced one after another. ``servers``: number of ranks that are
    parameter servers, used only by ``ParameterServer``. ``nodes``: number of nodes, which hold the ranks in rank order;
    None: one rank per node. ``tensors``: number of parameter tensors, used only by ``LayeredServer``, which reduces
    one tensor after another whatever ``buckets`` is. Its broadcast of the parameters is included. ``MPI`` is modelled
    as the fastest of butterfly, halving-doubling and ring, because the library chooses. ``Torch`` and ``DDP`` are
    rings, as in Gloo. ``NCCL`` is a ring or, between nodes, a double tree if that is faster.
    """
    part = nbytes / buckets
    if collective == "LayeredServer":
        to_server, from_server = layered_server_s(nbytes, n, link, tensors)
        return np.where(np.asarray(n) > 1, to_server + from_server, 0.0)
    if collective in ("Ring", "Torch", "DDP"):
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
