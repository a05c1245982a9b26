"""The time to fetch a dataset to the nodes of a plan."""

from collections.abc import Sequence

SOURCE_BANDWIDTH_Bps = 1.25e9
"""Bandwidth of the server or object store for all nodes together, assumed to be 10 Gbit/s."""


def fetch_s(
    node_nbytes: Sequence[float], link_Bps: float, disk_Bps: float, source_Bps: float = SOURCE_BANDWIDTH_Bps
) -> float:
    """Return the seconds until every node has its data.

    The source sends all bytes. Each node receives its own bytes over its link and writes them to its disk at the same
    time:

        max(Σ bytes / source, max bytes / min(link, disk))

    ``node_nbytes``: bytes that each node fetches. ``link_Bps``: network bandwidth of a node. ``disk_Bps``: bandwidth at
    which a node writes to its disk. ``source_Bps``: bandwidth of the server or object store for all nodes together.
    """
    return max(sum(node_nbytes) / source_Bps, max(node_nbytes, default=0.0) / min(link_Bps, disk_Bps))
