"""Tests of plans in zones and racks and on spot nodes: a table of plans, and the laws of what must not change."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.cluster import ClusterView
from dljob.cluster.domains import Crossing, Spot, Topology
from dljob.planner.placement import explanation
from support.planner_questions import DIGITS, THREE, decided, rejected, view

SPOT_LABEL = {"karpenter.sh/capacity-type": "spot"}
SLOW = Topology(zones=Crossing(1e6, 0.05))
CPU: dict[str, Any] = {"cpu": 2, "memory": "4Gi"}
LARGE = replace(DIGITS, total_steps=200_000)
ZONES = view({"count": 3, "zone": "a", **CPU}, {"count": 2, "zone": "b", **CPU})
MIXED = view({"count": 3, **CPU}, {"count": 3, "labels": SPOT_LABEL, **CPU})


@pytest.mark.parametrize("cluster", [THREE, ZONES, MIXED])
def test_without_values_labels_change_nothing(cluster: ClusterView) -> None:
    bare = ClusterView(tuple(replace(node, labels={}) for node in cluster.nodes))
    assert decided(DIGITS, cluster) == decided(DIGITS, bare)


def test_without_labels_values_change_nothing() -> None:
    asked = replace(DIGITS, topology=SLOW, spot=Spot(price_factor=0.3, interruptions_per_h=1))
    assert decided(asked, THREE) == decided(DIGITS, THREE)


def test_neutral_spot_nodes_change_nothing() -> None:
    assert decided(replace(DIGITS, spot=Spot(price_factor=1.0, interruptions_per_h=0.0)), MIXED) == decided(
        DIGITS, MIXED
    )


@pytest.mark.parametrize(
    ("changes", "cluster", "where"),
    [
        ({"topology": SLOW}, ZONES, "in zone a"),
        ({"topology": SLOW, "nodes_min": 4}, ZONES, "across zones"),
        ({"topology": SLOW, "nodes_max": 1}, ZONES, "across zones"),
        ({"minimize": "Cost", "spot": Spot(price_factor=0.3, interruptions_per_h=0.05)}, MIXED, "on spot nodes"),
        (
            {"minimize": "Cost", "spot": Spot(price_factor=0.9, interruptions_per_h=10)},
            MIXED,
            "on nodes that are not spot nodes",
        ),
        ({"spot": Spot(price_factor=0.3, interruptions_per_h=10)}, MIXED, "on nodes that are not spot nodes"),
        (
            {"minimize": "Cost", "avoid_spot": True, "spot": Spot(price_factor=0.1, interruptions_per_h=0)},
            MIXED,
            "on nodes that are not spot nodes",
        ),
    ],
)
def test_plans(changes: dict[str, Any], cluster: ClusterView, where: str) -> None:
    found = decided(replace(LARGE, **changes), cluster)
    assert found.domain.text == where
    assert found.chosen.summary.endswith(where)
    assert found.candidates[0] == found.chosen
    nodes = found.domain.within(cluster).nodes
    assert sum(group.nodes for group in found.chosen.groups) <= len(nodes)
    assert where in (explanation(found) or "")


def test_a_zone_is_priced_as_its_own_network() -> None:
    alone = decided(replace(DIGITS, nodes_min=2), view({"count": 3, **CPU}))
    found = decided(replace(DIGITS, nodes_min=2, topology=SLOW), ZONES)
    assert found.chosen.prediction == alone.chosen.prediction


def test_a_plan_across_zones_is_slower() -> None:
    found = decided(replace(DIGITS, nodes_min=4, topology=SLOW), ZONES).chosen.prediction
    assert found.communication_s > decided(replace(DIGITS, nodes_min=4), ZONES).chosen.prediction.communication_s


def test_interruptions_enter_time_deadline_and_cost() -> None:
    cluster = view({"count": 3, "labels": SPOT_LABEL, **CPU})
    asked = replace(LARGE, nodes_min=3)
    calm = decided(asked, cluster).chosen.prediction
    found = decided(replace(asked, spot=Spot(price_factor=0.5, interruptions_per_h=0.5)), cluster)
    p = found.chosen.prediction
    assert p.step_s == calm.step_s
    assert p.total_s > calm.total_s
    assert p.total_p90_s > calm.total_p90_s
    assert p.cost_usd == pytest.approx(0.5 * (calm.cost_usd or 0) * p.total_s / calm.total_s)
    assert p.interruptions == pytest.approx(3 * 0.5 / 3600 * p.total_s)
    assert "restarts expected" in (explanation(found) or "")


def test_a_job_that_avoids_spot_nodes_needs_others() -> None:
    cluster = view({"count": 3, "labels": SPOT_LABEL, **CPU})
    assert rejected(replace(DIGITS, avoid_spot=True), cluster).transient
