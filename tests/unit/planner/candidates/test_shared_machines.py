"""Tests of plans on nodes that share the cores of a machine, as labels say: the development cluster has such nodes."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.calibrate.learned import LearnedPoint, Place, StepPoint
from dljob.cluster import ClusterView, catalogue
from dljob.cluster.hardware import KEY, Hardware
from dljob.perf.step.compute import catalogue_curve
from dljob.perf.step.core_scaling import CoreUse
from dljob.planner import Decision, FixedChoice, Learned, Request
from dljob.planner.candidates.cost.implausible import without_implausible
from dljob.planner.candidates.node_layout import Layout, cores_text, on_machine, packing_of, shared_layouts, use_of
from dljob.planner.candidates.pools import Pool, eligible
from dljob.planner.candidates.request_workload import workload_of
from support.planner_questions import decided, view

QUICKSTART = Request(job="digits", global_batch=120, total_steps=300, model="digits-cnn", dataset="digits")
NODES: dict[str, Any] = {"count": 3, "cpu": 2, "memory": "7Gi"}
ALONE, SHARED = view(NODES), view(NODES | {"machine": "host", "machineCpu": 2})
QUICKSTARTS = view(NODES | {"machine": "development-machine", "machineCpu": 1.85})
"""The nodes of hack/quickstart on two cores, with the labels that hack/cluster sets."""
MEASURED_S = 0.0154, 0.0163, 0.018, 0.0207
"""Steps of quickstart's job in several runs on a quiet machine."""


def on_three(cluster: ClusterView, learned: dict[tuple[str, str], Learned] | None = None) -> Decision:
    return decided(replace(QUICKSTART, nodes_min=3, nodes_max=3, collective="Ring"), cluster, learned)


def pool_of(cluster: ClusterView, request: Request = QUICKSTART) -> Pool:
    (pool,) = eligible(request, cluster).pools
    return pool


class TestQuickstart:
    """Regression: the first prediction for quickstart's job was 8.8 ms, and its steps took 15 to 18 ms."""

    def test_prediction_without_labels_assumes_a_core_for_each_rank(self) -> None:
        found = on_three(ALONE).chosen.prediction
        assert 1e3 * found.step_s == pytest.approx(9.23, abs=0.1)
        assert 1e3 * found.compute_s == pytest.approx(8.25, abs=0.1)

    def test_prediction_with_labels_is_near_the_measured_step(self) -> None:
        found = on_three(QUICKSTARTS).chosen.prediction
        assert 1e3 * found.step_s == pytest.approx(19.1, abs=0.1)
        assert 1e3 * found.compute_s == pytest.approx(3 / 1.85 * 8.25, abs=0.2), "three ranks share 1.85 cores"
        assert found.step_s > 4 / 3 * found.compute_s, "two of them share one core"
        assert all(abs(found.step_s / step_s - 1) < 0.25 for step_s in MEASURED_S)
        assert "3 nodes share the 1.85 CPUs of a machine" in found.bottleneck

    def test_two_nodes_are_chosen_where_a_third_one_would_be_slower(self) -> None:
        def nodes(cluster: ClusterView) -> int:
            return decided(QUICKSTART, cluster).chosen.groups[0].nodes

        assert (nodes(ALONE), nodes(SHARED), nodes(QUICKSTARTS)) == (3, 2, 2)

    def test_one_or_two_ranks_keep_their_cores(self) -> None:
        for nodes in (1, 2):
            alone, shared = (
                decided(replace(QUICKSTART, nodes_min=nodes, nodes_max=nodes), each).chosen for each in (ALONE, SHARED)
            )
            assert alone.prediction == shared.prediction

    def test_groups_that_the_user_fixes_share_the_cores_too(self) -> None:
        fixed = replace(QUICKSTART, fixed=(FixedChoice("cpu", 3, 1),))
        alone, shared = (decided(fixed, each).chosen.prediction for each in (ALONE, SHARED))
        assert shared.compute_s == pytest.approx(1.5 * alone.compute_s, rel=0.01)

    def test_steps_wait_for_the_ranks_that_share_a_core(self) -> None:
        """Regression: three ranks on two cores were predicted to share them evenly; steps took 1.3 times as long."""
        alone, shared = (on_three(each).chosen.prediction for each in (ALONE, SHARED))
        assert shared.step_s > 2 * alone.compute_s

    def test_a_parameter_server_leaves_its_core_to_the_workers(self) -> None:
        served = replace(QUICKSTART, nodes_min=3, nodes_max=3, collective="ParameterServer")
        found = decided(served, SHARED).chosen.prediction
        assert found.step_s < 4 / 3 * found.compute_s

    def test_no_candidate_is_shown_twice(self) -> None:
        summaries = [each.summary for each in decided(QUICKSTART, SHARED).candidates]
        assert len(summaries) == len(set(summaries))

    def test_efficiency_counts_the_cores_that_ranks_share(self) -> None:
        """Fixed bug: a rank that shares its core was compared with one that has the same part of a core alone."""
        alone, shared = (on_three(each).chosen.prediction for each in (ALONE, SHARED))
        assert shared.efficiency / alone.efficiency == pytest.approx(alone.step_s / shared.step_s, rel=0.01)
        assert shared.efficiency < 2 / 3 + 0.01, "three ranks on two cores"

    def test_power_is_that_of_the_busy_cores_and_the_price_that_of_the_requested(self) -> None:
        alone, shared = (on_three(each).chosen.prediction for each in (ALONE, SHARED))
        assert alone.energy_J is not None and shared.energy_J is not None
        assert alone.cost_usd is not None and shared.cost_usd is not None
        assert alone.energy_J < shared.energy_J < 1.15 * alone.energy_J, "the same work, and a core that waits"
        assert shared.cost_usd / shared.total_s == pytest.approx(alone.cost_usd / alone.total_s, rel=1e-6)


class TestUseOfCores:
    def test_ranks_get_equal_parts_of_the_machine(self) -> None:
        pool = pool_of(view({"count": 4, "cpu": 8, "memory": "32Gi", "machine": "host", "machineCpu": 16}))
        assert use_of(pool, Layout(1, 4.0, 4)).cores == 4.0
        assert use_of(pool, Layout(2, 4.0, 4)).cores == 2.0
        assert use_of(pool, Layout(1, 8.0, 4)).cores == 4.0

    @pytest.mark.parametrize(
        ("machine_cpu", "layout", "slowest"),
        [
            (2, Layout(1, 1.0, 3), 4 / 3),  # 2 + 1 ranks on two cores, 1.5 on average
            (1.85, Layout(1, 1.0, 3), 4 / 3),
            (2, Layout(1, 1.0, 4), 1.0),
            (4, Layout(1, 1.0, 4), 1.0),
            (4, Layout(1, 1.0, 5), 8 / 5),
            (2, Layout(1, 2.0, 3), 1.0),  # two threads for each rank, so three on each core
            (2, Layout(1, 0.6, 3), 1.0),  # 1.8 cores: what one rank may not use is left to the others
        ],
    )
    def test_slowest_rank_shares_its_core_with_most_others(
        self, machine_cpu: float, layout: Layout, slowest: float
    ) -> None:
        pool = pool_of(view({"count": 5, "cpu": 2, "memory": "32Gi", "machine": "host", "machineCpu": machine_cpu}))
        assert packing_of(pool, layout) == pytest.approx(slowest)

    def test_nodes_of_a_machine_share_its_memory_bandwidth(self) -> None:
        pool = pool_of(view({"count": 4, "cpu": 8, "memory": "32Gi", "machine": "host", "machineCpu": 32}))
        alone, together = use_of(pool, Layout(1, 7.0)), use_of(pool, Layout(1, 7.0, 4))
        assert alone.memory_part == pytest.approx(4 / 7), "half of the node's cores use its whole bandwidth"
        assert together.memory_part == pytest.approx(16 / 28)

    def test_layouts_cover_every_number_of_nodes_once(self) -> None:
        pool = pool_of(view({"count": 40, "cpu": 4, "memory": "16Gi", "machine": "host", "machineCpu": 8}))
        ranges = shared_layouts(pool, Layout(1, 3.0))
        assert [begin for begin, _, _ in ranges] == [1, *(end + 1 for _, end, _ in ranges[:-1])]
        assert ranges[0] == (1, 2, Layout(1, 3.0)) and ranges[-1][1:] == (40, Layout(1, 3.0, 40))
        assert len(ranges) < 12

    def test_enough_cores_for_all_nodes_make_no_difference(self) -> None:
        pool = pool_of(view({"count": 3, "cpu": 4, "memory": "16Gi", "machine": "host", "machineCpu": 12}))
        assert shared_layouts(pool, Layout(1, 3.0)) == [(1, 3, Layout(1, 3.0))]
        assert on_machine(pool, Layout(1, 3.0), 3) == Layout(1, 3.0)

    def test_gpus_do_not_share_cores(self) -> None:
        cluster = view({"count": 3, "device": "Tesla-T4", "cpu": 8, "memory": "32Gi", "machine": "host"})
        assert pool_of(cluster).machines == ()


class TestOtherProcesses:
    """Fixed bug: ranks had all cores of a machine, although the cluster itself takes a part of them all the time."""

    @staticmethod
    def known(background_cpu: float, node_cpu: float = 2.0) -> dict[tuple[str, str], Learned]:
        return {(KEY, "cpu"): Learned(hardware=Hardware(background_cpu=background_cpu, node_cpu=node_cpu))}

    def test_ranks_of_quickstarts_machine_get_what_others_leave(self) -> None:
        idle, busy = (on_three(QUICKSTARTS, self.known(load)).chosen.prediction for load in (0.0, 0.4))
        assert busy.compute_s == pytest.approx(1.85 / 1.6 * idle.compute_s, rel=0.01)
        left = "3 nodes share the 1.6 CPUs of a machine (label dljob.dev/machine) that other processes leave"
        assert left in busy.bottleneck
        assert "3 nodes share the 1.85 CPUs of a machine (label dljob.dev/machine)" in idle.bottleneck
        assert "other processes" not in idle.bottleneck

    def test_load_that_the_label_already_leaves_out_does_not_count_twice(self) -> None:
        idle, known = (on_three(QUICKSTARTS, self.known(load)).chosen.prediction for load in (0.0, 0.15))
        assert known.step_s == pytest.approx(idle.step_s)

    def test_a_node_is_affected_only_if_the_ranks_fill_it(self) -> None:
        pool = pool_of(view({"cpu": 8, "memory": "32Gi"}))
        busy = Hardware(background_cpu=1.5, node_cpu=8.0)
        assert use_of(pool, Layout(2, 3.0), busy).cores == 3.0
        assert use_of(pool, Layout(2, 4.0), busy).cores == 3.25
        assert use_of(pool, Layout(1, 8.0), busy).cores == 6.5
        found = cores_text(pool, Layout(2, 4.0), busy)
        assert found == "; other processes of a node leave 6.5 of 8 CPUs (dljob probe)"
        assert cores_text(pool, Layout(2, 3.0), busy) == ""

    def test_no_load_makes_exactly_the_plan_without_the_measurement(self) -> None:
        for cluster in (ALONE, SHARED, QUICKSTARTS, view({"count": 2, "cpu": 64, "memory": "256Gi"})):
            zero, without = (decided(QUICKSTART, cluster, self.known(0.0, cpu)) for cpu in (2.0, 0.0))
            assert zero == without

    @given(
        st.lists(st.floats(0, 40), min_size=2, max_size=2),
        st.sampled_from([1, 2, 8, 64]),
        st.integers(1, 4),
        st.integers(1, 8),
        st.floats(0.1, 8),
        st.floats(0.5, 80),
    )
    def test_more_load_never_makes_a_rank_faster(
        self, loads: list[float], node_cpu: int, nodes: int, ranks: int, cores: float, machine_cpu: float
    ) -> None:
        less, more = sorted(loads)
        labels = {"machine": "host", "machineCpu": f"{machine_cpu:.2f}"}
        pool = pool_of(view({"count": 4, "cpu": node_cpu, "memory": "64Gi"} | labels))
        layout = Layout(ranks, min(cores, node_cpu / ranks), nodes)
        zero = use_of(pool, layout, Hardware(node_cpu=float(node_cpu)))
        uses = [use_of(pool, layout, Hardware(background_cpu=load, node_cpu=node_cpu)) for load in (less, more)]
        seconds = [
            catalogue_curve(workload_of(QUICKSTART), catalogue.cpu("cpu", use.cores), use=use).seconds(40)
            for use in (zero, *uses)
        ]
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(seconds))
        assert uses[1].cores >= zero.cores / 2 * (1 - 1e-9), "ranks keep half of the cores"

    @pytest.mark.parametrize("nodes", [1, 2, 3])
    @pytest.mark.parametrize("cluster", [SHARED, QUICKSTARTS, ALONE])
    def test_more_load_never_predicts_a_faster_plan(self, cluster: ClusterView, nodes: int) -> None:
        request = replace(QUICKSTART, nodes_min=nodes, nodes_max=nodes)
        steps = [
            decided(request, cluster, self.known(load)).chosen.prediction.step_s
            for load in (0.0, 0.1, 0.3, 0.7, 1.5, 40.0)
        ]
        assert steps == sorted(steps)


class TestMeasurements:
    KEY = ("digits-cnn", "cpu")

    def test_times_measured_on_a_shared_machine_are_not_multiplied_again(self) -> None:
        """The profile of a run on three nodes of one machine has times that already include the other ranks."""
        points = (LearnedPoint(40, 0.012, 50, 1, 1, 3),)
        again = on_three(SHARED, {self.KEY: Learned(points)}).chosen.prediction
        assert again.compute_s == pytest.approx(0.012)

    def test_times_measured_on_a_shared_machine_predict_faster_ranks_on_fewer_nodes(self) -> None:
        known = {self.KEY: Learned((LearnedPoint(120, 0.030, 50, 1, 1, 3),))}
        found = decided(replace(QUICKSTART, nodes_max=1), SHARED, known).chosen.prediction
        assert found.compute_s == pytest.approx(0.020, rel=0.01)

    def test_times_measured_alone_are_longer_on_a_shared_machine(self) -> None:
        known = {self.KEY: Learned((LearnedPoint(40, 0.008, 50, 1, 1),))}
        assert on_three(SHARED, known).chosen.prediction.compute_s == pytest.approx(0.012, rel=0.01)
        assert on_three(ALONE, known).chosen.prediction.compute_s == pytest.approx(0.008)

    def test_measured_steps_on_a_shared_machine_are_predicted_again(self) -> None:
        step = StepPoint(Place(3, 1, "Ring", cores=1, machine_nodes=3), 40, 0.016)
        known = {self.KEY: Learned((LearnedPoint(40, 0.012, 50, 1, 1, 3),), steps=(step,))}
        assert on_three(SHARED, known).chosen.prediction.step_s == pytest.approx(0.016, rel=0.05)

    def test_times_measured_on_more_nodes_than_are_free_now_predict_faster_ranks(self) -> None:
        """Regression: with one of three nodes busy, the times of a run on all three counted as those of ranks alone."""
        known = {self.KEY: Learned((LearnedPoint(120, 0.030, 50, 1, 1, 3),))}
        first, *others = SHARED.nodes
        busy = ClusterView((replace(first, free_cpu=0.0), *others))
        found = decided(replace(QUICKSTART, nodes_max=1), busy, known).chosen.prediction
        assert found.compute_s == pytest.approx(0.020, rel=0.01)

    @pytest.mark.parametrize("labels", [{"machine": "host", "machineCpu": 8}, {}])
    def test_times_of_ranks_that_shared_few_cores_are_plausible(self, labels: dict[str, Any]) -> None:
        """Fixed bug: the estimate had all cores for each rank, so that times of an overcommitted host did not count."""
        cluster = view({"count": 16, "cpu": 8, "memory": "32Gi"} | labels)
        alone = catalogue_curve(workload_of(QUICKSTART), catalogue.cpu("cpu", 8.0), 8.0, CoreUse(8.0, 1, 8.0))
        point = LearnedPoint(120, 40 * alone.seconds(120), 50, 8, 1, 16)
        found = without_implausible(QUICKSTART, cluster, {self.KEY: Learned((point,))})
        assert found[self.KEY] == Learned((point,))
        once = {self.KEY: Learned((replace(point, machine_nodes=1),))}
        assert without_implausible(QUICKSTART, cluster, once)[self.KEY].points == ()

    @pytest.mark.parametrize("machine_nodes", [3, 2])
    def test_measured_steps_within_one_machine_say_nothing_about_the_network(self, machine_nodes: int) -> None:
        """Fixed bug: plans over several machines had the communication of a run within one machine."""
        point = LearnedPoint(40, 0.008, 50, 1, 1)
        step = StepPoint(Place(3, 1, "Ring", cores=1, machine_nodes=machine_nodes), 40, 0.5)
        without = on_three(ALONE, {self.KEY: Learned((point,))}).chosen.prediction
        found = on_three(ALONE, {self.KEY: Learned((point,), steps=(step,))}).chosen.prediction
        assert (found == without) == (machine_nodes == 3)

    def test_measurements_count_as_they_are_once_the_labels_are_gone(self) -> None:
        known = {self.KEY: Learned((LearnedPoint(40, 0.012, 50, 1, 1, 3),))}
        assert on_three(ALONE, known).chosen.prediction.compute_s == pytest.approx(0.012)
