"""Tests of subtracting reservations: the same result as the plain definition, without looking at all nodes each time."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node
from dljob.cluster.domains import Domain, Requirement
from dljob.scheduling import reservations as module
from dljob.scheduling.reservations import Reservation, without_reserved

GPU, CPU = "Tesla-T4", "cpu"


def node(i: int, device: str, devices: int, cpu: float, memory_nbytes: int, pods: int | None = None) -> Node:
    return Node(
        name=f"n{i}", device=device, is_gpu=device == GPU, devices=4, free_devices=devices, cpu=8.0, free_cpu=cpu,
        free_memory_nbytes=memory_nbytes, free_pods=pods,
    )  # fmt: skip


def defined(view: ClusterView, reservations: Iterable[Reservation]) -> ClusterView:
    """Return the result by definition: sort the nodes of the device type again for each reservation."""

    def order(wanted: Reservation, each: Node) -> tuple[bool, int, float]:
        fits = (
            (not each.is_gpu or each.free_devices >= wanted.devices)
            and each.free_cpu >= wanted.cpu
            and each.free_memory_nbytes >= wanted.memory_nbytes
            and each.free_pods != 0
        )
        return not fits, -each.free_devices, -each.free_cpu

    found = {each.name: each for each in view.nodes}
    for wanted in reservations:
        candidates = [each for each in found.values() if each.device == wanted.device]
        for each in sorted(candidates, key=partial(order, wanted))[: wanted.nodes]:
            pods = None if each.free_pods is None else max(0, each.free_pods - 1)
            left = 0 if pods == 0 else 1
            found[each.name] = replace(
                each,
                free_devices=left * max(0, each.free_devices - wanted.devices) if each.is_gpu else each.free_devices,
                free_cpu=left * max(0.0, each.free_cpu - wanted.cpu),
                free_memory_nbytes=left * max(0, each.free_memory_nbytes - wanted.memory_nbytes),
                free_pods=pods,
            )
    return ClusterView(tuple(found.values()))


DEVICES, COUNTS = st.sampled_from([GPU, CPU]), st.integers(0, 4)
QUARTERS = st.integers(0, 16).map(lambda n: n / 4)
NODES = st.lists(st.tuples(DEVICES, COUNTS, QUARTERS, COUNTS, st.none() | COUNTS), max_size=8)
RESERVATIONS = st.lists(st.builds(Reservation, DEVICES, COUNTS, COUNTS, QUARTERS, COUNTS), max_size=8)


@settings(max_examples=300, deadline=None)
@given(NODES, RESERVATIONS)
def test_reservations_are_subtracted_by_definition(
    nodes: list[tuple[str, int, float, int, int | None]], reservations: list[Reservation]
) -> None:
    view = ClusterView(tuple(node(i, *each) for i, each in enumerate(nodes)))
    assert without_reserved(view, reservations) == defined(view, reservations)


def test_a_reservation_takes_a_place_for_a_pod() -> None:
    """Fixed bug: two jobs were promised the last pod of a node, and the pods of one stayed pending."""
    view = ClusterView((node(0, CPU, 1, 8.0, 64, pods=1), node(1, CPU, 1, 4.0, 64, pods=2)))
    once = without_reserved(view, [Reservation(CPU, 1, 1, 1.0, 1)])
    assert [(each.free_cpu, each.free_memory_nbytes, each.free_pods) for each in once.nodes] == [(0, 0, 0), (4, 64, 2)]
    twice = without_reserved(view, [Reservation(CPU, 1, 1, 1.0, 1)] * 2)
    assert [(each.free_cpu, each.free_pods) for each in twice.nodes] == [(0, 0), (3, 1)]
    [full] = without_reserved(ClusterView((node(0, GPU, 4, 8.0, 64, pods=1),)), [Reservation(GPU, 1, 1, 1.0, 1)]).nodes
    assert full.free_devices == 0


def test_nodes_without_reservations_stay_the_same_objects() -> None:
    view = ClusterView(tuple(node(i, CPU, 1, 4.0 - i, 8) for i in range(3)))
    found = without_reserved(view, [Reservation(CPU, 1, 1, 1.0, 1)])
    assert [a is b for a, b in zip(view.nodes, found.nodes, strict=True)] == [False, True, True]


def test_a_reservation_looks_at_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 plans on 500 nodes once took a second for each plan, because each reservation sorted all nodes."""
    looked: list[object] = []
    fits = module._fits

    def counted(left: module._Left, wanted: Reservation) -> bool:
        looked.append(left)
        return fits(left, wanted)

    monkeypatch.setattr(module, "_fits", counted)
    view = ClusterView(tuple(node(i, CPU, 1, 8.0, 64) for i in range(500)))
    without_reserved(view, [Reservation(CPU, 4, 1, 0.5, 1)] * 500)
    assert len(looked) == 4 * 500


def test_a_reservation_is_subtracted_within_its_domain() -> None:
    """The first node has the most room, but the pods must not run there."""
    here = Domain(terms=((Requirement("zone", "In", ("b",)),),))
    view = ClusterView(
        tuple(replace(node(i, CPU, 1, 8.0 - i, 64), labels={"zone": zone}) for i, zone in enumerate("abb"))
    )
    found = without_reserved(view, [Reservation(CPU, 5, 1, 1.0, 1, domain=here)])
    assert [each.free_cpu for each in found.nodes] == [8.0, 6.0, 5.0]


@pytest.mark.parametrize("groups", [((4, 1), (2, 1)), ((2, 1), (4, 1))])
def test_groups_of_one_job_are_on_different_nodes(groups: tuple[tuple[int, int], ...]) -> None:
    """Fixed bug: both were subtracted from the node with the most free devices, and the other node counted as free."""
    view = ClusterView(tuple(node(i, GPU, devices, 8.0, 64) for i, devices in enumerate((8, 2))))
    mine = [Reservation(GPU, nodes, devices, 1.0, 1, job="a") for devices, nodes in groups]
    assert [each.free_devices for each in without_reserved(view, mine).nodes] == [4, 0]
    other = Reservation(GPU, 1, 2, 1.0, 1, job="b")
    assert [each.free_devices for each in without_reserved(view, [*mine, other]).nodes] == [2, 0]
    unknown = [replace(each, job="") for each in mine]
    assert [each.free_devices for each in without_reserved(view, unknown).nodes] == [2, 2]


def test_groups_of_one_job_on_too_few_nodes_take_what_there_is() -> None:
    mine = [Reservation(GPU, 1, 2, 1.0, 1, job="a"), Reservation(CPU, 1, 1, 1.0, 1, job="a")] * 2
    [gpu, cpu] = without_reserved(ClusterView((node(0, GPU, 4, 8.0, 64), node(1, CPU, 1, 8.0, 64))), mine).nodes
    assert (gpu.free_devices, cpu.free_cpu) == (2, 7.0)
