"""Tests of how many ranks a CPU node runs, with how many cores each, and of measurements on other numbers of cores."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.calibrate.learned import LearnedPoint
from dljob.cluster import ClusterView
from dljob.perf.step.core_scaling import CoreUse
from dljob.planner import FixedChoice, Learned, Request
from dljob.planner.candidates.node_layout import (
    MEMORY_AMOUNTS,
    Layout,
    layouts,
    measured_on,
    memory_tiers,
    with_ranks,
)
from dljob.planner.candidates.pools import eligible, room_cpu
from dljob.planner.search import objective
from dljob.planner.types import Strategy
from support.planner_questions import DIGITS, RESNET, THREE, decided, view

Json = dict[str, Any]
LARGE = Request(job="j", global_batch=256, total_steps=100, like="ResNet-152")
GPT = Request(job="j", global_batch=64, total_steps=100, model="gpt-mini", dataset="synthetic-tokens")
FOUR = view({"count": 4, "cpu": 64, "memory": "256Gi"})


class TestDecisions:
    def test_large_nodes_are_used_with_many_cores(self) -> None:
        """Regression: ResNet-152 on four nodes with 64 cores was planned with one core on each node."""
        decision = decided(LARGE, FOUR)
        (group,) = decision.chosen.groups
        assert group.nodes == 4
        assert 32 <= group.ranks_per_node * group.cores <= 63
        assert group.cpu_per_pod == group.ranks_per_node * group.cores
        one_core = decided(replace(LARGE, cpus_max=0.0), FOUR).chosen.prediction
        assert decision.chosen.prediction.step_s < one_core.step_s / 20

    @pytest.mark.parametrize("request_", [RESNET, DIGITS, replace(RESNET, deadline_s=6 * 3600.0)])
    def test_a_small_node_does_not_slow_down_the_plan_for_large_ones(self, request_: Request) -> None:
        """Fixed bug: no layout had more CPUs than the smallest node, so that plans were up to five times slower."""
        large: Json = {"count": 4, "cpu": 16, "memory": "32Gi"}
        alone = decided(request_, view(large)).chosen
        assert decided(request_, view(large, {"cpu": 2, "memory": "8Gi"})).chosen.groups == alone.groups

    def test_two_core_nodes_keep_one_rank_with_one_core(self) -> None:
        (group,) = decided(DIGITS, THREE).chosen.groups
        assert (group.nodes, group.ranks_per_node, group.cores) == (3, 1, 1.0)

    @pytest.mark.parametrize("cpu", [1.0, 4.0, 7.5, 16.0])
    def test_cpu_request_of_the_spec_wins(self, cpu: float) -> None:
        (group,) = decided(replace(LARGE, cpu_per_pod=cpu), FOUR).chosen.groups
        assert group.ranks_per_node * group.cores <= cpu
        assert all(each.cpus <= cpu for each in layouts(pool_of(FOUR), replace(LARGE, cpu_per_pod=cpu)))

    @pytest.mark.parametrize(
        ("cpu", "threads", "expected"),
        [
            (6.0, 7, {(1, 7.0)}),
            (6.0, 3, {(1, 3.0), (2, 3.0)}),
            (6.0, 99, {(1, 64.0)}),
            (None, 2, {(1, 1.0), (1, 2.0), (2, 1.0), (2, 2.0)}),
        ],
    )
    def test_ranks_have_the_threads_that_the_user_sets(
        self, cpu: float | None, threads: int, expected: set[tuple[int, float]]
    ) -> None:
        """Fixed bug: plans counted the CPU request of the pod, and profiles OMP_NUM_THREADS."""
        found = layouts(pool_of(FOUR), replace(LARGE, cpu_per_pod=cpu, threads_per_rank=threads))
        assert {(each.ranks, each.cores) for each in found if each.ranks <= 2} == expected

    @pytest.mark.parametrize("limit", [1.0, 3.0, 10.0])
    def test_cpu_limit_of_the_spec_is_kept(self, limit: float) -> None:
        (group,) = decided(replace(LARGE, cpu_limit_per_pod=limit), FOUR).chosen.groups
        assert group.ranks_per_node * group.cores <= limit

    def test_quota_limits_the_cpus_of_all_pods(self) -> None:
        groups = decided(replace(LARGE, cpus_max=20.0), FOUR).chosen.groups
        assert 4 < sum(g.nodes * g.ranks_per_node * g.cores for g in groups) <= 20

    @pytest.mark.parametrize("cpus_max", [6.0, 20.0])
    @pytest.mark.parametrize(
        "asked",
        [
            replace(GPT, strategy="Sharded", model=None, dataset=None, parameters=2 * 10**8, flops_per_sample=1e10,
                    activation_nbytes_per_sample=10**6, profile="own", optimizer="AdamW"),
            replace(GPT, strategy="Pipeline", stages=4),
            replace(GPT, strategy="Tensor"),
            replace(GPT, strategy="Pipeline", nodes_min=2, stages=2),
        ],
        ids=["Sharded", "Pipeline", "Tensor", "nodes.min"],
    )  # fmt: skip
    def test_quota_limits_the_cpus_of_plans_that_split_the_model(self, asked: Request, cpus_max: float) -> None:
        """Fixed bug: a plan with more nodes than spec.nodes.min used more CPUs than the quota leaves."""
        chosen = decided(replace(asked, cpus_max=cpus_max), view({"count": 4, "cpu": 16, "memory": "8Gi"})).chosen
        assert chosen.strategy == asked.strategy and sum(len(g.shares) for g in chosen.groups) > 1
        assert 1 < sum(g.nodes * g.cpu_per_pod for g in chosen.groups) <= cpus_max

    def test_cores_of_other_pods_are_not_planned(self) -> None:
        busy = ClusterView(tuple(replace(node, free_cpu=9.0) for node in FOUR.nodes))
        (group,) = decided(LARGE, busy).chosen.groups
        assert 4 <= group.ranks_per_node * group.cores <= 8

    def test_fixed_groups_choose_only_the_cores(self) -> None:
        (group,) = decided(replace(LARGE, fixed=(FixedChoice("cpu", 2, 4),)), FOUR).chosen.groups
        assert (group.nodes, group.ranks_per_node) == (2, 4)
        assert 8 <= group.cores <= 15

    def test_more_cores_must_pay(self) -> None:
        """Twice the CPUs of the same nodes must save a tenth of the time, because other jobs can use them."""
        decision = decided(DIGITS, FOUR)
        chosen = decision.chosen
        for other in decision.candidates:
            if sum(g.nodes for g in other.groups) == sum(g.nodes for g in chosen.groups):
                ratio = objective.devices(other) / objective.devices(chosen)
                if ratio >= 2:
                    assert other.prediction.step_s > 0.9 * chosen.prediction.step_s

    @pytest.mark.parametrize(
        ("request_", "cluster", "words"),
        [
            (DIGITS, THREE, "plans may use 1 of 2 CPUs of a node"),
            (DIGITS, view({"count": 3, "cpu": 1.9, "memory": "7Gi"}), "plans may use 1 of 1.9 CPUs of a node"),
            (DIGITS, view({"count": 3, "cpu": 0.5, "memory": "7Gi"}), "a node has 0.5 CPUs"),
            (replace(RESNET, cpu_per_pod=8.0), FOUR, "spec.resources.cpu sets the number of CPUs"),
            (replace(RESNET, cpu_limit_per_pod=8.0), FOUR, "the CPU limit of a pod is 8"),
            (replace(DIGITS, nodes_max=1), FOUR, "more cores"),
        ],
    )
    def test_plan_says_why_not_more_cores(self, request_: Request, cluster: ClusterView, words: str) -> None:
        assert any(words in r.reason for r in decided(request_, cluster).refusals)


def pool_of(cluster: ClusterView, request: Request = LARGE):  # type: ignore[no-untyped-def]
    (pool,) = eligible(request, cluster).pools
    return pool


@given(st.floats(0.1, 200), st.floats(0, 1))
def test_room_leaves_something_for_other_pods(cpu: float, part: float) -> None:
    free = cpu * part
    room = room_cpu(cpu, free)
    assert room >= min(1.0, cpu / 2) and (room <= free or room <= 1.0)
    assert room_cpu(cpu, free / 2) <= room


@given(st.integers(1, 130), st.sampled_from([None, 1.0, 5.0, 64.0]))
def test_layouts_fit_the_node_and_contain_one_core(cpu: int, limit: float | None) -> None:
    request = replace(LARGE, cpu_limit_per_pod=limit)
    pool = pool_of(view({"cpu": cpu, "memory": "256Gi"}), request)
    found = layouts(pool, request)
    assert found[0].ranks == 1 and found[0].cores <= 1
    assert len(set(found)) == len(found)
    assert all(each.cpus <= max(room_cpu(cpu, cpu), 1.0) and each.cpus <= (limit or cpu) for each in found)
    for ranks in (1, 2, 4):
        assert all(each.ranks == ranks for each in with_ranks(pool, request, ranks))


@pytest.mark.parametrize("strategy", ["Data", "Auto"])
@pytest.mark.parametrize("smaller", ["1Gi", "25Gi", "40Gi"])
def test_a_node_with_less_memory_takes_no_plan_away(smaller: str, strategy: Strategy) -> None:
    """Fixed bug: a job that needs 26 GiB did not fit on nodes with 48 GiB if another one had 25 GiB."""
    asked = Request(
        job="j", global_batch=64, total_steps=1000, profile="own", parameters=10**9, flops_per_sample=1e9,
        activation_nbytes_per_sample=10**6, optimizer="AdamW", strategy=strategy,
    )  # fmt: skip
    large = {"count": 3, "cpu": 8, "memory": "48Gi"}
    alone = decided(asked, view(large)).chosen
    assert 25 * 2**30 < alone.prediction.host_memory_nbytes < 40 * 2**30
    assert decided(asked, view(large, {"cpu": 8, "memory": smaller})).chosen == alone


@given(st.lists(st.integers(2, 64), min_size=1, max_size=40), st.integers(1, 12), st.integers(2, 64))
def test_a_pod_that_fits_on_enough_nodes_fits_on_a_set_of_them(free: list[int], fewest: int, need: int) -> None:
    pool = pool_of(view(*({"cpu": 4, "memory": f"{gib}Gi"} for gib in free)))
    tiers = memory_tiers(pool, Layout(1, 1.0), replace(LARGE, nodes_min=fewest))
    fitting = [count for count, least in tiers if least >= need * 2**30]
    enough = sum(gib >= need for gib in free)
    assert len(set(free)) > MEMORY_AMOUNTS or max(fitting, default=0) == enough, "each amount has its own set"
    assert enough < fewest or max(fitting) >= fewest
    assert tiers == sorted(tiers) and len(tiers) <= MEMORY_AMOUNTS + 5


def line(layout: Layout, batch: int) -> float:
    use = CoreUse(layout.cores, layout.ranks, 64.0)
    return 0.001 + 0.01 * batch / use.arithmetic


class TestMeasuredOn:
    def test_points_of_the_same_layout_are_taken_as_they_are(self) -> None:
        points = [LearnedPoint(8, 0.5, 1, 4, 2), LearnedPoint(8, 9.0, 1, 1, 1)]
        assert measured_on(points, Layout(2, 4.0), line) == ([(8, 0.5)], 0.0)

    def test_a_measurement_on_one_core_is_not_taken_for_eight(self) -> None:
        points = [LearnedPoint(8, 0.2, 1, 1, 1)]
        [(batch, seconds)], spread = measured_on(points, Layout(1, 8.0), line)
        assert (batch, seconds) == (8, pytest.approx(0.2 * line(Layout(1, 8.0), 8) / line(Layout(1, 1.0), 8)))
        assert spread == pytest.approx(0.3)

    def test_points_without_cores_have_those_of_earlier_releases(self) -> None:
        points = [LearnedPoint(8, 0.2)]
        assert measured_on(points, Layout(1, 1.0), line) == ([(8, 0.2)], 0.0)
        assert measured_on(points, Layout(1, 4.0), line, unknown_cores=4.0) == ([(8, 0.2)], 0.0)

    @pytest.mark.parametrize("cores", [1, None])
    def test_one_core_of_a_node_with_a_part_of_a_cpu_is_this_part(self, cores: int | None) -> None:
        """Regression: profiles store 1 core for 0.2 of a CPU, and plans multiplied their times by five."""
        known = {("digits-cnn", "cpu"): Learned((LearnedPoint(120, 0.03, 50, cores),))}
        small = view({"cpu": 0.2, "memory": "8Gi"})
        found = decided(replace(DIGITS, global_batch=120, nodes_max=1), small, known).chosen.prediction
        assert found.compute_s == pytest.approx(0.03)

    def test_profile_of_one_core_predicts_less_time_and_a_wider_interval_for_more(self) -> None:
        known = {("digits-cnn", "cpu"): Learned((LearnedPoint(48, 0.1, 50, 1), LearnedPoint(96, 0.2, 50, 1)))}
        cluster = view({"cpu": 64, "memory": "64Gi"})
        found = [
            decided(replace(DIGITS, fixed=(FixedChoice("cpu", 1),), cpu_per_pod=cpu), cluster, known).chosen.prediction
            for cpu in (1.0, 8.0, 32.0)
        ]
        assert found[0].step_s == pytest.approx(0.2, rel=1e-3)
        for less, more in pairwise(found):
            assert more.step_s < less.step_s
            assert more.step_p90_s / more.step_s > less.step_p90_s / less.step_s
