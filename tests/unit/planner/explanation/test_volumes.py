"""Tests of plans for jobs whose volumes only some nodes can mount: their nodes, their refusals and their errors."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.cluster import ClusterView
from dljob.cluster.domains import Crossing, Topology
from dljob.cluster.node_selector import NodeSelector
from dljob.planner import Decision, FixedChoice, Request, VolumeLimit
from support.planner_questions import A100, DIGITS, T4, decided, rejected, view

Json = dict[str, Any]
ZONE = "topology.kubernetes.io/zone"
SIZE: Json = {"cpu": 2, "memory": "4Gi"}
TWO_ZONES = view({"count": 2, **SIZE, "zone": "a"}, {"count": 4, **SIZE, "zone": "b"})
"""``n0-0`` and ``n0-1`` in zone a, ``n1-0`` to ``n1-3`` in zone b."""


def limit(zone: str, claim: str = "data", field: str = "spec.dataset.uri") -> VolumeLimit:
    expressions = [{"key": ZONE, "operator": "In", "values": [zone]}]
    nodes = NodeSelector.parse({"nodeSelectorTerms": [{"matchExpressions": expressions}]})
    return VolumeLimit(field, claim, f"volume 'pv-{zone}'", nodes)


IN_A = limit("a")
ELASTIC = replace(DIGITS, model="resnet18", dataset="synthetic-images", volumes=(IN_A,))


def nodes_of(found: Decision) -> int:
    return sum(group.nodes for group in found.chosen.groups)


def test_plan_uses_only_nodes_that_can_mount_the_volume() -> None:
    assert nodes_of(decided(replace(ELASTIC, volumes=()), TWO_ZONES)) > 2
    found = decided(ELASTIC, TWO_ZONES)
    assert nodes_of(found) == 2
    [refusal] = [each for each in found.refusals if "pv-a" in each.reason]
    assert refusal.summary == "4 x cpu"
    assert refusal.reason == f"volume 'pv-a' of claim 'data' needs nodes with {ZONE} in (a) (spec.dataset.uri)"


def test_plan_in_the_best_zone_is_not_in_another_one_than_the_volume() -> None:
    """With a slow network between zones, the larger zone is better, but the volume is not there."""
    slow = Topology(zones=Crossing(1e6, 1e-2))
    assert "in zone b" in decided(replace(ELASTIC, volumes=(), topology=slow), TWO_ZONES).chosen.summary
    found = decided(replace(ELASTIC, topology=slow), TWO_ZONES)
    assert nodes_of(found) <= 2 and "zone b" not in found.chosen.summary


def test_plan_uses_another_device_where_the_volume_is() -> None:
    gpus = view(
        {"device": A100, "count": 4, "cpu": 16, "memory": "64Gi", "zone": "b"},
        {"device": T4, "count": 2, "cpu": 16, "memory": "64Gi", "zone": "a"},
    )
    assert {group.device for group in decided(ELASTIC, gpus).chosen.groups} == {T4}


def test_job_without_a_prediction_uses_only_nodes_that_can_mount_the_volume() -> None:
    asked = Request("j", 0, 0, missing=("model",), collective="Torch", reduced_by_script=True, nodes_max=6)
    asked = replace(asked, takes_most=True, volumes=(IN_A,))
    assert nodes_of(decided(asked, TWO_ZONES)) == 2
    found = rejected(replace(asked, nodes_min=3), TWO_ZONES)
    assert (found.reason, found.field) == ("VolumeNodeConflict", "spec.dataset.uri")


def test_two_volumes_need_nodes_that_can_mount_both() -> None:
    both = replace(DIGITS, volumes=(IN_A, replace(limit("a", "saved"), source="volume 'other'")))
    assert nodes_of(decided(both, TWO_ZONES)) <= 2


WITHOUT_A = ClusterView(TWO_ZONES.nodes[2:])
CONFLICTS: dict[str, tuple[Json, ClusterView, list[str], list[str]]] = {
    "no node": ({}, WITHOUT_A, ["of the 4 nodes", "0 match", "at least 1", "Add nodes that match"], ["nodes.min"]),
    "too few nodes": ({"nodes_min": 3}, TWO_ZONES, ["of the 6 nodes", "2 match", "lower spec.nodes.min"], []),
    "fixed groups": (
        {"fixed": (FixedChoice("cpu", 3),)}, TWO_ZONES, ["2 match", "at least 3", "spec.planning.groups"], [],
    ),
    "two volumes in two zones": (
        {"volumes": (IN_A, limit("b", "saved", "spec.checkpoint.volume.claimName"))},
        TWO_ZONES,
        ["'pv-a'", "'pv-b'", "claim 'saved' (spec.checkpoint.volume.claimName)", "0 match", "in one place"],
        [],
    ),
    "a model-parallel strategy": ({"strategy": "Pipeline", "stages": 2}, WITHOUT_A, ["0 match"], []),
    "a sharded model": ({"strategy": "Sharded", "nodes_min": 2}, WITHOUT_A, ["0 match"], []),
}  # fmt: skip


@pytest.mark.parametrize(("change", "cluster", "words", "others"), CONFLICTS.values(), ids=CONFLICTS.keys())
def test_error_names_the_volume(change: Json, cluster: ClusterView, words: list[str], others: list[str]) -> None:
    found = rejected(replace(DIGITS, **{"volumes": (IN_A,), **change}), cluster)
    assert (found.reason, found.field, found.transient) == ("VolumeNodeConflict", "spec.dataset.uri", True)
    wanted = ["volume 'pv-a' of claim 'data'", f"{ZONE} in (a)", *words]
    assert [word for word in wanted if word not in found.message] == [], found.message
    assert [word for word in others if word in found.message] == [], found.message
    assert any("pv-a" in each.reason for each in found.refusals)


OTHER_ERRORS: dict[str, tuple[Json, ClusterView, str]] = {
    "nodes that can mount it are busy": (
        {}, ClusterView(tuple(replace(n, free_cpu=0.0) if n.labels[ZONE] == "a" else n for n in TWO_ZONES.nodes)),
        "DeviceBusy",
    ),
    "too few nodes even without the volume": ({"nodes_min": 7}, TWO_ZONES, "TooFewNodes"),
    "a node selector that no node matches": ({"node_selector": {"disk": "ssd"}}, TWO_ZONES, "TooFewNodes"),
    "no nodes": ({}, ClusterView(), "TooFewNodes"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "cluster", "reason"), OTHER_ERRORS.values(), ids=OTHER_ERRORS.keys())
def test_other_errors_come_first(change: Json, cluster: ClusterView, reason: str) -> None:
    assert rejected(replace(DIGITS, volumes=(IN_A,), **change), cluster).reason == reason


def test_error_counts_only_nodes_that_the_job_could_use_otherwise() -> None:
    tainted = {"count": 3, **SIZE, "zone": "c", "taints": [{"key": "team", "effect": "NoSchedule"}]}
    found = rejected(replace(DIGITS, volumes=(IN_A,)), view(tainted, {"count": 4, **SIZE, "zone": "b"}))
    assert "of the 4 nodes" in found.message
