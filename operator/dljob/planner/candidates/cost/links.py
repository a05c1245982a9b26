"""Links between nodes: the network of a device type, and the slowest link of a plan with several types.

In a plan with several device types, gradients cross three kinds of links: between two nodes of a type, if the plan has
as many, and between nodes of two types. A probe may have measured the latter. Otherwise, such a link is as slow as the
slower of the networks at its two ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from dljob.calibrate.learned import Learned
from dljob.cluster.hardware import Hardware
from dljob.perf.step.backends import Backend
from dljob.perf.step.communication import TCP_LATENCY_S, ETHERNET_BANDWIDTH_Bps, Link
from dljob.perf.step.step import LINK_SPREAD
from dljob.planner.candidates.pools import Pool

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Network:
    """A link between nodes. ``spread``: standard deviation of log(measured / predicted) of times on it."""

    latency_s: float
    bandwidth_Bps: float
    name: str
    spread: float


def network_of(pool: Pool, hardware: Hardware | None, learned: Learned | None) -> Network:
    """Return the network between the nodes of a pool.

    The bandwidth is the one that runs of the job's model have measured (``learned``), else that in the nodes'
    annotations, else the hardware probe's, else that of 10 Gbit Ethernet. If a plan may span racks or zones, the
    network between them limits the link.
    """
    learned, probed = learned or Learned(), hardware and hardware.far
    latency_s, spread = learned.link_latency_s, LINK_SPREAD["probe" if probed else "catalogue"]
    if learned.link_bandwidth_Bps:
        bandwidth_Bps, name = learned.link_bandwidth_Bps, "the measured network"
        spread = spread if latency_s is None else LINK_SPREAD["profile"]
        spread = spread if learned.link_spread is None else learned.link_spread
    elif pool.bandwidth_Bps:  # An administrator knows RDMA and several cards, which the probe does not use.
        bandwidth_Bps, name, spread = pool.bandwidth_Bps, "the network", LINK_SPREAD["catalogue"]
    elif probed:
        bandwidth_Bps, name = probed.bandwidth_Bps, "the network measured by the probe"
    else:
        bandwidth_Bps, name = ETHERNET_BANDWIDTH_Bps, "an assumed network"
    if latency_s is None:
        latency_s = probed.latency_s if probed else TCP_LATENCY_S
    return _within_border(Network(latency_s, bandwidth_Bps, name, spread), pool)


def _within_border(network: Network, pool: Pool) -> Network:
    """Return the network, or that between the racks or zones that a plan may span, if it is slower."""
    if (crossing := pool.crossing) is None:
        return network
    slower = crossing.bandwidth_Bps is not None and crossing.bandwidth_Bps < network.bandwidth_Bps
    return Network(
        max(network.latency_s, crossing.latency_s or 0.0),
        min(network.bandwidth_Bps, crossing.bandwidth_Bps or network.bandwidth_Bps),
        "the network between racks or zones" if slower else network.name,
        network.spread,
    )


@dataclass(frozen=True)
class End:
    """The nodes of one device type, as one end of links to nodes of other types."""

    pool: Pool
    hardware: Hardware | None

    def measured(self, other: "End") -> Network | None:
        """Return the link between nodes of both types that a probe has measured; None if none has.

        Return None also if annotations state the bandwidth of both: an administrator knows RDMA and several cards. The
        annotation of one type is an upper bound.
        """
        if self.pool.bandwidth_Bps and other.pool.bandwidth_Bps:
            return None
        sides = ((self, other), (other, self))
        found = [link for a, b in sides if a.hardware and (link := a.hardware.link_to(b.pool.device)) is not None]
        if not found:
            return None
        stated = [end.pool.bandwidth_Bps for end in (self, other) if end.pool.bandwidth_Bps]
        name = f"the measured network between {self.pool.device} and {other.pool.device}"
        bandwidth_Bps = min([found[0].bandwidth_Bps, *stated])
        return _within_border(Network(found[0].latency_s, bandwidth_Bps, name, LINK_SPREAD["probe"]), self.pool)


def slowest(ends: Sequence[End], nodes: Sequence[int], own: Sequence[Network]) -> Network:
    """Return the slowest link between the nodes of a plan: the lowest bandwidth and the highest latency of all links.

    ``nodes``: number of nodes of each type. ``own``: the network between the nodes of each type.
    """
    links, counts = [], [count > 1 for count in nodes]
    for i, j in combinations(range(len(ends)), 2):
        pair = ends[i].measured(ends[j])
        if pair is None:
            counts[i] = counts[j] = True
        else:
            links.append(pair)
    links += [network for network, counted in zip(own, counts, strict=True) if counted]
    narrow = min(links, key=lambda link: link.bandwidth_Bps)
    latency_s, spread = max(link.latency_s for link in links), max(link.spread for link in links)
    return Network(latency_s, narrow.bandwidth_Bps, narrow.name, spread)


class Between:
    """The measured links between device types, to find the slowest link of many candidates at once (``slowest``)."""

    def __init__(self, ends: Sequence[End], backend: Backend | None) -> None:
        """``backend``: communication backend by whose ratios links are multiplied; None: by none."""
        self._pairs = []
        for i, j in combinations(range(len(ends)), 2):
            if (found := ends[i].measured(ends[j])) is not None:
                link, spread = Link(found.latency_s, found.bandwidth_Bps), found.spread
                link, spread = (link, spread) if backend is None else backend.over(link, spread, 2)
                self._pairs.append((i, j, link.latency_s, link.bandwidth_Bps, spread))

    def slowest(
        self, nodes: NDArray[np.int64], latency_s: Floats, bandwidth_Bps: Floats, spread: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return (latency in s, bandwidth in bytes/s, spread) of the slowest link between nodes of each candidate.

        Arguments: arrays of shape (device types, candidates). ``nodes``: number of nodes. The others: the network
        between the nodes of a type; 0, infinite and 0 for a type that a candidate does not use.
        """
        used = nodes > 0
        # A network between nodes of a type counts if the plan has two of them, or for links that nobody has measured.
        unmeasured = np.broadcast_to(used.sum(axis=0) - 1, nodes.shape).copy()
        for i, j, *_ in self._pairs:
            both = used[i] & used[j]
            unmeasured[i] -= both
            unmeasured[j] -= both
        counted = used & ((nodes > 1) | (unmeasured > 0) | (used.sum(axis=0) == 1))
        worst = np.where(counted, latency_s, 0.0).max(axis=0)
        least = np.where(counted, bandwidth_Bps, np.inf).min(axis=0)
        widest = np.where(counted, spread, 0.0).max(axis=0)
        for i, j, pair_s, pair_Bps, pair_spread in self._pairs:
            both = used[i] & used[j]
            worst = np.where(both, np.maximum(worst, pair_s), worst)
            least = np.where(both, np.minimum(least, pair_Bps), least)
            widest = np.where(both, np.maximum(widest, pair_spread), widest)
        return worst, least, widest
