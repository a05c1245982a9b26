"""Tests of the planner's decisions, and properties of every decision."""

import re
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.api import duration_s
from dljob.perf.fit.scaling import Contention
from dljob.perf.resources import memory
from dljob.planner import FixedChoice, Infeasible, Learned, LearnedPoint, Request, plan, scaling
from dljob.planner.candidates.pools import cores_of_rank
from dljob.planner.search import objective
from dljob.planner.types.texts import duration
from support.planner_questions import A100, DIGITS, RESNET, T4, THREE, decided, rejected, view


class TestDecisions:
    def test_small_job_runs_on_one_node(self) -> None:
        tiny = Request(job="j", global_batch=32, total_steps=100, model="mlp", dataset="iris")
        chosen = decided(tiny, THREE).chosen
        assert [(g.nodes, g.shares) for g in chosen.groups] == [(1, (32,))]
        assert chosen.prediction.communication_s == 0

    def test_large_job_runs_on_several_nodes(self) -> None:
        chosen = decided(replace(RESNET, global_batch=192), view({"count": 3, "cpu": 2, "memory": "16Gi"})).chosen
        assert [(g.nodes, sum(g.shares)) for g in chosen.groups] == [(3, 192)]
        assert "computing" in chosen.prediction.bottleneck

    def test_nodes_min_is_respected(self) -> None:
        chosen = decided(replace(DIGITS, nodes_min=3, nodes_max=3), THREE).chosen
        assert chosen.summary == f"3 x cpu, {chosen.collective}, 32+32+32"
        assert chosen.groups[0].shares == (32, 32, 32)

    def test_heterogeneous_devices_get_different_batches(self) -> None:
        cluster = view({"device": "cpu-fast", "cpu": "800m"}, {"device": "cpu-slow", "cpu": "200m"})
        request = replace(DIGITS, nodes_min=2, global_batch=100)
        fast, slow = decided(request, cluster).chosen.groups
        assert (fast.device, slow.device) == ("cpu-fast", "cpu-slow")
        assert fast.shares[0] == pytest.approx(83, abs=4), "more than 4 of 5, because a step has a fixed part"
        even = decided(replace(request, uneven=False), cluster).chosen
        assert [g.shares for g in even.groups] == [(50,), (50,)]
        assert even.prediction.step_s > 1.8 * decided(request, cluster).chosen.prediction.step_s

    def test_measurements_override_the_catalogue(self) -> None:
        cluster = view({"device": "a", "cpu": 2}, {"device": "b", "cpu": 2})
        known = {
            ("digits-cnn", device): Learned(tuple(LearnedPoint(b, b * per_sample_s) for b in (12, 24, 48, 72)))
            for device, per_sample_s in (("a", 6e-4), ("b", 2e-4))
        }
        chosen = decided(replace(DIGITS, nodes_min=2), cluster, known).chosen
        assert [(g.device, g.shares) for g in chosen.groups] == [("b", (72,)), ("a", (24,))]
        assert chosen.prediction.basis == "profile"
        assert decided(replace(DIGITS, nodes_min=2), cluster).chosen.prediction.basis == "catalogue"

    def test_profile_narrows_the_interval(self) -> None:
        known = {("digits-cnn", "cpu"): Learned((LearnedPoint(32, 0.01),), 1e-4, 1e9)}
        request = replace(DIGITS, nodes_min=3)
        wide, narrow = decided(request, THREE).chosen.prediction, decided(request, THREE, known).chosen.prediction
        assert narrow.step_p90_s / narrow.step_s < 1.2 < wide.step_p90_s / wide.step_s

    def test_noisy_measurements_widen_the_interval(self) -> None:
        def p90(*seconds: float) -> float:
            points = tuple(LearnedPoint(b, s) for b, s in zip((16, 24, 32, 48), seconds, strict=True))
            p = decided(replace(DIGITS, nodes_min=3), THREE, {("digits-cnn", "cpu"): Learned(points)}).chosen.prediction
            return p.step_p90_s / p.step_s

        assert p90(0.016, 0.024, 0.032, 0.048) < p90(0.012, 0.030, 0.028, 0.055)

    def test_slow_measured_network_keeps_a_job_on_one_node(self) -> None:
        request = replace(DIGITS, global_batch=960)
        assert len(decided(request, THREE).chosen.groups[0].shares) == 3
        slow = {("digits-cnn", "cpu"): Learned(link_latency_s=0.05, link_bandwidth_Bps=1e6)}
        assert len(decided(request, THREE, slow).chosen.groups[0].shares) == 1

    def test_step_time_depends_on_node_bandwidth(self) -> None:
        request = replace(RESNET, nodes_min=4, nodes_max=4)
        steps = [
            decided(request, view({"count": 4, "cpu": 16, "memory": "64Gi", "bandwidth": b})).chosen.prediction.step_s
            for b in ("100M", "1G", "10G")
        ]
        assert steps[0] > steps[1] > steps[2]

    def test_gpus_are_preferred_and_not_mixed_with_cpus(self) -> None:
        cluster = view({"count": 2, "device": A100, "devices": 4, "cpu": 32}, {"count": 4, "device": "cpu", "cpu": 32})
        decision = decided(RESNET, cluster)
        assert {g.device for g in decision.chosen.groups} == {A100}
        assert decision.chosen.collective == "Torch"
        for choice in decision.candidates:
            assert len({g.is_gpu for g in choice.groups}) == 1

    def test_ranks_use_only_free_devices(self) -> None:
        chosen = decided(
            replace(RESNET, nodes_max=1), view({"device": A100, "devices": 8, "free": 5, "cpu": 64})
        ).chosen
        (group,) = chosen.groups
        assert (group.nodes, group.ranks_per_node, len(group.shares), group.is_gpu) == (1, 5, 5, True)
        assert group.name == "a100-sxm4-40gb"

    @pytest.mark.parametrize("like", ["BERT-base", "GPT-2"])
    def test_same_ranks_on_more_nodes_are_slower(self, like: str) -> None:
        """Regression: the predictions for 2 and 4 nodes were equal, because all hops of a ring cost a network hop."""
        request = Request(job="j", global_batch=64, total_steps=100, like=like)
        cluster = view({"count": 8, "device": A100, "devices": 8, "cpu": 64, "bandwidth": "12.5G"})
        found = [
            decided(replace(request, fixed=(FixedChoice(A100, n, 8 // n),)), cluster).chosen.prediction
            for n in (1, 2, 4, 8)
        ]
        for near, far in pairwise(found):
            assert near.communication_s < far.communication_s
            assert near.step_s < far.step_s

    @pytest.mark.parametrize("minimize", ["Energy", "Cost"])
    def test_saving_energy_or_cost_takes_more_time(self, minimize: Any) -> None:
        cluster = view({"count": 8, "cpu": 8, "memory": "32Gi"})
        fast = decided(RESNET, cluster).chosen.prediction
        frugal = decided(replace(RESNET, minimize=minimize), cluster).chosen.prediction
        assert frugal.total_s > fast.total_s
        assert (frugal.energy_J or 0) < (fast.energy_J or 0)
        assert (frugal.cost_usd or 0) < (fast.cost_usd or 0)

    def test_deadline_is_met_with_minimum_energy(self) -> None:
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

    def test_impossible_deadline_gives_the_fastest_plan_and_a_warning(self) -> None:
        cluster = view({"count": 3, "cpu": 2, "memory": "16Gi"})
        request = replace(RESNET, minimize="Energy", deadline_s=60.0)
        decision = decided(request, cluster)
        assert decision.warning is not None
        assert "no plan meets the deadline of 1m00s" in decision.warning
        assert "too long" in decision.warning
        assert decision.chosen.groups == decided(RESNET, cluster).chosen.groups

    @pytest.mark.parametrize("minimize", ["Time", "Energy"])
    @pytest.mark.parametrize("steps", [7, 1000, 4001, 400_000])
    def test_the_advised_deadline_is_met(self, minimize: Any, steps: int) -> None:
        cluster = view({"count": 3, "cpu": 2, "memory": "16Gi"})
        request = replace(RESNET, minimize=minimize, total_steps=steps, deadline_s=1.0)
        warning = decided(request, cluster).warning
        advised = re.search(r"Raise the deadline to (\S+),", warning or "")
        assert advised is not None
        assert decided(replace(request, deadline_s=duration_s(advised[1])), cluster).warning is None

    def test_texts_about_the_remaining_steps_do_not_show_the_deadline_of_a_whole_training(self) -> None:
        """A running job is planned with a deadline in proportion to its remaining steps, which its user never set."""
        cluster = view({"count": 3, "cpu": 2, "memory": "16Gi"})
        fastest = decided(RESNET, cluster).chosen.prediction
        request = replace(RESNET, minimize="Energy", candidates_kept=1)
        pace_s = (fastest.total_p90_s + objective.STARTUP_S) / 1.25
        warning = decided(request.at_pace(pace_s), cluster).warning
        assert warning is not None and "takes 1.25 times the time that is left" in warning
        assert f"{duration(pace_s)}" not in warning
        past = decided(request.at_pace(1.0), cluster).warning
        assert past is not None and "more than 100 times" in past
        late = [r.reason for r in decided(request.at_pace(pace_s * 1.3), cluster).refusals]
        assert any("misses the deadline: " in reason and "times the time that is left" in reason for reason in late)
        assert decided(request.at_pace(inf), cluster) == decided(request, cluster)

    def test_slower_collectives_are_listed_with_a_reason(self) -> None:
        cluster = view({"count": 5, "cpu": 8, "memory": "64Gi"})
        even = decided(replace(RESNET, nodes_min=4, nodes_max=4, candidates_kept=2), cluster)
        decision = decided(replace(RESNET, nodes_min=5, candidates_kept=2), cluster)
        # Halving-doubling has the same traffic in fewer messages. With five ranks, its traffic would be twice a ring's.
        assert (even.chosen.collective, decision.chosen.collective) == ("HalvingDoubling", "Ring")
        lines = [r.reason for r in decision.refusals if "ParameterServer" in r.summary]
        assert lines
        assert lines[0].startswith("slower: ")

    def test_short_messages_use_collectives_with_few_rounds(self) -> None:
        tiny = replace(DIGITS, model="mlp", nodes_min=16)
        assert decided(tiny, view({"count": 16, "cpu": 2})).chosen.collective == "HalvingDoubling"
        on_fast_links = view({"count": 16, "cpu": 2, "bandwidth": "100G"})
        assert decided(tiny, on_fast_links).chosen.collective == "Butterfly"

    def test_parameter_server_has_share_0(self) -> None:
        chosen = decided(replace(DIGITS, nodes_min=3, collective="ParameterServer"), THREE).chosen
        assert chosen.groups[0].shares == (48, 48, 0)
        single = decided(replace(DIGITS, nodes_max=1, collective="ParameterServer"), THREE).chosen
        assert single.groups[0].shares == (96,)

    def test_candidates_differ_and_start_with_the_chosen_one(self) -> None:
        decision = decided(replace(RESNET, candidates_kept=4), view({"count": 40, "cpu": 8, "memory": "64Gi"}))
        assert decision.candidates[0] == decision.chosen
        assert len(decision.candidates) == 4
        assert len({sum(g.nodes for g in c.groups) for c in decision.candidates}) == 4

    @pytest.mark.parametrize(
        ("cpu", "ranks", "requested", "limit", "cores"),
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
    def test_cores_of_a_rank_follow_request_and_limit(
        self, cpu: float, ranks: int, requested: float | None, limit: float | None, cores: float
    ) -> None:
        assert cores_of_rank(cpu, ranks, replace(DIGITS, cpu_per_pod=requested, cpu_limit_per_pod=limit)) == cores

    def test_unknown_gpu_gives_a_warning(self) -> None:
        decision = decided(DIGITS, view({"device": "NVIDIA-X9000", "gpu": True, "cpu": 8}))
        assert "NVIDIA-X9000 is not in the catalogue" in (decision.warning or "")

    def test_part_of_a_gpu_is_not_called_a_t4(self) -> None:
        part = "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb"
        decision = decided(DIGITS, view({"device": part, "gpu": True, "cpu": 8}))
        assert f"device {part} is a part of a GPU" in (decision.warning or "") and "T4" not in (decision.warning or "")

    def test_different_nodes_of_one_device_give_a_warning(self) -> None:
        decision = decided(replace(DIGITS, nodes_min=2), view({"cpu": 0.5}, {"cpu": 8}))
        text = "nodes of device cpu have different numbers of CPUs: the plan assumes the smallest, 0.5 CPUs"
        assert text in (decision.warning or "")
        assert decided(DIGITS, view({"cpu": 0.5}, {"cpu": 8})).warning is None, "the plan leaves the small node out"

    def test_training_script_is_planned_by_its_hints(self) -> None:
        script = Request(
            job="j",
            global_batch=64,
            total_steps=10,
            profile="program-1",
            parameters=10**8,
            flops_per_sample=6e11,
            activation_nbytes_per_sample=10**7,
        )
        chosen = decided(script, view({"device": T4, "devices": 4, "cpu": 16})).chosen
        assert chosen.prediction.compute_s == pytest.approx(16 * 6e11 / (8.1e12 * 0.55), rel=0.1)

    def test_disk_is_the_bottleneck_for_files_larger_than_memory(self) -> None:
        script = Request(
            job="j", global_batch=64, total_steps=10**5, profile="program-1", parameters=10**6, flops_per_sample=1e8,
            activation_nbytes_per_sample=10**5, sample_nbytes=10**6, dataset_samples=10**5,
        )  # fmt: skip
        cluster = view({"device": T4, "devices": 1, "cpu": 16, "memory": "512Gi"})
        found = decided(replace(script, cpu_per_pod=1.0), cluster).chosen.prediction
        assert found.data_s == pytest.approx(64 * (1e6 / 5e8 + 2 * 1e6 / 1e10 + 1e6 / 16e9), rel=0.01)
        assert (
            found.bottleneck.startswith("data ")
            and "mostly reading from disk; batches are loaded between steps" in found.bottleneck
        )
        ahead = decided(replace(script, cpu_per_pod=4.0), cluster).chosen.prediction
        assert ahead.bottleneck.endswith("mostly reading from disk")
        assert ahead.data_s == pytest.approx(64 * 1e6 / 5e8 - ahead.compute_s, rel=0.01), "computation hides the rest"
        assert ahead.total_s > 10**5 * ahead.step_s, "the first batch is not hidden"
        assert ahead.host_memory_nbytes > found.host_memory_nbytes + 3 * (memory.WORKER_NBYTES + 2 * 64 * 10**6) - 1
        cached = decided(replace(script, memory_per_pod_nbytes=200 * 2**30), cluster).chosen.prediction
        assert cached.data_s < 0.2 * found.data_s, "the page cache of a pod with more memory holds the dataset"
        assert "disk" not in decided(replace(script, dataset_samples=None), cluster).chosen.prediction.bottleneck

    def test_measured_decoding_makes_a_plan_data_bound(self) -> None:
        """Decoding takes 0.64 s per step, which 15 workers can hide but 3 cannot."""
        script = Request(
            job="j", global_batch=64, total_steps=10**5, profile="program-1", parameters=10**6, flops_per_sample=1e9,
            activation_nbytes_per_sample=10**5, cpu_per_pod=4.0,
        )  # fmt: skip
        cluster, known = (
            view({"device": T4, "cpu": 16, "memory": "64Gi"}),
            Learned((LearnedPoint(64, 0.1),), fetch_s=0.01),
        )
        few, many = (
            decided(replace(script, cpu_per_pod=cpus), cluster, {("program-1", T4): known}).chosen.prediction
            for cpus in (4.0, 16.0)
        )
        assert few.data_s == pytest.approx(0.64 / 3 - 0.1, rel=0.02) and few.bottleneck.endswith("preparing samples")
        assert many.data_s == 0 and many.step_s == pytest.approx(0.1, rel=0.05)

    def test_scaling_lists_the_best_plan_of_each_size(self) -> None:
        points = scaling(RESNET, view({"count": 12, "cpu": 2, "memory": "64Gi"}), {})
        assert [n for n, _ in points] == [1, 2, 3, 4, 6, 8, 12]
        assert all(0 < choice.prediction.efficiency <= 1 for _, choice in points)
        assert points[0][1].prediction.efficiency == pytest.approx(1.0)


class TestFixed:
    cluster = view({"count": 4, "device": "cpu", "cpu": 2}, {"name": "g", "device": T4, "devices": 4, "cpu": 16})

    def test_fixed_groups_are_used_as_given(self) -> None:
        request = replace(DIGITS, fixed=(FixedChoice("cpu", 2, 1, 40), FixedChoice("cpu", 1)))
        first, second = decided(request, self.cluster).chosen.groups
        assert (first.name, first.shares) == ("cpu", (40, 40))
        assert (second.name, second.shares) == ("cpu-2", (16,))

    @pytest.mark.parametrize(
        ("fixed", "reason", "field", "message"),
        [
            ((FixedChoice("cpu", 2, 1, 40),), "BatchMismatch", "spec.planning.groups", "add up to 80 samples"),
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
                "found the device types v100, which no node has; expected a device type of the cluster (it has Tesla-T4, cpu)",
            ),
            ((FixedChoice("cpu", 5),), "TooFewNodes", "spec.planning.groups[0].nodes", "found 4 nodes with device cpu"),
            (
                (FixedChoice("cpu", 3), FixedChoice("cpu", 2)),
                "TooFewNodes",
                "spec.planning.groups[1].nodes",
                "found 1 nodes",
            ),
            (
                (FixedChoice("t4", 1, 2), FixedChoice(T4, 1, 2)),  # on two different nodes, and there is one
                "TooFewNodes",
                "spec.planning.groups[1].nodes",
                "found 0 nodes",
            ),
            (
                (FixedChoice("t4", 1, 5),),
                "TooFewNodes",
                "spec.planning.groups[0].nodes",
                "room for 5 ranks on each node",
            ),
            ((FixedChoice("cpu", 4, 30),), "BatchTooSmall", "spec.globalBatchSize", "96 samples for 120 ranks"),
        ],
    )
    def test_invalid_requests_are_rejected(
        self, fixed: tuple[FixedChoice, ...], reason: str, field: str, message: str
    ) -> None:
        found = rejected(replace(DIGITS, fixed=fixed), self.cluster)
        assert (found.reason, found.field) == (reason, field)
        assert message in found.message

    def test_device_names_without_vendor_are_accepted(self) -> None:
        (group,) = decided(replace(DIGITS, fixed=(FixedChoice("t4", 1, 4, 24),)), self.cluster).chosen.groups
        assert (group.device, group.ranks_per_node, group.shares) == (T4, 4, (24, 24, 24, 24))

    def test_prediction_uses_learned_contention_and_spreads(self) -> None:
        """Contention only slows down ranks that share a node. A wider spread only changes the p90."""
        points = (LearnedPoint(8, 0.010), LearnedPoint(32, 0.030))
        known = Learned(points=points, compute_spread=0.05, link_spread=0.05)
        crowded = replace(known, contention=Contention(sharing=0.1, crowding=0.2))
        unsure = replace(known, compute_spread=0.3, link_spread=0.3)
        for per_node, slowdown in ((1, 1.0), (4, 1.53)):
            request = replace(DIGITS, fixed=(FixedChoice("t4", 1, per_node, 24),), global_batch=24 * per_node)
            plain, slow, wide = (
                decided(request, self.cluster, {("digits-cnn", T4): k}).chosen.prediction
                for k in (known, crowded, unsure)
            )
            assert slow.compute_s == pytest.approx(slowdown * plain.compute_s, rel=0.01)
            assert wide.step_s == plain.step_s
            assert wide.step_p90_s > 1.1 * plain.step_p90_s


class TestProperties:
    @settings(deadline=None, max_examples=40)
    @given(
        st.integers(1, 6),
        st.integers(1, 2000),
        st.sampled_from([0.25, 1.0, 8.0]),
        st.sampled_from(["digits-cnn", "mlp", "resnet18"]),
    )
    def test_every_decision_is_consistent(self, nodes: int, batch: int, cores: float, model: str) -> None:
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
            assert 7 * p.step_s <= p.total_s - p.evaluations_s - p.checkpoints_s <= 9 * p.step_s, "and the first batch"
            assert p.samples_per_s == pytest.approx(batch / p.step_s)
            assert p.memory_nbytes <= p.host_memory_nbytes <= 8 * 2**30
            assert (p.energy_J or 0) > 0
            assert (p.cost_usd or 0) > 0

    @settings(deadline=None, max_examples=20)
    @given(st.integers(1, 5), st.integers(6, 500))
    def test_additional_node_never_slows_down_the_best_plan(self, nodes: int, batch: int) -> None:
        request = replace(DIGITS, global_batch=batch)
        fewer, more = (
            decided(request, view({"count": n, "cpu": 1})).chosen.prediction.step_s for n in (nodes, nodes + 1)
        )
        assert more <= fewer * (1 + objective.INDISTINCT)
