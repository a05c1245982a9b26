"""The time to fetch a dataset to the nodes of a plan."""

import numpy as np
from numpy.typing import NDArray

SOURCE_BANDWIDTH_Bps = 1.25e9
"""Bandwidth of the server or object store for all nodes together, assumed to be 10 Gbit/s."""

Number = float | NDArray[np.float64]


def fetch_s(
    total_nbytes: Number, node_nbytes: Number, node_Bps: Number, source_Bps: float = SOURCE_BANDWIDTH_Bps
) -> Number:
    """Return the seconds until every node has its data.

    The source sends all bytes. Each node receives its own bytes over its link and writes them to its disk at the same
    time:

        max(all bytes / source, most bytes of a node / min(link, disk))

    ``total_nbytes``: bytes that all nodes fetch together. ``node_nbytes``: most bytes that a node fetches.
    ``node_Bps``: lower one of the bandwidths of a node's network and of writes to its disk. ``source_Bps``: bandwidth
    of the server or object store for all nodes together.
    """
    return np.maximum(total_nbytes / source_Bps, node_nbytes / node_Bps)
