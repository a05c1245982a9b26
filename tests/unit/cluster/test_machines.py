"""Tests of physical machines whose cores several nodes share, from labels of nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster.machines import (
    Machine,
    cores_of_machines,
    machines,
    most_on_one_machine,
    neighbours,
    together,
    usable_cpus,
)
from support.planner_questions import view

HOST, CPU = "dljob.dev/machine", "dljob.dev/machine-cpu"


@pytest.mark.parametrize(
    ("labels", "cores"),
    [
        ([{HOST: "a", CPU: "2"}, {HOST: "a", CPU: "2"}], {"a": 2.0}),
        ([{HOST: "a"}, {HOST: "a", CPU: "16"}], {"a": 16.0}),
        ([{HOST: "a", CPU: "16"}, {HOST: "a", CPU: "12"}], {"a": 12.0}),
        ([{HOST: "a"}, {HOST: "b"}], {"a": 8.0, "b": 8.0}),
        ([{HOST: "a", CPU: "many"}, {HOST: "a", CPU: "0"}, {HOST: "a", CPU: "-3"}], {"a": 8.0}),
        ([{HOST: "a", CPU: "500m"}], {"a": 0.5}),
        ([{CPU: "2"}, {}], {}),
    ],
)
def test_cores_of_a_machine_are_those_of_the_label_or_of_its_largest_node(
    labels: list[dict[str, str]], cores: dict[str, float]
) -> None:
    found = view(*({"cpu": 8, "labels": each} for each in labels)).nodes
    assert cores_of_machines(found) == cores


def test_cluster_file_has_short_fields_for_the_labels() -> None:
    cluster = view({"count": 2, "cpu": 4, "machine": "host-1", "machineCpu": 6}, {"cpu": 4})
    assert machines(cluster.nodes, cores_of_machines(cluster.nodes)) == (Machine(2, 6.0),)
    two = view(*({"count": 2, "name": host, "cpu": 4, "machine": host} for host in ("a", "b")))
    assert machines(two.nodes, cores_of_machines(two.nodes)) == (Machine(2, 4.0, 2),)
    assert cluster.nodes[0].labels == {HOST: "host-1", CPU: "6"}


def test_short_field_for_the_cores_of_a_machine_that_a_label_names() -> None:
    """Fixed bug: the field machineCpu was rejected if the machine had its label instead of the field machine."""
    (node,) = view({"cpu": 4, "labels": {HOST: "host-1"}, "machineCpu": 6}).nodes
    assert node.labels == {HOST: "host-1", CPU: "6"}


@pytest.mark.parametrize(
    ("found", "nodes", "chosen", "expected"),
    [
        ((Machine(3, 2.0),), 3, 1, 1),
        ((Machine(3, 2.0),), 3, 2, 2),
        ((Machine(3, 2.0),), 3, 3, 3),
        ((), 10, 5, 1),
        ((Machine(4, 8.0, 10),), 40, 40, 4),
        ((Machine(4, 8.0, 10),), 40, 2, 1),  # the second node is on the same machine once in 13
        ((Machine(4, 8.0, 2),), 8, 3, 2),
        ((Machine(2, 8.0), Machine(4, 8.0, 2)), 10, 3, 2),
        ((Machine(4, 8.0),), 100, 10, 1),  # most nodes have a machine of their own
        ((Machine(4, 8.0),), 100, 100, 4),
    ],
)
def test_plan_counts_the_nodes_that_are_likely_on_one_machine(
    found: tuple[Machine, ...], nodes: int, chosen: int, expected: int
) -> None:
    assert together(found, nodes, chosen) == expected


@given(st.lists(st.integers(1, 6), max_size=8), st.integers(0, 20), st.integers(1, 60))
def test_more_nodes_share_a_machine_at_least_as_often(sizes: list[int], single: int, chosen: int) -> None:
    found, nodes = tuple(Machine(size, 4.0) for size in sizes), sum(sizes) + single
    counts = [together(found, nodes, n) for n in range(1, min(chosen, nodes) + 1)]
    assert counts == sorted(counts)
    assert all(1 <= count <= max(1, min(n, max(sizes, default=1))) for n, count in enumerate(counts, 1))


def test_neighbours_are_the_other_nodes_of_the_same_machines() -> None:
    cluster = view(
        {"name": "a", "machine": "host-1"}, {"name": "b", "machine": "host-1"}, {"name": "c", "machine": "host-2"}, {},
        {},
    )  # fmt: skip
    assert neighbours(cluster.nodes, ["a", "gone"]) == {"a", "b", "gone"}
    assert neighbours(cluster.nodes, ["n3"]) == {"n3"}, "a node without the label shares its machine with no other"


def test_nodes_of_a_run_on_the_same_machine_are_counted() -> None:
    assert most_on_one_machine([]) == 1
    assert most_on_one_machine([{}, {}, {HOST: "a"}]) == 1
    assert most_on_one_machine([{HOST: ""}, {HOST: ""}]) == 1
    assert most_on_one_machine([{HOST: "a"}, {HOST: "b"}, {HOST: "a"}]) == 2


def test_nodes_of_a_run_share_the_cores_of_their_machine() -> None:
    cluster = view(
        {"name": "a", "cpu": 4, "machine": "host-1", "machineCpu": 6}, {"name": "b", "cpu": 2, "machine": "host-1"},
        {"name": "c", "cpu": 4, "machine": "host-2"}, {"name": "d", "cpu": 0.2},
    )  # fmt: skip
    assert usable_cpus(cluster.nodes) == {"a": 3.0, "b": 2.0, "c": 4.0, "d": 0.2}
    assert usable_cpus(()) == {}


def test_nodes_with_an_empty_label_share_no_machine() -> None:
    cluster = view({"count": 2, "cpu": 4, "labels": {HOST: ""}})
    cores = cores_of_machines(cluster.nodes)
    assert (cores, machines(cluster.nodes, cores)) == ({}, ())
    assert neighbours(cluster.nodes, ["n0-0"]) == {"n0-0"}
