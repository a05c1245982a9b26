"""The planner: the split is optimal, the search finds what exhaustive search finds, and every no has a reason."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node, cluster_view
from dljob.perf.curve import Curve
from dljob.planner import Decision, FixedChoice, Infeasible, Learned, LearnedPoint, Request, objective, plan, scaling
from dljob.planner.context import Option, options, ranks_per_node_choices, workload_of
from dljob.planner.evaluate import Part, evaluate
from dljob.planner.names import duration, gibibytes, group_names, joules, rate
from dljob.planner.plan import collectives, ordered
from dljob.planner.pools import cores_of_rank, eligible, wanted
from dljob.planner.screen import Screen
from dljob.planner.search import Search, grid
from dljob.planner.split import Kind, even_split, split
from dljob.planner.types import Choice

A100, T4 = "NVIDIA-A100-SXM4-40GB", "Tesla-T4"
DIGITS = Request(job="j", global_batch=96, total_steps=375, model="digits-cnn", dataset="digits")
RESNET = Request(job="j", global_batch=512, total_steps=1000, model="resnet50", dataset="synthetic-images")


def view(*entries: dict[str, Any]) -> ClusterView:
    return cluster_view({"nodes": [{"name": f"n{i}", **entry} for i, entry in enumerate(entries)]})


def decided(request: Request, cluster: ClusterView, learned: dict[tuple[str, str], Learned] | None = None) -> Decision:
    found = plan(request, cluster, learned or {})
    assert isinstance(found, Decision), found
    return found


def refused(request: Request, cluster: ClusterView) -> Infeasible:
    found = plan(request, cluster, {})
    assert isinstance(found, Infeasible), found
    return found


THREE = view({"count": 3, "cpu": 2, "memory": "4Gi"})


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    steps = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    times = [1.0 + sum(steps[: i + 1]) for i in range(len(steps))]  # whole numbers: ties happen
    batches = sorted(draw(st.sets(st.integers(0, 12), min_size=len(times), max_size=len(times))))
    curve = Curve(tuple(map(float, batches)), tuple(times), float(draw(st.integers(1, 4))))
    return Kind(curve, draw(st.integers(1, 2)), draw(st.integers(1, 14)))


def slowest(parts: Sequence[Kind], shares: list[list[int]]) -> float:
    return max(k.curve.seconds(b) for k, part in zip(parts, shares, strict=True) for b in part)


class TestSplit:
    @settings(max_examples=300)
    @given(st.lists(kinds(), min_size=1, max_size=3), st.integers(1, 16))
    def test_is_the_exhaustive_optimum(self, parts: list[Kind], batch: int) -> None:
        limits = [k.largest_batch for k in parts for _ in range(k.ranks)]
        assume(len(limits) <= 4)
        every = [
            pick
            for pick in product(*(range(1, min(m, batch) + 1) for m in limits[:-1]))
            if 1 <= batch - sum(pick) <= limits[-1]
        ]
        found = split(parts, batch)
        if not every:
            assert found is None
            return
        assert found is not None
        curves = [k.curve for k in parts for _ in range(k.ranks)]
        best = min(max(c.seconds(b) for c, b in zip(curves, (*pick, batch - sum(pick)), strict=True)) for pick in every)
        assert slowest(parts, found) == best

    @given(st.lists(kinds(), min_size=1, max_size=5), st.integers(1, 200))
    def test_sums_to_the_batch_within_limits(self, parts: list[Kind], batch: int) -> None:
        for found in (split(parts, batch), even_split(parts, batch)):
            if found is not None:
                assert sum(map(sum, found)) == batch
                for kind, part in zip(parts, found, strict=True):
                    assert len(part) == kind.ranks
                    assert all(1 <= b <= kind.largest_batch for b in part)

    @given(st.lists(kinds(), min_size=1, max_size=5), st.integers(1, 200))
    def test_uneven_is_never_slower_than_even(self, parts: list[Kind], batch: int) -> None:
        even, uneven = even_split(parts, batch), split(parts, batch)
        if even is not None:
            assert uneven is not None
            assert slowest(parts, uneven) <= slowest(parts, even)

    @given(st.lists(kinds(), min_size=1, max_size=4), st.integers(1, 60), st.sampled_from([0.25, 2.0, 8.0]))
    def test_does_not_depend_on_the_unit_of_time(self, parts: list[Kind], batch: int, factor: float) -> None:
        scaled = [replace(k, curve=k.curve.scaled(factor)) for k in parts]
        assert split(scaled, batch) == split(parts, batch)

    def test_shares_follow_speed(self) -> None:
        def kind(per_sample_s: float) -> Kind:
            return Kind(Curve((0.0,), (1e-9,), per_sample_s), 1, 10**6)

        assert split([kind(1.0), kind(2.0), kind(4.0)], 700) == [[400], [200], [100]]

    def test_where_time_is_flat_shares_follow_what_each_could_do(self) -> None:
        def host_bound(reach: float) -> Kind:
            return Kind(Curve((0.0, reach), (1.0, 1.0), 1.0), 1, 10**6)

        found = split([host_bound(600.0), host_bound(200.0)], 400)
        assert found is not None
        assert found[0][0] == pytest.approx(300, abs=2)

    def test_a_large_batch_is_no_slower_to_split(self) -> None:
        kind = Kind(Curve((0.0,), (1e-3,), 1e-6), 1000, 2**31)
        found = split([kind, kind], 2**31 - 1)
        assert found is not None
        assert sum(map(sum, found)) == 2**31 - 1


class TestDecisions:
    def test_a_tiny_job_is_not_spread(self) -> None:
        tiny = Request(job="j", global_batch=32, total_steps=100, model="mlp", dataset="iris")
        chosen = decided(tiny, THREE).chosen
        assert [(g.nodes, g.shares) for g in chosen.groups] == [(1, (32,))]
        assert chosen.prediction.communication_s == 0

    def test_a_large_job_is(self) -> None:
        chosen = decided(replace(RESNET, global_batch=192), view({"count": 3, "cpu": 2, "memory": "16Gi"})).chosen
        assert [(g.nodes, sum(g.shares)) for g in chosen.groups] == [(3, 192)]
        assert "computing" in chosen.prediction.bottleneck

    def test_nodes_min_holds_all_the_same(self) -> None:
        chosen = decided(replace(DIGITS, nodes_min=3, nodes_max=3), THREE).chosen
        assert chosen.summary == f"3 x cpu, {chosen.collective}, 32+32+32"
        assert chosen.groups[0].shares == (32, 32, 32)

    def test_unlike_devices_get_unlike_shares(self) -> None:
        cluster = view({"device": "cpu-fast", "cpu": "800m"}, {"device": "cpu-slow", "cpu": "200m"})
        request = replace(DIGITS, nodes_min=2, global_batch=100)
        fast, slow = decided(request, cluster).chosen.groups
        assert (fast.device, slow.device) == ("cpu-fast", "cpu-slow")
        assert fast.shares[0] == pytest.approx(80, abs=4)
        even = decided(replace(request, uneven=False), cluster).chosen
        assert [g.shares for g in even.groups] == [(50,), (50,)]
        assert even.prediction.step_s > 1.8 * decided(request, cluster).chosen.prediction.step_s

    def test_what_was_measured_counts_more_than_the_catalogue(self) -> None:
        cluster = view({"device": "a", "cpu": 4}, {"device": "b", "cpu": 4})
        known = {
            ("digits-cnn", device): Learned(tuple(LearnedPoint(b, b * per_sample_s) for b in (12, 24, 48, 72)))
            for device, per_sample_s in (("a", 6e-4), ("b", 2e-4))
        }
        chosen = decided(replace(DIGITS, nodes_min=2), cluster, known).chosen
        assert [(g.device, g.shares) for g in chosen.groups] == [("b", (72,)), ("a", (24,))]
        assert chosen.prediction.basis == "profile"
        assert decided(replace(DIGITS, nodes_min=2), cluster).chosen.prediction.basis == "catalogue"

    def test_a_profile_narrows_the_interval(self) -> None:
        known = {("digits-cnn", "cpu"): Learned((LearnedPoint(32, 0.01),), 1e-4, 1e9)}
        request = replace(DIGITS, nodes_min=3)
        wide, narrow = decided(request, THREE).chosen.prediction, decided(request, THREE, known).chosen.prediction
        assert narrow.step_p90_s / narrow.step_s < 1.2 < wide.step_p90_s / wide.step_s

    def test_a_measured_slow_network_keeps_a_job_together(self) -> None:
        request = replace(DIGITS, global_batch=960)
        assert len(decided(request, THREE).chosen.groups[0].shares) == 3
        slow = {("digits-cnn", "cpu"): Learned(link_latency_s=0.05, link_bandwidth_Bps=1e6)}
        assert len(decided(request, THREE, slow).chosen.groups[0].shares) == 1

    def test_the_nodes_own_bandwidth_counts(self) -> None:
        request = replace(RESNET, nodes_min=4, nodes_max=4)
        steps = [
            decided(request, view({"count": 4, "cpu": 16, "memory": "64Gi", "bandwidth": b})).chosen.prediction.step_s
            for b in ("100M", "1G", "10G")
        ]
        assert steps[0] > steps[1] > steps[2]

    def test_gpus_beat_cpus_and_are_not_mixed_with_them(self) -> None:
        cluster = view({"count": 2, "device": A100, "devices": 4, "cpu": 32}, {"count": 4, "device": "cpu", "cpu": 32})
        decision = decided(RESNET, cluster)
        assert {g.device for g in decision.chosen.groups} == {A100}
        assert decision.chosen.collective == "Torch"
        for choice in decision.candidates:
            assert len({g.is_gpu for g in choice.groups}) == 1

    def test_ranks_are_free_devices(self) -> None:
        chosen = decided(
            replace(RESNET, nodes_max=1), view({"device": A100, "devices": 8, "free": 5, "cpu": 64})
        ).chosen
        (group,) = chosen.groups
        assert (group.nodes, group.ranks_per_node, len(group.shares), group.is_gpu) == (1, 5, 5, True)
        assert group.name == "a100-sxm4-40gb"

    @pytest.mark.parametrize("minimize", ["Energy", "Cost"])
    def test_less_energy_or_cost_takes_more_time(self, minimize: Any) -> None:
        cluster = view({"count": 8, "cpu": 8, "memory": "32Gi"})
        fast = decided(RESNET, cluster).chosen.prediction
        frugal = decided(replace(RESNET, minimize=minimize), cluster).chosen.prediction
        assert frugal.total_s > fast.total_s
        assert (frugal.energy_J or 0) < (fast.energy_J or 0)
        assert (frugal.cost_usd or 0) < (fast.cost_usd or 0)

    def test_a_deadline_is_met_with_the_least_energy(self) -> None:
        cluster = view({"count": 8, "cpu": 8, "memory": "32Gi"})
        request = replace(RESNET, minimize="Energy")
        frugal = decided(request, cluster).chosen
        fastest = decided(RESNET, cluster).chosen.prediction
        deadline_s = 1.2 * fastest.total_p90_s + objective.STARTUP_S
        decision = decided(replace(request, deadline_s=deadline_s), cluster)
        chosen = decision.chosen.prediction
        assert decision.warning is None
        assert frugal.prediction.total_p90_s > deadline_s > chosen.total_p90_s + objective.STARTUP_S
        assert (frugal.prediction.energy_J or 0) < (chosen.energy_J or 0) <= (fastest.energy_J or 0)

    def test_an_impossible_deadline_gets_the_fastest_plan_and_by_how_much_it_misses(self) -> None:
        cluster = view({"count": 3, "cpu": 2, "memory": "16Gi"})
        request = replace(RESNET, minimize="Energy", deadline_s=60.0)
        decision = decided(request, cluster)
        assert decision.warning is not None
        assert "no plan meets the deadline of 1m00s" in decision.warning
        assert "too long" in decision.warning
        assert decision.chosen.groups == decided(RESNET, cluster).chosen.groups

    def test_collectives_compete_and_the_losers_are_shown(self) -> None:
        decision = decided(
            replace(RESNET, nodes_min=4, candidates_kept=2), view({"count": 4, "cpu": 8, "memory": "64Gi"})
        )
        assert decision.chosen.collective == "Ring"
        lines = [r.reason for r in decision.refusals if "ParameterServer" in r.summary]
        assert lines
        assert lines[0].startswith("slower: ")

    def test_short_messages_go_through_few_rounds(self) -> None:
        tiny = replace(DIGITS, model="mlp", nodes_min=16)
        assert decided(tiny, view({"count": 16, "cpu": 2})).chosen.collective == "Butterfly"

    def test_a_parameter_server_has_a_rank_without_a_share(self) -> None:
        chosen = decided(replace(DIGITS, nodes_min=3, collective="ParameterServer"), THREE).chosen
        assert chosen.groups[0].shares == (48, 48, 0)
        alone = decided(replace(DIGITS, nodes_max=1, collective="ParameterServer"), THREE).chosen
        assert alone.groups[0].shares == (96,)

    def test_candidates_are_different_and_the_chosen_one_is_first(self) -> None:
        decision = decided(replace(RESNET, candidates_kept=4), view({"count": 40, "cpu": 8, "memory": "64Gi"}))
        assert decision.candidates[0] == decision.chosen
        assert len(decision.candidates) == 4
        assert len({sum(g.nodes for g in c.groups) for c in decision.candidates}) == 4

    @pytest.mark.parametrize(
        ("cpu", "ranks", "asked", "limit", "cores"),
        [
            (8.0, 1, None, None, 1.0),
            (0.2, 1, None, None, 0.2),
            (8.0, 1, 4.5, None, 4.0),
            (8.0, 1, 0.5, None, 1.0),
            (8.0, 1, 4.0, 2.0, 2.0),
            (8.0, 4, None, None, 1.0),
            (8.0, 4, 8.0, None, 2.0),
            (2.0, 4, None, None, 0.5),
        ],
    )
    def test_threads_of_a_rank(
        self, cpu: float, ranks: int, asked: float | None, limit: float | None, cores: float
    ) -> None:
        assert cores_of_rank(cpu, ranks, replace(DIGITS, cpu_per_pod=asked, cpu_limit_per_pod=limit)) == cores

    def test_an_unknown_gpu_is_planned_with_a_warning(self) -> None:
        decision = decided(DIGITS, view({"device": "NVIDIA-X9000", "gpu": True, "cpu": 8}))
        assert "NVIDIA-X9000 is not in the catalogue" in (decision.warning or "")

    def test_unlike_nodes_of_one_device_are_pointed_out(self) -> None:
        decision = decided(DIGITS, view({"cpu": 0.5}, {"cpu": 8}))
        assert "nodes of device cpu have unlike CPUs: planned as the weakest, 0.5 CPUs" in (decision.warning or "")

    def test_a_program_of_ones_own_is_planned_by_its_hints(self) -> None:
        own = Request(
            job="j",
            global_batch=64,
            total_steps=10,
            profile="program-1",
            parameters=10**8,
            flops_per_sample=6e11,
            activation_nbytes_per_sample=10**7,
        )
        chosen = decided(own, view({"device": T4, "devices": 4, "cpu": 16})).chosen
        assert chosen.prediction.compute_s == pytest.approx(16 * 6e11 / (8.1e12 * 0.55), rel=0.1)

    def test_scaling_shows_the_best_plan_of_every_size(self) -> None:
        points = scaling(RESNET, view({"count": 12, "cpu": 8, "memory": "64Gi"}), {})
        assert [n for n, _ in points] == [1, 2, 3, 4, 6, 8, 12]
        assert all(0 < choice.prediction.efficiency <= 1 for _, choice in points)
        assert points[0][1].prediction.efficiency == pytest.approx(1.0)


class TestFixed:
    cluster = view({"count": 4, "device": "cpu", "cpu": 2}, {"name": "g", "device": T4, "devices": 4, "cpu": 16})

    def test_groups_as_dictated(self) -> None:
        request = replace(DIGITS, fixed=(FixedChoice("cpu", 2, 1, 40), FixedChoice("cpu", 1)))
        first, second = decided(request, self.cluster).chosen.groups
        assert (first.name, first.shares) == ("cpu", (40, 40))
        assert (second.name, second.shares) == ("cpu-2", (16,))

    @pytest.mark.parametrize(
        ("fixed", "reason", "field", "message"),
        [
            ((FixedChoice("cpu", 2, 1, 40),), "BatchMismatch", "spec.planning.groups", "adds up to 80 samples"),
            (
                (FixedChoice("cpu", 1, 1, 96), FixedChoice("cpu", 1)),
                "BatchMismatch",
                "spec.planning.groups",
                "at most 95",
            ),
            (
                (FixedChoice("v100", 1),),
                "NoSuchDevice",
                "spec.planning.groups",
                "found v100, but the cluster has Tesla-T4, cpu",
            ),
            ((FixedChoice("cpu", 5),), "TooFewNodes", "spec.planning.groups[0].nodes", "found 4 nodes of cpu"),
            (
                (FixedChoice("cpu", 3), FixedChoice("cpu", 2)),
                "TooFewNodes",
                "spec.planning.groups[1].nodes",
                "found 1 nodes",
            ),
            ((FixedChoice("t4", 1, 5),), "TooFewNodes", "spec.planning.groups[0].nodes", "room for 5 ranks each"),
            ((FixedChoice("cpu", 4, 30),), "BatchTooSmall", "spec.globalBatchSize", "96 samples for 120 ranks"),
        ],
    )
    def test_what_cannot_be(self, fixed: tuple[FixedChoice, ...], reason: str, field: str, message: str) -> None:
        found = refused(replace(DIGITS, fixed=fixed), self.cluster)
        assert (found.reason, found.field) == (reason, field)
        assert message in found.message

    def test_names_without_the_vendor_do(self) -> None:
        (group,) = decided(replace(DIGITS, fixed=(FixedChoice("t4", 1, 4, 24),)), self.cluster).chosen.groups
        assert (group.device, group.ranks_per_node, group.shares) == (T4, 4, (24, 24, 24, 24))


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "cluster", "reason", "field", "message", "transient"),
        [
            (
                {"devices": ("h100",)},
                THREE,
                "NoSuchDevice",
                "spec.devices",
                "found h100, but the cluster has cpu",
                True,
            ),
            ({}, ClusterView(), "TooFewNodes", "spec.nodes.min", "found 0 nodes", True),
            (
                {"nodes_min": 5},
                THREE,
                "TooFewNodes",
                "spec.nodes.min",
                "found 3 nodes that the job can use, expected at least 5",
                True,
            ),
            (
                {"global_batch": 2, "nodes_min": 3},
                THREE,
                "BatchTooSmall",
                "spec.globalBatchSize",
                "found 2 samples",
                False,
            ),
            (
                {"node_selector": {"zone": "b"}},
                THREE,
                "TooFewNodes",
                "spec.nodes.min",
                "nodeSelector zone=b does not match",
                True,
            ),
            ({"cpu_per_pod": 3.0}, THREE, "DeviceBusy", "spec.nodes.min", "2 CPUs free, 3 needed", True),
            (
                {"memory_per_pod_nbytes": 2**34},
                THREE,
                "DeviceBusy",
                "spec.nodes.min",
                "4 GiB of memory free, 16 needed",
                True,
            ),
            ({"model": "vgg"}, THREE, "BadWorkload", "spec.model", "model 'vgg': expected one of", False),
            ({"dataset": "iris"}, THREE, "BadWorkload", "spec.model", "does not fit dataset iris", False),
            (
                {"model": None},
                THREE,
                "BadWorkload",
                "spec.model",
                "expected spec.model.name or spec.model.hints",
                False,
            ),
        ],
    )
    def test_named(
        self, change: dict[str, Any], cluster: ClusterView, reason: str, field: str, message: str, transient: bool
    ) -> None:
        found = refused(replace(DIGITS, **change), cluster)
        assert (found.reason, found.field, found.transient) == (reason, field, transient)
        assert message in found.message

    def test_a_model_too_large(self) -> None:
        huge = Request(job="j", global_batch=8, total_steps=1, parameters=10**11, flops_per_sample=1e15)
        found = refused(huge, view({"device": T4, "devices": 2, "cpu": 8}, {"device": A100, "cpu": 8}))
        assert (found.reason, found.field) == ("DoesNotFit", "spec.globalBatchSize")
        assert "Tesla-T4: does not fit" in found.message
        assert f"{A100}: does not fit" in found.message
        assert "of 16 GiB" in found.message

    def test_too_few_to_hold_the_batch(self) -> None:
        request = replace(RESNET, global_batch=4096)
        decision = decided(request, view({"count": 4, "device": T4, "devices": 4, "cpu": 16}))
        (line,) = [r for r in decision.refusals if "does not fit" in r.reason]
        assert line.summary == "up to 7 x Tesla-T4"
        assert sum(len(g.shares) for g in decision.chosen.groups) >= 8

    def test_busy_and_tainted_nodes(self) -> None:
        nodes = (
            Node("a", T4, free_devices=0, is_gpu=True),
            Node("b", "cpu", taints=(("dedicated", "x", "NoSchedule"),)),
            Node("c", "cpu", taints=(("slow", "", "PreferNoSchedule"),)),
        )
        decision = decided(DIGITS, ClusterView(nodes))
        lines = {r.summary: r.reason for r in decision.refusals}
        assert lines["1 x Tesla-T4"] == "no free device"
        assert lines["1 x cpu"] == "taint dedicated=x:NoSchedule is not tolerated"
        found = refused(replace(DIGITS, devices=("t4",)), ClusterView(nodes))
        assert (found.reason, found.transient) == ("DeviceBusy", True)

    @pytest.mark.parametrize(
        ("toleration", "tolerated"),
        [
            ({"key": "dedicated", "operator": "Equal", "value": "x", "effect": "NoSchedule"}, True),
            ({"key": "dedicated", "value": "x"}, True),
            ({"key": "dedicated", "operator": "Exists"}, True),
            ({"operator": "Exists"}, True),
            ({"key": "dedicated", "value": "y"}, False),
            ({"key": "other", "operator": "Exists"}, False),
            ({"key": "dedicated", "operator": "Exists", "effect": "NoExecute"}, False),
        ],
    )
    def test_tolerations(self, toleration: dict[str, str], tolerated: bool) -> None:
        nodes = ClusterView((Node("b", "cpu", taints=(("dedicated", "x", "NoSchedule"),)),))
        found = plan(replace(DIGITS, tolerations=(toleration,)), nodes, {})
        assert isinstance(found, Decision) == tolerated


def every_choice(request: Request, cluster: ClusterView) -> list[Choice]:
    """All candidates: every count of every device, every collective the planner may choose."""
    workload = workload_of(request)
    ways = [
        o
        for pool in eligible(request, cluster).pools
        for g in ranks_per_node_choices(pool)
        for o in options(pool, g, workload, request, {})
    ]
    found: list[Choice] = []
    for counts in product(*(range(o.nodes + 1) for o in ways)):
        parts = ordered([Part(o, n) for o, n in zip(ways, counts, strict=True) if n])
        devices = [p.option.label for p in parts]
        nodes = sum(p.nodes for p in parts)
        if parts and len(set(devices)) == len(devices) and nodes >= request.nodes_min:
            every = (evaluate(parts, name, request, workload) for name in collectives(request, parts))
            found += [choice for choice in every if isinstance(choice, Choice)]
    return found


class TestSearch:
    @settings(max_examples=25, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.1, 0.25, 0.5, 1.0])), min_size=1, max_size=3),
        st.sampled_from([DIGITS, replace(RESNET, global_batch=64), replace(DIGITS, model="mlp", minimize="Energy")]),
        st.integers(1, 2),
    )
    def test_finds_what_exhaustive_search_finds(
        self, groups: list[tuple[int, float]], request: Request, least: int
    ) -> None:
        nodes = [
            Node(f"n{g}-{i}", f"cpu{g}", cpu=cores, free_cpu=cores)
            for g, (count, cores) in enumerate(groups)
            for i in range(count)
        ]
        request = replace(request, nodes_min=min(least, len(nodes)))
        cluster = ClusterView(tuple(nodes))
        best = min(objective.score(request, c.prediction) for c in every_choice(request, cluster))
        chosen = objective.score(request, decided(request, cluster).chosen.prediction)
        assert best * (1 - 1e-9) <= chosen <= best * (1 + objective.INDISTINCT)

    @settings(max_examples=10, deadline=None)
    @given(st.lists(st.tuples(st.integers(20, 200), st.floats(0.05, 1.0)), min_size=3, max_size=6), st.integers(7, 15))
    def test_a_large_cluster_is_searched_nearly_as_well(self, groups: list[tuple[int, float]], log2_batch: int) -> None:
        """No single random combination that was not looked at is better by more than a twentieth."""
        request = replace(RESNET, global_batch=2**log2_batch)
        ways = self.ways(request, groups)
        screen = Screen(ways, request, workload_of(request))
        search = Search(ways, request, screen)
        search.run()
        rng = np.random.default_rng(0)
        most = np.array([o.nodes for o in ways])
        rows = (rng.random((3000, len(ways))) ** 3 * (most + 1)).astype(np.int64)
        rows = rows[rows.sum(axis=1) > 0]
        assert search.scores.min() <= objective.scores(request, screen.screen(rows)).min() * 1.05

    @staticmethod
    def ways(request: Request, groups: list[tuple[int, float]]) -> list[Option]:
        nodes = tuple(
            Node(f"n{g}-{i}", f"cpu{g}", cpu=c, free_cpu=c, free_memory_nbytes=2**36)
            for g, (count, c) in enumerate(groups)
            for i in range(count)
        )
        pools = eligible(request, ClusterView(nodes)).pools
        return [o for pool in pools for o in options(pool, 1, workload_of(request), request, {})]

    def test_the_screen_agrees_with_the_exact_prediction(self) -> None:
        request = replace(RESNET, global_batch=512)
        ways = self.ways(request, [(8, 0.1), (8, 0.3), (8, 1.0)])
        screen, workload = Screen(ways, request, workload_of(request)), workload_of(request)
        for row in ([1, 0, 0], [0, 5, 0], [3, 2, 1], [8, 8, 8]):
            found = screen.screen(np.array([row]))
            parts = [Part(o, n) for o, n in zip(ways, row, strict=True) if n]
            exact = evaluate(parts, found.collective[0], request, workload)
            assert isinstance(exact, Choice)
            assert found.step_s[0] == pytest.approx(exact.prediction.step_s, rel=0.03)
            assert found.step_p90_s[0] == pytest.approx(exact.prediction.step_p90_s, rel=0.03)
            assert found.energy_J[0] * request.total_steps == pytest.approx(exact.prediction.energy_J, rel=0.05)
            assert found.usd[0] * request.total_steps == pytest.approx(exact.prediction.cost_usd, rel=0.03)

    def test_a_thousand_nodes_of_eight_devices(self) -> None:
        cluster = ClusterView(
            tuple(Node(f"n{i}", f"cpu{i % 8}", cpu=(1 + i % 8) / 8, free_cpu=1.0) for i in range(1000))
        )
        chosen = decided(replace(RESNET, global_batch=4096), cluster).chosen
        assert sum(sum(g.shares) for g in chosen.groups) == 4096
        assert len({g.name for g in chosen.groups}) == len(chosen.groups)

    def test_the_grid(self) -> None:
        assert grid(1) == [1]
        assert grid(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]


class TestLaws:
    @settings(deadline=None, max_examples=40)
    @given(
        st.integers(1, 6),
        st.integers(1, 2000),
        st.sampled_from([0.25, 1.0, 8.0]),
        st.sampled_from(["digits-cnn", "mlp", "resnet18"]),
    )
    def test_of_every_decision(self, nodes: int, batch: int, cores: float, model: str) -> None:
        dataset = "synthetic-images" if model == "resnet18" else "digits"
        request = Request(job="j", global_batch=batch, total_steps=7, model=model, dataset=dataset)
        found = plan(request, view({"count": nodes, "cpu": cores, "memory": "8Gi"}), {})
        if isinstance(found, Infeasible):
            assert found.reason == "DoesNotFit"
            return
        for choice in found.candidates:
            p = choice.prediction
            assert sum(b for g in choice.groups for b in g.shares) == batch
            assert 0 < p.efficiency <= 1
            assert 0 < p.compute_s <= p.step_s < p.step_p90_s
            assert p.total_s == pytest.approx(7 * p.step_s)
            assert p.samples_per_s == pytest.approx(batch / p.step_s)
            assert p.memory_nbytes <= p.host_memory_nbytes <= 8 * 2**30
            assert (p.energy_J or 0) > 0
            assert (p.cost_usd or 0) > 0

    @settings(deadline=None, max_examples=20)
    @given(st.integers(1, 5), st.integers(6, 500))
    def test_a_further_node_never_slows_the_best_plan(self, nodes: int, batch: int) -> None:
        request = replace(DIGITS, global_batch=batch)
        fewer, more = (
            decided(request, view({"count": n, "cpu": 1})).chosen.prediction.step_s for n in (nodes, nodes + 1)
        )
        assert more <= fewer * (1 + objective.INDISTINCT)


class TestNames:
    @pytest.mark.parametrize(
        ("device", "name", "meant"),
        [
            (A100, "a100", True),
            (A100, "A100-SXM4", True),
            (A100, "a100-sxm4-40gb", True),
            (A100, "nvidia-a100", True),
            (A100, "a10", False),
            (A100, "a100-sxm4-80gb", False),
            (T4, "t4", True),
            ("NVIDIA-H100-80GB-HBM3", "h100", True),
            ("cpu-fast", "cpu", False),
            ("cpu-fast", "cpu-fast", True),
            ("NVIDIA-A10", "nvidia", False),
        ],
    )
    def test_which_devices_a_user_means(self, device: str, name: str, meant: bool) -> None:
        assert wanted(device, [name]) == meant

    def test_groups(self) -> None:
        assert group_names([A100, A100, T4, "cpu", "CPU_Fast", "3090", "---", "x" * 40]) == [
            "a100-sxm4-40gb",
            "a100-sxm4-40gb-2",
            "t4",
            "cpu",
            "cpu-fast",
            "d3090",
            "d",
            "x" * 16,
        ]

    def test_figures(self) -> None:
        assert [duration(s) for s in (8.6e-5, 0.0042, 12.3, 200, 3900, 3 * 86400)] == [
            "86us",
            "4.2ms",
            "12.3s",
            "3m20s",
            "1h05m",
            "3.0d",
        ]
        assert [joules(e) for e in (12.4, 52_000, 7.2e6)] == ["12 J", "52 kJ", "2 kWh"]
        assert (rate(1.25e9), rate(3.1e6), gibibytes(1.5 * 2**30)) == ("10 Gbit/s", "24.8 Mbit/s", "1.5 GiB")
