"""Tests of the cost models of collectives: monotonicity, limits and comparisons."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.perfmodel.models.hierarchical import hierarchical_s
from hypothesis import given
from hypothesis import strategies as st

from dljob.perf.step.communication import Link, allreduce_s, double_tree_s, halving_doubling_s, ring_s

links = st.builds(Link, st.floats(0, 1e-2), st.floats(1e6, 1e12), st.floats(1e8, 1e12))
sizes = st.floats(1.0, 1e11)
ranks = st.integers(2, 2000)


@given(sizes, st.integers(1, 11), links)
def test_halving_doubling_equals_a_ring_with_fewer_messages_on_powers_of_two(v: float, k: int, link: Link) -> None:
    n = 2**k
    saved = 2 * (n - 1 - k) * link.latency_s
    assert halving_doubling_s(v, n, link) + saved == pytest.approx(ring_s(v, n, link))


@given(sizes, st.integers(1, 5), st.integers(0, 4), links)
def test_halving_doubling_reduces_within_nodes_first(v: float, k: int, inside: int, link: Link) -> None:
    """With g ranks per node, the network carries V (1 - 1/m) each way, as with m nodes of one rank."""
    nodes, group = 2**k, 2**inside
    link = replace(link, near_latency_s=link.latency_s / 3)
    between = halving_doubling_s(v, nodes, replace(link, reduce_Bps=1e30))
    within = 2 * (1 - 1 / group) * v / link.bandwidth_Bps + 2 * inside * link.inside_s
    found = halving_doubling_s(v, nodes * group, replace(link, reduce_Bps=1e30), nodes)
    assert found == pytest.approx(between + within)


@given(sizes, st.integers(2, 10), links)
def test_halving_doubling_costs_more_off_powers_of_two(v: float, k: int, link: Link) -> None:
    assert halving_doubling_s(v, 2**k + 1, link) > halving_doubling_s(v, 2**k, link)


@given(sizes, sizes, ranks, links)
def test_more_bytes_are_never_faster(a: float, b: float, n: int, link: Link) -> None:
    small, large = sorted((a, b))
    for cost in (halving_doubling_s, double_tree_s):
        assert cost(small, n, link) <= cost(large, n, link) * (1 + 1e-12)
    assert hierarchical_s(small, n, 8, link, link) <= hierarchical_s(large, n, 8, link, link) * (1 + 1e-12)


def test_double_tree_is_faster_than_a_ring_on_many_nodes_and_approaches_its_volume() -> None:
    link = Link(1e-5, 1e9, 1e15)
    assert double_tree_s(1e6, 1024, link) < 0.2 * ring_s(1e6, 1024, link)
    assert double_tree_s(1e12, 1024, link) == pytest.approx(2e12 / 1e9, rel=0.01)


@given(sizes, st.integers(2, 500), links)
def test_hierarchical_with_one_rank_per_node_equals_a_ring(v: float, nodes: int, link: Link) -> None:
    assert hierarchical_s(v, nodes, 1, link, link) == pytest.approx(ring_s(v, nodes, link))


@given(sizes, st.integers(2, 16), links)
def test_hierarchical_on_one_node_equals_a_ring_of_its_ranks(v: float, g: int, inside: Link) -> None:
    assert hierarchical_s(v, 1, g, inside, Link(1.0, 1.0)) == pytest.approx(ring_s(v, g, inside))


@given(sizes, st.integers(2, 500), links, links, st.integers(1, 7))
def test_more_network_cards_are_never_slower(v: float, nodes: int, inside: Link, between: Link, nics: int) -> None:
    assert hierarchical_s(v, nodes, 8, inside, between, nics + 1) <= hierarchical_s(v, nodes, 8, inside, between, nics)


def test_hierarchical_is_faster_than_one_ring_over_a_slow_network() -> None:
    """64 nodes of 8 with NVLink over 100 Gbit send the same bytes in fewer network steps."""
    inside, between = Link(5e-6, 150e9, 1e12), Link(20e-6, 12.5e9, 1e12)
    assert hierarchical_s(1e8, 64, 8, inside, between) < 0.7 * ring_s(1e8, 512, between)


@given(sizes, st.integers(1, 64), st.integers(2, 8), links, st.floats(0, 1))
def test_same_ranks_on_more_nodes_are_never_faster(v: float, nodes: int, g: int, link: Link, near: float) -> None:
    """Each additional node adds a network hop, which costs more if hops inside nodes are cheaper."""
    n, link = 8 * nodes * g, replace(link, near_latency_s=near * link.latency_s)
    for cost in (ring_s, double_tree_s):
        assert cost(v, n, link, n) == pytest.approx(cost(v, n, link)), (
            "without a number of nodes, each node has one rank"
        )
    saved_s = 2 * (n - 1 - 8 * nodes) * (link.latency_s - link.inside_s)
    assert ring_s(v, n, link, 8 * nodes) == pytest.approx(ring_s(v, n, link) - saved_s)
    assert ring_s(v, n, link, 4 * nodes) <= ring_s(v, n, link, 8 * nodes) * (1 + 1e-12)


def test_ring_hops_depend_on_the_number_of_nodes() -> None:
    """With two (four) nodes, two (four) hops take 60 us and five (three) hops 10 us, each way."""
    link = Link(60e-6, 1e30, 1e30, near_latency_s=10e-6)
    assert [float(ring_s(1.0, 8, link, m)) for m in (1, 2, 4, 8)] == pytest.approx([140e-6, 340e-6, 540e-6, 840e-6])


@given(sizes, st.integers(1, 256), st.integers(1, 8), links)
def test_nccl_uses_the_faster_of_ring_and_double_tree(v: float, nodes: int, g: int, link: Link) -> None:
    n = nodes * g
    nccl, ring = allreduce_s("NCCL", v, float(n), link, nodes=float(nodes)), ring_s(v, n, link, nodes)
    assert nccl <= ring
    if nodes == 1 and n > 1:
        assert nccl == ring, "there is no tree of nodes within a node"
    if nodes > 1:
        assert nccl == min(ring, double_tree_s(v, n, link, nodes))


@given(sizes, st.lists(ranks, min_size=1, max_size=4), links)
def test_arrays_and_scalars_give_equal_times(v: float, ns: list[int], link: Link) -> None:
    for cost in (halving_doubling_s, double_tree_s):
        assert cost(v, np.array(ns, dtype=float), link) == pytest.approx([float(cost(v, n, link)) for n in ns])


A100_NODE, DGX_NETWORK_Bps = 0.8 * 300e9, 8 * 25e9
"""Bandwidth that NCCL reaches between the GPUs of a DGX A100, and that of its eight network cards (200 Gbit/s each)."""


def bus_Bps(nbytes: float, n: int, link: Link, nodes: int) -> float:  # noqa: N802 - the unit is part of the name
    """Return the bus bandwidth as nccl-tests define it: 2 (n-1)/n bytes over the time."""
    return 2 * (n - 1) / n * nbytes / float(allreduce_s("NCCL", nbytes, n, link, nodes=nodes))


@pytest.mark.parametrize(
    ("ranks", "nodes", "published_Bps"),
    [
        (8, 1, 229e9),  # vTrain (MICRO 2024), artifact: 1 GiB on 8 A100
        (4, 1, 222e9),
        (2, 1, 197e9),
        (32, 4, 192e9),  # NVIDIA/nccl, issue 812: DGX A100 with eight cards of 200 Gbit/s
    ],
)
def test_predictions_of_large_nccl_all_reduces_agree_with_published_ones(
    ranks: int, nodes: int, published_Bps: float
) -> None:
    own = Link(10e-6, A100_NODE, 1e30)
    link = Link(60e-6, DGX_NETWORK_Bps, 1e30, near_latency_s=10e-6, near_bandwidth_Bps=A100_NODE)
    found = bus_Bps(2**30, ranks, own if nodes == 1 else link, nodes)
    assert found == pytest.approx(published_Bps, rel=0.25)


def test_a_hierarchical_all_reduce_is_not_what_nccl_does() -> None:
    """Halves within nodes and rings between them, one after the other, would reach 152 GB/s, and NCCL reaches 192."""
    within, between = Link(0.0, A100_NODE, 1e30), Link(0.0, DGX_NETWORK_Bps, 1e30)
    hierarchical = 2 * 15 / 16 / float(hierarchical_s(1.0, 2, 8, within, between, 1))
    assert hierarchical < 0.85 * 192e9


def test_the_slower_of_network_and_links_within_nodes_limits_a_ring() -> None:
    """Eight GPUs on PCIe (16 GB/s) do not use a network of 100 GB/s; with NVLink, a network of 12.5 GB/s limits."""
    pcie, nvlink = (Link(0.0, 100e9, 1e30, near_bandwidth_Bps=16e9), Link(0.0, 12.5e9, 1e30, near_bandwidth_Bps=240e9))
    volume = 2 * 15 / 16 * 1e9
    assert ring_s(1e9, 16, pcie, 2) == pytest.approx(volume / 16e9)
    assert ring_s(1e9, 16, nvlink, 2) == pytest.approx(volume / 12.5e9)
    assert ring_s(1e9, 2, pcie, 2) == pytest.approx(1e9 / 100e9), "one rank per node uses no link within a node"


def test_a_tree_over_two_nodes_sends_half_of_the_bytes() -> None:
    """NVIDIA/nccl, issue 946: a tree over two nodes may reach twice the bus bandwidth of the network."""
    link = Link(0.0, 12.5e9, 1e30, near_bandwidth_Bps=240e9)
    assert double_tree_s(1e9, 16, link, 2) == pytest.approx(1e9 / 12.5e9)
    assert double_tree_s(1e9, 32, link, 4) == pytest.approx(2e9 / 12.5e9)
    slow = replace(link, near_bandwidth_Bps=10e9)
    assert double_tree_s(1e9, 16, slow, 2) == pytest.approx(2e9 / 10e9), "each rank sends everything up and down"
    assert bus_Bps(1e9, 16, link, 2) > 1.8 * 12.5e9
