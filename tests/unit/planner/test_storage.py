"""Tests of data on the nodes' disks: what plans refuse, how shards limit local batch sizes, and the prices of both."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.api import DLJobSpec
from dljob.cli import tables
from dljob.cluster import ClusterView
from dljob.job.defaults import parse_defaults, site_of
from dljob.job.plan.request import planner_request
from dljob.job.plan.trainer import enough_for_shards
from dljob.perf.resources.data_fetch import fetch_s
from dljob.planner import Decision, Infeasible, Storage, plan
from dljob.planner.types.texts import duration
from support.builders import Json, nodes

GI = 2**30
DATA: Json = {"uri": "https://a.example/train.npz", "samples": 1_000_000, "sampleBytes": 40_000, "size": "40Gi"}
SHARDED: Json = {**DATA, "distribution": "Sharded", "size": "20Gi"}


def cluster(count: int = 4, storage: str | None = "100Gi", **more: object) -> ClusterView:
    return nodes(
        {"name": "n", "count": count, "cpu": 2, "memory": "8Gi", **({"storage": storage} if storage else {}), **more}
    )


def asked(dataset: Json, view: ClusterView, **changes: object) -> Decision | Infeasible:
    spec = {
        "model": {"name": "lenet"},
        "dataset": dataset,
        "globalBatchSize": 240,
        "epochs": 1,
        "nodes": {"max": 4},
        **changes,
    }
    return plan(planner_request("job", DLJobSpec.model_validate(spec)), view, {})


def refused(dataset: Json, view: ClusterView, **changes: object) -> Infeasible:
    found = asked(dataset, view, **changes)
    assert isinstance(found, Infeasible), found
    assert (found.reason, found.field) == ("DoesNotFit", "spec.dataset.size")
    return found


def planned(dataset: Json, view: ClusterView, **changes: object) -> Decision:
    found = asked(dataset, view, **changes)
    assert isinstance(found, Decision), found
    return found


def test_full_data_that_may_be_compressed_is_not_refused() -> None:
    """Samples in a file may take fewer bytes than in memory, so only the storage of nodes refuses a plan."""
    assert isinstance(asked({**DATA, "size": "10Gi"}, cluster()), Decision)


def test_full_data_beyond_the_storage_of_all_nodes_is_refused() -> None:
    found = refused(DATA, cluster(storage="30Gi"))
    assert found.transient, "nodes may be added"
    assert "found nodes with at most 30 GiB of storage; expected a node with 40 GiB" in found.message
    assert "Sharded" in found.message


def test_nodes_without_the_storage_are_left_out_and_named() -> None:
    view = ClusterView(
        cluster(2, "30Gi").nodes
        + nodes({"name": "big", "count": 2, "cpu": 2, "memory": "8Gi", "storage": "50Gi"}).nodes
    )
    found = planned(DATA, view)
    assert sum(group.nodes for group in found.chosen.groups) <= 2
    assert any(r.reason == "it has 30 GiB of storage, but the data needs 40 GiB (dataset.size)" for r in found.refusals)
    assert isinstance(asked(DATA, cluster(storage=None)), Decision), "unknown storage refuses nothing"


@pytest.mark.parametrize("dataset", [{**DATA, "uri": "pvc://claim/train.npz", "size": None}, {"name": "digits"}])
def test_data_that_nodes_do_not_store_needs_no_storage(dataset: Json) -> None:
    given = {key: value for key, value in dataset.items() if value is not None}
    assert isinstance(asked(given, cluster(storage="1Gi"), model={"name": "digits-cnn"}), Decision)


def test_shards_need_enough_nodes() -> None:
    found = refused(SHARDED, cluster(2))
    assert (
        "found 20 GiB on each of at most 2 nodes; expected at least 20.7 GiB on each, or 3 nodes, for shards of 37.3 GiB"
        in found.message
    )
    assert "2 nodes" in refused(SHARDED, cluster(4), nodes={"max": 2}).message
    assert sum(group.nodes for group in planned(SHARDED, cluster(4)).chosen.groups) >= 3


def test_no_node_gets_more_shards_than_it_has_space_for() -> None:
    """A faster device would get a larger part of the batch otherwise."""
    view = ClusterView(
        nodes({"name": "fast", "device": "fast", "cpu": 16, "memory": "8Gi"}).nodes
        + nodes({"name": "slow", "count": 3, "device": "slow", "cpu": 1, "memory": "8Gi"}).nodes
    )
    found = planned(
        {**SHARDED, "size": "14Gi"},
        view,
        planning={"mode": "Fixed", "groups": [{"device": "fast", "nodes": 1}, {"device": "slow", "nodes": 3}]},
    )
    most = 0.9 * 14 * GI * 240 / 40e9
    for group in found.chosen.groups:
        for node in range(group.nodes):
            assert sum(group.shares[node * group.ranks_per_node : (node + 1) * group.ranks_per_node]) <= most


def test_plan_shows_the_price_of_both() -> None:
    full, sharded = planned(DATA, cluster(4)), planned(SHARDED, cluster(4))
    assert full.data_text is not None and sharded.data_text is not None
    assert full.data_text.startswith("Full: 37.3 GiB on each node, fetched in ")
    assert "; with Sharded: at most " in full.data_text
    assert sharded.data_text.startswith("Sharded: at most ") and "; with Full: 37.3 GiB" in sharded.data_text
    assert any(line == f"Dataset:    {sharded.data_text}" for line in tables.decision(sharded))
    folder = planned({**DATA, "uri": "https://a.example/SHA256SUMS"}, cluster(4))
    assert folder.data_text is not None and "Sharded" not in folder.data_text


def test_unknown_or_local_data_has_no_price() -> None:
    assert planned({"name": "digits"}, cluster(), model={"name": "digits-cnn"}).data_text is None
    assert planned({key: value for key, value in DATA.items() if key != "sampleBytes"}, cluster()).data_text is None


@given(
    node_nbytes=st.lists(st.floats(1, 1e12), min_size=1, max_size=8),
    link=st.floats(1e6, 1e11), disk=st.floats(1e6, 1e10), source=st.floats(1e6, 1e12),
)  # fmt: skip
def test_fetch_takes_the_time_of_the_slowest_part(
    node_nbytes: list[float], link: float, disk: float, source: float
) -> None:
    total, most, rate = sum(node_nbytes), max(node_nbytes), min(link, disk)
    found = fetch_s(total, most, rate, source)
    assert found >= total / source and found >= most / rate
    assert found <= total / source + most / rate
    count = len(node_nbytes)
    assert fetch_s(total / count, most / count, rate, source) <= found, "a part of the data never takes longer"


@given(
    shares=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=5),
    room=st.floats(0.05, 2.0), data=st.data(),
)  # fmt: skip
def test_survivors_of_a_loss_have_space_for_all_shards(
    shares: list[list[int]], room: float, data: st.DataObject
) -> None:
    """With at least as many ranks, no node gets more than its space, if the split before the loss fits."""
    storage, total = Storage(int(1e9 * room / 0.9) + 1, int(1e9), sharded=True), sum(map(sum, shares))
    ranks = [(node, share) for node, each in enumerate(shares) for share in each]
    least = enough_for_shards(storage, shares)
    if least > len(ranks):
        return  # no loss is allowed
    alive = data.draw(st.lists(st.sampled_from(range(len(ranks))), unique=True, min_size=least, max_size=len(ranks)))
    left = sum(ranks[rank][1] for rank in alive)
    for node in range(len(shares)):
        mine = sum(ranks[rank][1] for rank in alive if ranks[rank][0] == node)
        assert mine / left * 1e9 <= storage.shard_room_nbytes * (1 + 1e-6)
    assert total >= left


def test_without_shards_any_rank_may_be_lost() -> None:
    assert enough_for_shards(None, [[4], [4]]) == 1
    assert enough_for_shards(Storage(1, 10), [[4], [4]]) == 1
    assert enough_for_shards(replace(Storage(100, 90), sharded=True), [[4], [4]]) == 1


@pytest.mark.parametrize(("bandwidth", "seconds"), [(None, 4 * 40e9 / 1.25e9), ("10G", 80.0), ("100M", 1600.0)])
def test_administrator_states_the_rate_of_the_source(bandwidth: str | None, seconds: float) -> None:
    """It sends 40 GB to each of four nodes, whose disks write 0.5 GB/s."""
    defaults = parse_defaults({"dataset": {"sourceBandwidth": bandwidth}} if bandwidth else {})
    spec = DLJobSpec.model_validate({
        "model": {"name": "lenet"}, "dataset": DATA, "globalBatchSize": 240, "epochs": 1, "nodes": {"min": 4, "max": 4},
    })  # fmt: skip
    found = plan(planner_request("job", spec, site=site_of(defaults)), cluster(4), {})
    assert isinstance(found, Decision)
    assert found.chosen.prediction.fetch_s == pytest.approx(seconds)
    assert found.data_text is not None and f"fetched in {duration(seconds)}; with Sharded" in found.data_text
