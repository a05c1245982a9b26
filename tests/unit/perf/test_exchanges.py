"""Tests of the time of collectives that scripts start themselves over gloo: laws, and a table of the formulas."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.perf.step.backends import backend
from dljob.perf.step.communication import Link, Links, ring_s
from dljob.perf.step.exchanges import IN_BACKWARD, collective_s, exchanges_s, over_gloo
from dljob.perf.workload.observed import Collectives

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "barrier", "gather", "all_to_all",
         "message", "unheard of")  # fmt: skip
links = st.builds(Link, st.floats(1e-6, 1e-2), st.floats(1e6, 1e12), st.floats(1e8, 1e12))
sizes = st.integers(0, 10**11)
counted = st.builds(Collectives, st.sampled_from(KINDS), st.integers(1, 1000), sizes)
several = st.lists(counted, max_size=4)
SLOW = Link(1e-3, 1e6, inf)


@pytest.mark.parametrize(
    ("kind", "two", "five"),
    [
        ("all_reduce", (2, 1), (8, 8 / 5)),
        ("reduce", (2, 1), (8, 8 / 5)),
        ("reduce_scatter", (2, 1), (8, 8 / 5)),
        ("all_gather", (2, 1 / 2), (8, 4 / 5)),
        ("broadcast", (1, 1), (3, 3)),
        ("barrier", (1, 0), (3, 0)),
        ("gather", (1, 1 / 2), (1, 4 / 5)),
        ("all_to_all", (1, 1 / 2), (4, 4 / 5)),
        ("message", (1, 1), (1, 1)),
        ("unheard of", (2, 1), (8, 8 / 5)),
    ],
)
def test_collectives_have_the_messages_and_the_volume_of_their_algorithm(
    kind: str, two: tuple[float, float], five: tuple[float, float]
) -> None:
    """(Latencies, volume / buffer) on two ranks and on five, if adding and copying take no time."""
    for n, (messages, volume) in ((2, two), (5, five)):
        assert collective_s(kind, 1e6, n, SLOW) == pytest.approx(messages * 1e-3 + volume)


@given(several, links, st.floats(0, 10))
def test_one_rank_exchanges_nothing(found: list[Collectives], link: Link, compute_s: float) -> None:
    assert exchanges_s(found, compute_s, 1, link, 1, 0.5) == 0


@given(several, counted, links, st.integers(2, 500), st.floats(0, 10))
def test_more_collectives_take_longer(
    found: list[Collectives], more: Collectives, link: Link, n: int, compute_s: float
) -> None:
    before, after = (float(exchanges_s(each, compute_s, n, link, n, 0.5)) for each in (found, [*found, more]))
    assert after > before


@given(counted, sizes, links, st.integers(2, 500))
def test_more_bytes_are_never_faster(each: Collectives, more: int, link: Link, n: int) -> None:
    small, large = (float(exchanges_s([replace(each, nbytes=each.nbytes + b)], 0, n, link, n, 0.5)) for b in (0, more))
    assert small <= large * (1 + 1e-9)


@given(several, links, st.integers(2, 64), st.floats(0, 10))
def test_nothing_overlaps_on_one_node_with_a_core_for_each_rank(
    found: list[Collectives], link: Link, n: int, compute_s: float
) -> None:
    """Gloo's threads then need the core on which the rank computes."""
    felt = (float(exchanges_s(found, s, n, link, 1, 0.5, 1.0, link.bandwidth_Bps)) for s in (0.0, compute_s))
    once = sum(each.count * float(collective_s(each.kind, each.nbytes / each.count, n, link, 1)) for each in found)
    assert list(felt) == pytest.approx([once, once])


@given(counted, links, st.integers(2, 64), st.floats(0, 10), st.floats(1, 64))
def test_only_bytes_of_gradients_overlap(each: Collectives, link: Link, n: int, compute_s: float, cores: float) -> None:
    felt = float(exchanges_s([each], compute_s, n, link, n, 0.5, cores))
    whole, waking = (
        each.count * float(collective_s(each.kind, nbytes / each.count, n, link, n)) for nbytes in (each.nbytes, 0)
    )
    assert waking * (1 - 1e-9) <= felt <= whole * (1 + 1e-9)
    if each.kind not in IN_BACKWARD:
        assert felt == pytest.approx(whole)


@given(links, st.floats(1e-6, 1e-3), st.integers(2, 64))
def test_links_over_gloo(link: Link, hop_s: float, n: int) -> None:
    near, far, ratios = over_gloo(link, 1, hop_s), over_gloo(link, n, hop_s), backend("Gloo")
    assert near.latency_s == hop_s <= far.latency_s and far.latency_s >= ratios.between.latency * link.latency_s
    assert near.bandwidth_Bps == pytest.approx(ratios.within.bandwidth * link.bandwidth_Bps)
    assert far.bandwidth_Bps == pytest.approx(ratios.between.bandwidth * link.bandwidth_Bps)
    assert collective_s("all_reduce", 1e6, n, near, 1) == pytest.approx(ring_s(1e6, n, near, 1))


@given(several, st.lists(st.tuples(links, st.integers(1, 64), st.integers(1, 4)), min_size=1, max_size=5))
def test_arrays_have_the_times_of_their_elements(found: list[Collectives], places: list[tuple[Link, int, int]]) -> None:
    """The search compares many candidates at once."""
    each_s = [
        float(exchanges_s(found, 0.1, n, over_gloo(link, min(n, m), 1e-4), min(n, m), 0.5, 2.0, 1e9))
        for link, n, m in places
    ]
    ranks = np.array([float(n) for _, n, _ in places])
    nodes = np.minimum(ranks, np.array([float(m) for *_, m in places]))
    together = Links(*(np.array([getattr(link, name) for link, *_ in places])
                       for name in ("latency_s", "bandwidth_Bps", "reduce_Bps", "inside_s", "inside_Bps")))  # fmt: skip
    hops_s = np.full(len(places), 1e-4)
    arrays = exchanges_s(found, 0.1, ranks, over_gloo(together, nodes, hops_s), nodes, 0.5, 2.0, 1e9)
    assert np.broadcast_to(arrays, ranks.shape).tolist() == pytest.approx(each_s)
