"""Laws of preemption: only jobs of a lower priority, only those that are needed, and the set that loses least."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, combinations, permutations
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node
from dljob.cluster.domains import Domain, Requirement
from dljob.scheduling import Preemptible, Requests, Reservation, beside_running, preemption, victims

GPU = Node("n0", "gpu", 4, 4, 64.0, 64.0, 2**34, is_gpu=True)
NODES = ("n0", "n1", "n2")
HELD = st.builds(Requests, st.integers(0, 8000), st.integers(0, 2**30), st.integers(1, 4))
JOBS = st.lists(
    st.builds(
        Preemptible,
        key=st.tuples(st.just("team"), st.uuids().map(str)),
        priority=st.integers(-2, 2),
        holds=st.dictionaries(st.sampled_from(NODES), HELD, min_size=1),
        lost_s=st.floats(0, 1000),
        restart_s=st.floats(1, 100),
        left_s=st.none() | st.floats(0, 5000),
    ),
    max_size=6,
)
NEEDS = st.lists(
    st.builds(Reservation, device=st.just("gpu"), nodes=st.integers(1, 3), devices=st.integers(1, 4), cpu=st.just(1.0),
              memory_nbytes=st.just(2**20)),
    min_size=1, max_size=1,
)  # fmt: skip
FREE = st.lists(st.integers(0, 4), min_size=3, max_size=3)


def view(free: Iterable[int]) -> ClusterView:
    """Return a cluster with these numbers of free devices by node."""
    return ClusterView(tuple(replace(GPU, name=f"n{i}", free_devices=each) for i, each in enumerate(free)))


def job(name: str, *, lost_s: float = 0.0, left_s: float | None = None, priority: int = 0, **held: int) -> Preemptible:
    """Return a job that holds these numbers of devices by node."""
    holds = {node: Requests(0, 0, devices) for node, devices in held.items()}
    return Preemptible(("team", name), priority, holds, lost_s, 30.0, left_s)


def pods(nodes: int, devices: int) -> list[Reservation]:
    return [Reservation("gpu", nodes, devices, 1.0, 2**20)]


def makes_room(free: list[int], jobs: Iterable[Preemptible], need: Reservation) -> bool:
    """Return True if enough nodes have enough devices without ``jobs``. It shares no code with the rule."""
    total = {f"n{i}": each for i, each in enumerate(free)}
    for each in jobs:
        for name, held in each.holds.items():
            total[name] += held.devices
    return sum(each >= need.devices for each in total.values()) >= need.nodes


def names(found: Iterable[Preemptible]) -> set[str]:
    return {each.key[1] for each in found}


@given(st.integers(-2, 3), NEEDS, FREE, JOBS)
def test_victims_have_a_lower_priority_and_are_needed(
    priority: int, needs: list[Reservation], free: list[int], jobs: list[Preemptible]
) -> None:
    found = victims(priority, needs, view(free), jobs)
    assert all(each.priority < priority and not each.ends_soon for each in found)
    assert not found or makes_room(free, found, needs[0])
    for each in found:
        assert not makes_room(free, (other for other in found if other is not each), needs[0])


@given(st.integers(-2, 3), NEEDS, FREE, JOBS)
def test_no_other_set_loses_less(
    priority: int, needs: list[Reservation], free: list[int], jobs: list[Preemptible]
) -> None:
    may = [each for each in jobs if each.priority < priority and not each.ends_soon]
    sets = chain.from_iterable(combinations(may, n) for n in range(len(may) + 1))
    costs = [sum(each.cost for each in chosen) for chosen in sets if makes_room(free, chosen, needs[0])]
    found = victims(priority, needs, view(free), jobs)
    assert bool(found) == bool(costs and not makes_room(free, (), needs[0]))
    assert not found or sum(each.cost for each in found) <= min(costs) * (1 + 1e-9)


@given(st.integers(-2, 3), NEEDS, FREE, JOBS)
def test_many_jobs_still_find_a_set_without_needless_jobs(
    priority: int, needs: list[Reservation], free: list[int], jobs: list[Preemptible]
) -> None:
    exact = victims(priority, needs, view(free), jobs)
    with patch.object(preemption, "MAX_CHECKS", 3):
        found = victims(priority, needs, view(free), jobs)
    assert bool(found) == bool(exact)
    assert not found or makes_room(free, found, needs[0])
    for each in found:
        assert not makes_room(free, (other for other in found if other is not each), needs[0])


def test_one_large_loss_is_compared_with_several_small_ones() -> None:
    large, first, second = job("large", lost_s=100.0, n0=4), job("first", n1=2), job("second", n1=2)
    assert names(victims(1, pods(1, 4), view([0, 0, 0]), [large, first, second])) == {"first", "second"}
    costly = replace(second, lost_s=1000.0)
    assert names(victims(1, pods(1, 4), view([0, 0, 0]), [large, first, costly])) == {"large"}


def test_job_that_ends_before_a_restart_would_pay_is_awaited() -> None:
    ends, stays = job("ends", lost_s=60.0, left_s=80.0, n0=4), job("stays", lost_s=600.0, left_s=9000.0, n1=4)
    assert names(victims(1, pods(1, 4), view([0, 0, 0]), [ends, stays])) == {"stays"}
    assert victims(1, pods(1, 4), view([0, 0, 0]), [ends]) == ()


def test_of_equal_losses_the_lowest_priority_is_taken() -> None:
    jobs = [job("a", priority=5, n0=4), job("b", priority=1, n1=4), job("c", priority=5, n2=4)]
    assert names(victims(9, pods(1, 4), view([0, 0, 0]), jobs)) == {"b"}


def test_nodes_that_are_left_out_make_no_room() -> None:
    nodes = tuple(replace(node, left_out="faulty") if node.name == "n0" else node for node in view([0, 0, 0]).nodes)
    assert victims(1, pods(1, 4), ClusterView(nodes), [job("a", n0=4)]) == ()


def test_groups_of_two_device_types_need_both() -> None:
    cpu = Node("c0", "cpu", 1, 1, 8.0, 1.0, 2**33)
    nodes = ClusterView((*view([0]).nodes, cpu))
    needs = [Reservation("gpu", 1, 4, 1.0, 2**20), Reservation("cpu", 1, 1, 6.0, 2**20)]
    on_gpu = job("gpu", n0=4)
    on_cpu = Preemptible(("team", "cpu"), 0, {"c0": Requests(7000, 0, 0)}, 0.0, 30.0, None)
    assert names(victims(1, needs, nodes, [on_gpu, on_cpu])) == {"gpu", "cpu"}
    assert victims(1, needs, nodes, [on_gpu]) == ()


def test_groups_of_one_device_type_are_on_different_nodes() -> None:
    """Fixed bug: one node counted for both, so that too few jobs were chosen, and none stopped."""
    jobs = [job("a", n0=4), job("b", lost_s=10.0, n1=4), job("c", lost_s=20.0, n2=4)]
    assert names(victims(1, [*pods(1, 2), *pods(1, 1)], view([0, 0, 0]), jobs)) == {"a", "b"}
    assert names(victims(1, [*pods(1, 4), *pods(2, 1)], view([0, 0, 0]), jobs)) == {"a", "b", "c"}
    assert victims(1, [*pods(2, 2), *pods(2, 1)], view([0, 0, 0]), jobs) == ()


def test_groups_that_need_different_resources_of_one_device_type_find_nodes() -> None:
    """Fixed bug: the group with more devices took the only node with enough CPUs for the other one."""
    n0, n1 = replace(GPU, name="n0", free_devices=2, free_cpu=8.0), replace(GPU, name="n1", free_cpu=2.0)
    needs = [Reservation("gpu", 1, 2, 1.0, 0), Reservation("gpu", 1, 1, 8.0, 0)]
    assert preemption._fit(ClusterView((n0, n1)), needs)
    busy = ClusterView((n0, replace(n1, free_devices=0)))
    assert names(victims(1, needs, busy, [job("a", n1=4)])) == {"a"}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=5),
    st.lists(st.tuples(*[st.integers(0, 2)] * 4), max_size=3),
)
@example([(2, 2, 0), (3, 1, 0)], [(1, 2, 1, 0), (1, 1, 2, 0)])  # The first group took the only node for the second one.
def test_pods_fit_if_each_has_a_node_of_its_own_in_some_order(
    nodes: list[tuple[int, int, int]], groups: list[tuple[int, int, int, int]]
) -> None:
    cluster = ClusterView(
        tuple(
            replace(GPU, name=f"n{i}", free_devices=devices, free_cpu=cpu, free_memory_nbytes=nbytes)
            for i, (devices, cpu, nbytes) in enumerate(nodes)
        )
    )
    each_pod = [need for count, *need in groups for _ in range(count)]
    possible = any(
        all(
            free >= needed
            for node, pod in zip(order, each_pod, strict=True)
            for free, needed in zip(node, pod, strict=True)
        )
        for order in permutations(nodes, len(each_pod))
    )
    assert preemption._fit(cluster, [Reservation("gpu", *group) for group in groups]) is possible


def test_quota_must_admit_the_job_after_the_others_have_stopped() -> None:
    jobs = [job("cheap", n0=4), job("mine", lost_s=100.0, n1=4), job("mine-elsewhere", lost_s=10.0, n9=1)]
    own = [each.key for each in jobs if each.key[1].startswith("mine")]

    def found(*used: Iterable[str]) -> set[str]:
        """Return the victims if the quota admits the job after one of these sets of jobs has stopped."""
        sets = [{("team", name) for name in each} for each in used]
        return names(
            victims(1, pods(1, 4), view([0, 0, 0]), jobs, lambda stopped: any(s <= set(stopped) for s in sets), own)
        )

    assert found(()) == {"cheap"}
    assert found(["mine"]) == {"mine"}
    assert found(["mine-elsewhere"]) == {"cheap", "mine-elsewhere"}
    assert found(["mine"], ["mine-elsewhere"]) == {"cheap", "mine-elsewhere"}, "together, they lose less"
    assert found(["unknown"]) == set()


def test_thousand_jobs_are_decided_quickly() -> None:
    jobs = [job(f"j{i}", lost_s=float(i), **{f"n{i % 250}": 1}) for i in range(1000)]
    found = victims(1, pods(16, 4), view([0] * 250), jobs)
    assert len(found) == 64


def test_room_counts_only_where_the_pods_may_run() -> None:
    zone = Domain(terms=((Requirement("zone", "In", ("b",)),),))
    nodes = (replace(GPU, name="n0", free_devices=4, labels={"zone": "a"}), replace(GPU, name="n1", free_devices=0,
             labels={"zone": "b"}))  # fmt: skip
    needs = [replace(pods(1, 4)[0], domain=zone)]
    assert names(victims(2, needs, ClusterView(nodes), [job("a", n0=4), job("b", n1=4)])) == {"b"}


class TestNodesWithAMaximumOfPods:
    """A node that runs as many pods as it can shows no free resources, although a job that stops makes room there."""

    def found(self, *jobs: Preemptible) -> set[str]:
        """Return the jobs that stop for a pod that needs all devices of one node, on which a pod has 1 of them."""
        full = ClusterView((replace(GPU, free_devices=0, free_cpu=0.0, free_memory_nbytes=0, free_pods=0),))
        whole = ClusterView((replace(GPU, free_pods=len(jobs)),))
        return names(victims(1, pods(1, 4), beside_running(full, whole, jobs), jobs))

    def test_job_whose_pod_leaves_makes_room_for_a_pod_that_needs_the_whole_node(self) -> None:
        """Earlier, what was free beside the pod did not count, and the job of the higher priority waited."""
        assert self.found(job("only", n0=1)) == {"only"}

    def test_jobs_that_hold_needed_devices_stop_and_others_do_not(self) -> None:
        assert self.found(job("a", n0=1), job("b", n0=2), job("c", n0=0)) == {"a", "b"}

    def test_job_stops_that_only_holds_the_place_of_a_pod(self) -> None:
        assert self.found(job("without devices", n0=0)) == {"without devices"}

    def test_nodes_with_room_for_pods_stay_as_they_are(self) -> None:
        roomy = ClusterView((replace(GPU, free_devices=2, free_pods=3),))
        assert beside_running(roomy, ClusterView((GPU,)), [job("only", n0=2)]) == roomy
