"""Tests of the time in which the nodes of a plan fetch their data: it is a part of the training."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.cluster import ClusterView
from dljob.cluster.domains import Spot
from dljob.cluster.hardware import KEY, Hardware, LinkSpeed
from dljob.perf.step.interruptions import RESTART_S
from dljob.planner import Learned, Request, Storage
from dljob.planner.candidates.cost.interrupted import interruptions_of
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.node_layout import Layout
from dljob.planner.candidates.options import options
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.search.screen import Screen
from dljob.planner.types import Choice
from dljob.planner.types.texts import of_which
from support.planner_questions import DIGITS, decided, view

GB = 10**9
FAST_DISK = {(KEY, "cpu"): Learned(hardware=Hardware(disk_write_Bps=2e9))}


def stored(nbytes: int | None = 100 * GB, *, sharded: bool = False) -> Storage:
    return Storage(200 * GB, nbytes, sharded, divisible=sharded)


def on(count: int, bandwidth: str | None = "1G") -> ClusterView:
    """Return nodes with one CPU each, whose network has 1 GB/s."""
    return view({"count": count, "cpu": 1, "memory": "4Gi", **({"bandwidth": bandwidth} if bandwidth else {})})


def asked(storage: Storage | None, **changes: Any) -> Request:
    return replace(DIGITS, total_steps=3750, storage=storage, **changes)


@pytest.mark.parametrize(
    ("nodes", "sharded", "bandwidth", "hardware", "seconds"),
    [
        (1, False, "1G", Hardware(disk_write_Bps=2e9), 100.0),  # its network
        (1, False, "1G", Hardware(disk_write_Bps=0.8e9), 125.0),  # its disk
        (1, False, "1G", Hardware(), 200.0),  # a disk is assumed to write 0.5 GB/s
        (1, False, None, Hardware(disk_write_Bps=2e9, far=LinkSpeed(1e-4, 0.4e9)), 250.0),  # the measured network
        (1, False, None, Hardware(disk_write_Bps=9e9), 80.0),  # 10 Gbit/s of the node, as of the source
        (4, False, "1G", Hardware(disk_write_Bps=2e9), 320.0),  # the source sends 400 GB
        (4, True, "1G", Hardware(disk_write_Bps=2e9), 80.0),  # the source sends 100 GB
        (4, True, "0.1G", Hardware(disk_write_Bps=2e9), 250.0),  # a node gets 25 GB
    ],
)
def test_the_slowest_of_source_network_and_disk_counts(
    nodes: int, sharded: bool, bandwidth: str | None, hardware: Hardware, seconds: float
) -> None:
    request = asked(stored(sharded=sharded), nodes_min=nodes, nodes_max=nodes, devices=("cpu",))
    found = decided(request, on(nodes, bandwidth), {(KEY, "cpu"): Learned(hardware=hardware)}).chosen.prediction
    assert found.fetch_s == pytest.approx(seconds, rel=0.05 if sharded else 1e-6)


def test_a_fetch_that_takes_longer_than_the_deadline_is_named() -> None:
    found = decided(asked(stored(), deadline_s=60.0), on(1), FAST_DISK)
    assert found.warning is not None and "no plan meets the deadline of 1m00s" in found.warning
    assert "(median, of which fetching the data takes 1m40s)" in found.warning
    assert decided(asked(stored(), deadline_s=3600.0), on(1), FAST_DISK).warning is None
    assert decided(asked(None, deadline_s=3600.0), on(1), FAST_DISK).chosen.prediction.total_s < 100


@pytest.mark.parametrize("storage", [None, stored(None)])
def test_data_that_is_not_fetched_or_of_unknown_size_changes_nothing(storage: Storage | None) -> None:
    found = decided(asked(storage), on(2), FAST_DISK).chosen.prediction
    assert found.fetch_s == 0.0 and found == decided(asked(None), on(2), FAST_DISK).chosen.prediction


@pytest.mark.parametrize("strategy", ["Data", "Pipeline", "Tensor"])
@settings(max_examples=10)
@given(nbytes=st.integers(10**9, 10**13), nodes=st.integers(2, 3))
def test_time_energy_and_cost_grow_by_the_fetch(
    strategy: Literal["Data", "Pipeline", "Tensor"], nbytes: int, nodes: int
) -> None:
    """The devices are idle meanwhile. Ranks that split the model fetch the data, too."""
    fields: dict[str, Any] = {
        "model": "gpt-mini", "dataset": "python-source", "strategy": strategy, "nodes_min": nodes, "nodes_max": nodes,
        "global_batch": 32,
    }  # fmt: skip
    groups = decided(asked(None, **fields), on(nodes)).chosen.groups
    made, bare = (decided(asked(s, **fields), on(nodes)).chosen for s in (stored(nbytes), None))
    p, q = made.prediction, bare.prediction
    assert made.groups == bare.groups == groups
    assert p.fetch_s == pytest.approx(nbytes * max(nodes / 1.25e9, 1 / 0.5e9))
    assert p.total_s - q.total_s == pytest.approx(p.fetch_s) and p.step_s == q.step_s
    assert p.total_p90_s / q.total_p90_s == pytest.approx(p.total_s / q.total_s)
    assert p.energy_J is not None and q.energy_J is not None and p.cost_usd is not None and q.cost_usd is not None
    assert 0 < (p.energy_J - q.energy_J) / p.fetch_s < q.energy_J / q.total_s, "idle devices draw less"
    assert (p.cost_usd - q.cost_usd) / p.fetch_s == pytest.approx(q.cost_usd / q.total_s, rel=1e-6)


def test_copies_on_many_nodes_can_cost_more_than_their_steps_save() -> None:
    """Shards cost the same on any number of nodes, so that more nodes pay."""
    cluster = on(6)
    nodes = {
        name: sum(g.nodes for g in decided(asked(storage), cluster, FAST_DISK).chosen.groups)
        for name, storage in (("none", None), ("full", stored()), ("shards", stored(sharded=True)))
    }
    assert nodes["full"] == 1 < nodes["none"] <= nodes["shards"]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("interruptions_per_h", [0.0, 1.0])
def test_screening_counts_the_fetch(sharded: bool, interruptions_per_h: float) -> None:
    """The search would otherwise leave out the best numbers of nodes."""
    request = asked(stored(sharded=sharded), global_batch=512)
    request = replace(request, domain=replace(request.domain, interruptions_per_h=interruptions_per_h))
    workload = workload_of(request)
    (pool,) = eligible(request, on(8)).pools
    (option,) = options(pool, Layout(1, 1.0), workload, request, FAST_DISK)
    screen = Screen([option], request, workload)
    for nodes in (1, 3, 8):
        found = screen.screen(screen.types.rows([{0: nodes}]))
        exact = evaluate([Part(option, nodes)], screen.collectives[found.collective[0]], request, workload)
        assert isinstance(exact, Choice)
        p = exact.prediction
        assert p.fetch_s > p.total_s / 6
        trained_s = p.total_s - p.fetch_s
        beside_s = p.evaluations_s * trained_s / (trained_s - p.interruption_s)
        # The screen leaves out that a new node fetches the data again.
        tolerance = 0.05 if interruptions_per_h else 0.03
        assert found.step_s[0] * request.total_steps == pytest.approx(p.total_s - beside_s, rel=tolerance)


def test_a_new_node_fetches_the_data_again() -> None:
    """Restarts after an interruption take the longer, the more data the new node has to fetch."""
    request = asked(stored(), nodes_min=2, nodes_max=2, spot=Spot(interruptions_per_h=2.0))
    spot_node = {"cpu": 1, "memory": "4Gi", "bandwidth": "1G", "labels": {"karpenter.sh/capacity-type": "spot"}}
    cluster = view({"count": 2, **spot_node})
    with_data, bare = (
        decided(replace(request, storage=storage), cluster, FAST_DISK).chosen.prediction for storage in (stored(), None)
    )
    assert with_data.interruption_s > bare.interruption_s > 0
    spot = replace(request, domain=replace(request.domain, interruptions_per_h=2.0))
    model = interruptions_of(spot, workload_of(request))
    assert model.restart_s == RESTART_S
    calm_s = bare.total_s - bare.interruption_s - bare.checkpoints_s
    expected_s = float(replace(model, restart_s=RESTART_S + 100.0).expected_s(calm_s, 2))
    assert with_data.total_s == pytest.approx(expected_s + with_data.fetch_s)


@pytest.mark.parametrize(
    ("fetch_s", "evaluations_s", "checkpoints_s", "text"),
    [
        (0.0, 0.0, 0.0, ""),
        (5.0, 5.0, 5.0, ""),
        (100.0, 0.0, 0.0, ", of which fetching the data takes 1m40s"),
        (0.0, 12.34, 1.0, ", of which evaluations take 12.3s"),
        (100.0, 12.34, 0.0, ", of which fetching the data takes 1m40s and evaluations take 12.3s"),
        (0.0, 0.0, 7.0, ", of which checkpoints take 7s"),
        (
            90.0, 12.34, 7.0,
            ", of which fetching the data takes 1m30s, evaluations take 12.3s and checkpoints take 7s",
        ),
    ],
)  # fmt: skip
def test_only_large_parts_are_shown(fetch_s: float, evaluations_s: float, checkpoints_s: float, text: str) -> None:
    assert of_which(120.0, fetch_s, evaluations_s, checkpoints_s) == text
