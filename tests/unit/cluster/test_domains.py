"""Tests of domains: which parts of a cluster are planned for, and which nodes belong to them."""

import pytest

from dljob.cluster import Node
from dljob.cluster.domains import (
    ANYWHERE,
    MAX_DOMAINS,
    RACK_LABEL,
    SPOT_LABELS,
    ZONE_LABEL,
    Crossing,
    Spot,
    Topology,
    domains,
)

SPOT = Spot(price_factor=0.3, interruptions_per_h=0.1)
SLOW = Crossing(1e8, 1e-3)
BOTH = Topology(zones=SLOW, racks=Crossing(5e8))


def node(name: str, zone: str = "", rack: str = "", *, spot: bool = False, free: int = 1) -> Node:
    labels = {ZONE_LABEL: zone, RACK_LABEL: rack, "karpenter.sh/capacity-type": "spot" if spot else "on-demand"}
    return Node(name, "cpu", free_devices=free, labels={key: value for key, value in labels.items() if value})


@pytest.mark.parametrize(
    ("nodes", "topology", "spot", "expected"),
    [
        ([node("a", "a"), node("b", "b", spot=True)], Topology(), Spot(), [""]),
        ([node("a"), node("b")], BOTH, SPOT, [""]),
        ([node("a", "a"), node("b", "a")], BOTH, SPOT, [""]),
        ([node("a", "a"), node("b", "b")], Topology(zones=SLOW), Spot(), ["across zones", "in zone a", "in zone b"]),
        ([node("a", "a"), node("b")], Topology(zones=SLOW), Spot(), ["across zones", "in zone a"]),
        ([node("a", "a", "1"), node("b", "a", "2")], BOTH, Spot(), ["across racks", "in rack 1", "in rack 2"]),
        (
            [node("a", spot=True), node("b")],
            Topology(),
            SPOT,
            ["on any nodes, also spot nodes", "on nodes that are not spot nodes", "on spot nodes"],
        ),
        ([node("a", spot=True)], Topology(), SPOT, ["on spot nodes"]),
        (
            [node("a", "a", "1"), node("b", "b", "2"), node("c", "b", "3")],
            BOTH,
            Spot(),
            [
                "across racks, across zones",
                "in zone a",
                "across racks, in zone b",
                "in rack 2, in zone b",
                "in rack 3, in zone b",
            ],
        ),
    ],
)
def test_domains(nodes: list[Node], topology: Topology, spot: Spot, expected: list[str]) -> None:
    found = [domain.text for domain in domains(nodes, topology, spot)]
    assert found[0] == expected[0]
    assert sorted(found) == sorted(expected)


def test_without_spot_nodes_only_the_others_remain() -> None:
    nodes = [node("a", spot=True), node("b")]
    [found] = domains(nodes, Topology(), Spot(), avoid_spot=True)
    assert [each.name for each in nodes if found.has(each)] == ["b"]


@pytest.mark.parametrize("now", [[node("b")], [node("b"), node("c", spot=True)]], ids=["no spot nodes", "of one cloud"])
def test_spot_nodes_that_come_later_do_not_belong_to_the_others_either(now: list[Node]) -> None:
    """Fixed bug: pods of a job with ``spot: Avoid`` could run on the first spot node, which had come after its plan."""
    later = [Node("later", "cpu", labels=dict([label])) for label in SPOT_LABELS]
    [avoiding] = domains(now, Topology(), Spot(), avoid_spot=True)
    assert not any(map(avoiding.has, later)) and avoiding.has(now[0])
    for found in domains(now, Topology(), SPOT):
        assert found.interruptions_per_h or not found.terms or not any(map(found.has, later))


def test_nothing_is_avoided_if_spot_nodes_have_no_labels() -> None:
    assert domains([], Topology(), Spot(labels=()), avoid_spot=True) == [ANYWHERE]


def test_a_wide_domain_has_the_network_of_all_borders() -> None:
    nodes = [node("a", "a", "1"), node("b", "b", "2"), node("c", "b", "3")]
    crossing = {domain.text: domain.crossing for domain in domains(nodes, BOTH, Spot())}
    assert crossing["across racks, across zones"] == Crossing(1e8, 1e-3)
    assert crossing["across racks, in zone b"] == Crossing(5e8)
    assert crossing["in zone a"] is None
    assert crossing["in rack 2, in zone b"] is None


def test_the_largest_places_are_planned_for() -> None:
    nodes = [node(f"n{i}", f"z{i:02}", free=i + 1) for i in range(20)]
    found = domains(nodes, Topology(zones=SLOW), Spot())
    assert [domain.text for domain in found[1:]] == [f"in zone z{i}" for i in range(19, 19 - MAX_DOMAINS, -1)]
