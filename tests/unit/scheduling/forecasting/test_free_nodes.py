"""Free resources of nodes in the simulation of the queue."""

import pytest

from dljob.cluster import ClusterView, Node
from dljob.scheduling.forecasting.free_nodes import FreeNodes
from dljob.scheduling.reservations import Reservation
from support.builders import T4


def free(*gpus: int) -> FreeNodes:
    nodes = (Node(f"n{i}", T4, count, count, 8.0, 8.0, is_gpu=True) for i, count in enumerate(gpus))
    return FreeNodes(ClusterView(tuple(nodes)))


@pytest.mark.parametrize(("gpus", "groups", "places"), [
    ((4, 1), [(1, 1), (1, 4)], {("n0", 4), ("n1", 1)}),
    ((8, 2), [(1, 2), (1, 4)], {("n0", 4), ("n1", 2)}),
    ((8,), [(1, 2), (1, 4)], None),
    ((8, 8), [(2, 2), (1, 4)], None),
])  # fmt: skip
def test_pods_of_a_job_are_on_different_nodes(
    gpus: tuple[int, ...], groups: list[tuple[int, int]], places: set[tuple[str, int]] | None
) -> None:
    """Fixed bug: two groups could have the same node, and the group before took the only node of the group after it."""
    nodes = free(*gpus)
    taken = nodes.take([Reservation(T4, count, devices, 1.0, 2**30, job="a") for count, devices in groups])
    assert (None if taken is None else {(use.node, use.devices) for use in taken}) == places


def test_pods_of_a_job_are_not_on_nodes_that_have_its_other_pods() -> None:
    """Fixed bug: a forecast put the missing pod of a job beside one that runs."""
    missing = Reservation(T4, 1, 1, 1.0, 2**30, job="a", beside=frozenset({"n0"}))
    taken = free(4, 1).take([missing])
    assert taken is not None and [use.node for use in taken] == ["n1"]
    assert free(4).take([missing]) is None
