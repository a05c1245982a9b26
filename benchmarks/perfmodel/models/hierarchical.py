"""Hierarchical all-reduce: rings between nodes for each rank of a node. No collective of the trainer does it."""

import numpy as np

from dljob.perf.step.communication import Link, Number, ring_s


def hierarchical_s(nbytes: float, nodes: Number, per_node: int, inside: Link, between: Link, nics: int = 1) -> Number:
    """Reduce-scatter within each node, a ring over nodes for each of its ranks, all-gather within (Cho et al. 2019).

    The ``per_node`` rings carry V/g each and share the node's ``nics`` network cards: a node's links take in 2 (m-1)/m
    V over all cards, however many ranks there are.
    """
    local = (per_node - 1) / per_node * nbytes
    within = 2 * (per_node - 1) * inside.latency_s + 2 * local / inside.bandwidth_Bps + local / inside.reduce_Bps
    shared = Link(between.latency_s, between.bandwidth_Bps * nics / per_node, between.reduce_Bps, between.name)
    return within + np.where(np.asarray(nodes) > 1, ring_s(nbytes / per_node, nodes, shared), 0.0)
