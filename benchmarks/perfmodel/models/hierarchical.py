"""Model the time of a hierarchical all-reduce, which no collective of the trainer implements."""

import numpy as np

from dljob.perf.step.communication import Link, Number, ring_s


def hierarchical_s(nbytes: float, nodes: Number, per_node: int, inside: Link, between: Link, nics: int = 1) -> Number:
    """Return the time of reduce-scatter in each node, one ring over nodes per rank, and all-gather (Cho et al. 2019).

    The ``per_node`` rings carry V/g each and share the node's ``nics`` network cards. A node receives 2 (m-1)/m V over
    all cards, whatever the number of ranks.
    """
    local = (per_node - 1) / per_node * nbytes
    within = 2 * (per_node - 1) * inside.latency_s + 2 * local / inside.bandwidth_Bps + local / inside.reduce_Bps
    shared = Link(between.latency_s, between.bandwidth_Bps * nics / per_node, between.reduce_Bps, between.name)
    return within + np.where(np.asarray(nodes) > 1, ring_s(nbytes / per_node, nodes, shared), 0.0)
