"""Text about the links between the ranks of the chosen plan, for users."""

from collections.abc import Sequence
from math import isfinite

from dljob.planner.candidates.evaluate import Part
from dljob.planner.candidates.options import link_of
from dljob.planner.types.texts import duration, rate


def links_text(parts: Sequence[Part]) -> str | None:
    """Return the slowest links between the ranks of a plan, and where their figures come from; None for one rank.

    Example: 'between nodes 10 Gbit/s, 60us (an assumed network, that of NVIDIA-L4); within a node 1920 Gbit/s'.
    ``parts``: the groups of nodes of the plan.
    """
    nodes, chosen = [part.nodes for part in parts], [part.option for part in parts]
    if sum(part.ranks for part in parts) < 2:
        return None
    link, _ = link_of(chosen, nodes)
    latency = duration(link.latency_s)
    if sum(nodes) == 1:
        source = ", measured" if "measured" in link.name else ""
        return f"within the node {rate(link.bandwidth_Bps)}, {latency}{source}"
    slow = [part for part in parts if part.option.links[1][0].bandwidth_Bps == link.bandwidth_Bps]
    of = f", that of {slow[0].option.label}" if 0 < len(slow) < len(parts) else ""
    text = f"between nodes {rate(link.bandwidth_Bps)}, {latency} ({link.name}{of})"
    return f"{text}; within a node {rate(link.inside_Bps)}" if isfinite(link.inside_Bps) else text
