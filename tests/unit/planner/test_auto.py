"""Tests of strategy Auto: when a plan uses model parallelism, when it does not, and the reasons it gives."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.cluster import ClusterView
from dljob.perf.step import model_split as split
from dljob.planner import Choice, FixedChoice, Infeasible, Learned, LearnedPoint, Request, plan, scaling
from dljob.planner.candidates.collectives import AUTO
from dljob.planner.candidates.evaluate import Part
from dljob.planner.candidates.node_layout import largest_layouts
from dljob.planner.candidates.options import options
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.candidates.strategies.micro_batches import micro_batch_counts
from dljob.planner.candidates.strategies.split_candidate import SplitCandidate
from dljob.planner.search import objective
from dljob.planner.search.enumeration import grid
from dljob.planner.search.model_split import evaluate
from support.planner_questions import A100, DIGITS, T4, THREE, decided, rejected, view

RESNET18 = Request(
    job="j", global_batch=256, total_steps=100, model="resnet18", dataset="synthetic-images", strategy="Auto"
)
GPT = replace(RESNET18, global_batch=64, model="gpt-mini", dataset="synthetic-tokens")
SMALL_PODS = 2**30
"""Three pods with this memory cannot hold a batch of 256 images with any shares."""
REQUESTS = (
    RESNET18,
    replace(RESNET18, model="resnet50", global_batch=64),
    GPT,
    replace(GPT, model="mlp", dataset=None),
)


def cpus(count: int, bandwidth: str = "1.25G", memory: str = "4Gi") -> ClusterView:
    return view({"count": count, "cpu": 2, "memory": memory, "bandwidth": bandwidth})


def refusals(request: Request, cluster: ClusterView) -> dict[str, str]:
    return {r.summary: r.reason for r in decided(request, cluster).refusals}


@given(st.integers(1, 10_000), st.integers(2, 64))
def test_micro_batch_counts_are_increasing_and_bounded(batch: int, stages: int) -> None:
    """The counts end at one sample each or the contract's limit. Each one makes the micro-batches smaller."""
    counts = list(micro_batch_counts(batch, stages))
    assert all(few < many for few, many in pairwise(counts))
    assert counts[0] >= 1 and counts[-1] <= min(batch, 4096)
    assert counts[-1] == batch or batch > 4096
    assert all(-(-batch // k) < -(-batch // (k - 1)) for k in counts if k > 1)


class TestProperties:
    @settings(deadline=None, max_examples=60)
    @given(
        st.sampled_from(REQUESTS),
        st.integers(1, 9),
        st.sampled_from(["1M", "12.5M", "125M", "12.5G"]),
        st.sampled_from([None, 640 * 2**20, SMALL_PODS, 2**31]),
        st.sampled_from([1, 7, 64, 256]),
        st.sampled_from(["Time", "Energy", "Cost"]),
        st.sampled_from([None, 120.0, 900.0]),
    )
    def test_model_parallelism_is_chosen_only_if_surely_better_or_necessary(
        self, base: Request, nodes: int, bandwidth: str, memory: int | None, batch: int, minimize: Any, deadline: Any
    ) -> None:
        request = replace(
            base, global_batch=batch, memory_per_pod_nbytes=memory, minimize=minimize, deadline_s=deadline
        )
        cluster = cpus(nodes, bandwidth)
        auto, whole = (plan(r, cluster, {}) for r in (request, replace(request, no_split_reason="disabled")))
        if isinstance(auto, Infeasible):
            assert isinstance(whole, Infeasible) and whole.reason == auto.reason
            return
        for found in auto.candidates:
            self.assert_valid(request, found)
        if isinstance(whole, Infeasible):
            assert auto.chosen.splits_model and whole.reason == "DoesNotFit"
        elif auto.chosen.splits_model:
            p, q = auto.chosen.prediction, whole.chosen.prediction
            meets, whole_meets = (objective.meets(request, each.total_p90_s) for each in (p, q))
            assert meets >= whole_meets
            assert meets > whole_meets or p.total_p90_s < q.total_s or minimize != "Time"
            assert meets > whole_meets or objective.score(request, p) < objective.score(request, q)
        else:
            assert auto.chosen == whole.chosen, "the plan is the same as without model parallelism"

    @staticmethod
    def assert_valid(request: Request, found: Choice) -> None:
        """Assert the requirements of the contract and the trainer."""
        if not found.splits_model:
            assert sum(share for g in found.groups for share in g.shares) == request.global_batch
            return
        (group,) = found.groups
        model, ranks = split.cut_up(workload_of(request)), len(group.shares)
        assert set(group.shares) == {request.global_batch} and ranks >= 2
        if found.strategy == "Pipeline":
            assert ranks <= min(64, len(model.stages)) and found.collective == "MPI"
            assert 1 <= found.micro_batches <= request.global_batch
        else:
            assert model.pairs is not None and ranks <= model.pairs.units
            assert found.collective != "ParameterServer" and found.micro_batches == 1

    @settings(deadline=None, max_examples=25)
    @given(
        st.sampled_from(REQUESTS),
        st.integers(2, 6),
        st.sampled_from(["1M", "125M"]),
        st.sampled_from([None, SMALL_PODS]),
        st.sampled_from([6, 97, 256]),
        st.sampled_from(["Time", "Energy"]),
        st.sampled_from([0, 1, 4]),
    )
    def test_search_is_as_good_as_exhaustive_search(
        self, base: Request, nodes: int, bandwidth: str, memory: int | None, batch: int, minimize: Any, gpus: int
    ) -> None:
        request = replace(base, global_batch=batch, memory_per_pod_nbytes=memory, minimize=minimize)
        cluster, workload = cpus(nodes, bandwidth), workload_of(request)
        if gpus:
            entry = {"count": nodes, "device": T4, "devices": gpus, "cpu": 8, "memory": "6Gi", "bandwidth": bandwidth}
            cluster = view(entry, {**entry, "device": A100, "count": 1, "memory": "64Gi"})
        model = split.cut_up(workload)
        best: dict[str, float] = {}
        for pool in eligible(request, cluster).pools:
            for option in [o for g in largest_layouts(pool, request) for o in options(pool, g, workload, request, {})]:
                for part in [Part(option, n) for n in range(1, option.nodes + 1) if n * option.ranks_per_node > 1]:
                    ways = [SplitCandidate(part, "Pipeline", "MPI", k) for k in micro_batch_counts(batch, part.ranks)]
                    ways = ways if part.ranks <= len(model.stages) else []
                    if model.pairs is not None and part.nodes in grid(
                        min(option.nodes, model.pairs.units // option.ranks_per_node)
                    ):
                        names = [n for n in AUTO[option.pool.is_gpu] if n != "ParameterServer"]
                        ways += [SplitCandidate(part, "Tensor", name) for name in names]
                    for choice in (evaluate(way, request, model) for way in ways):
                        if isinstance(choice, Choice):
                            score = objective.score(request, choice.prediction)
                            best[choice.strategy] = min(score, best.get(choice.strategy, score))
        found = plan(replace(request, candidates_kept=100), cluster, {})
        if isinstance(found, Infeasible):
            assert not best
            return
        for strategy, score in best.items():
            scores = [objective.score(request, c.prediction) for c in found.candidates if c.strategy == strategy]
            assert min(scores) == pytest.approx(score)


class TestChoice:
    def test_pipeline_is_chosen_if_nothing_else_fits(self) -> None:
        request = replace(RESNET18, memory_per_pod_nbytes=SMALL_PODS)
        assert rejected(replace(request, strategy="Data"), cpus(3)).reason == "DoesNotFit"
        assert rejected(replace(request, strategy="Optimizer"), cpus(3)).reason == "DoesNotFit"
        chosen = decided(request, cpus(3)).chosen
        assert chosen.strategy == "Pipeline" and chosen.summary.startswith("3 x cpu, Pipeline of 3 stages, ")
        assert chosen.prediction.host_memory_nbytes <= SMALL_PODS
        reasons = refusals(request, cpus(3))
        assert "does not fit" in reasons["up to 3 x cpu"], "the reason why data parallelism is not chosen"

    def test_each_strategy_has_a_reason_if_nothing_fits(self) -> None:
        why = rejected(replace(RESNET18, memory_per_pod_nbytes=500 * 2**20), cpus(3))
        assert why.reason == "DoesNotFit"
        assert "part of the model needs" in {r.summary: r.reason for r in why.refusals}["3 x cpu, Pipeline"]

    def test_pipeline_is_chosen_if_surely_faster(self) -> None:
        """ResNet-50 has 100 MB of gradients, and its stages exchange a tenth of that. One node cannot hold the model."""
        request = replace(RESNET18, model="resnet50", global_batch=64)
        decision = decided(request, cpus(8, "12.5M"))
        assert decision.chosen.strategy == "Pipeline"
        best = decided(replace(request, no_split_reason="disabled"), cpus(8, "12.5M")).chosen.prediction
        assert decision.chosen.prediction.total_p90_s < best.total_s
        assert any(c.strategy != "Pipeline" for c in decision.candidates), "the table also lists other strategies"

    def test_split_that_is_better_within_its_uncertainty_is_listed_but_not_chosen(self) -> None:
        request = replace(RESNET18, global_batch=64)
        cluster = cpus(8, "12.5M")
        decision = decided(request, cluster)
        best = min((c for c in decision.candidates if c.splits_model), key=lambda c: c.prediction.step_s)
        assert best.prediction.step_s < decision.chosen.prediction.step_s < best.prediction.step_p90_s
        assert decision.chosen == decided(replace(request, strategy="Data"), cluster).chosen
        assert "% better, which is within the uncertainty" in refusals(request, cluster)[best.summary]

    def test_measured_compute_times_reduce_the_uncertainty_of_a_split(self) -> None:
        """The device causes half of the uncertainty of data sheets. A profile leaves only that of the split."""
        points = tuple(LearnedPoint(b, 0.011 + 0.029 * b, 50) for b in (1, 8, 64))
        learned = {("resnet18", "cpu"): Learned(points)}
        request, cluster = replace(RESNET18, global_batch=64), cpus(8, "125M")
        assert not decided(request, cluster).chosen.splits_model
        profiled = decided(request, cluster, learned).chosen
        assert profiled.splits_model and profiled.prediction.basis == "profile"
        ratio = profiled.prediction.step_p90_s / profiled.prediction.step_s
        assert ratio > 1.3, "the split itself has not been measured"

    @pytest.mark.parametrize("minimize", ["Time", "Energy", "Cost"])
    def test_split_is_chosen_if_only_it_meets_the_deadline(self, minimize: Any) -> None:
        request = replace(RESNET18, model="resnet50", global_batch=64, minimize=minimize)
        cluster = cpus(8, "12.5M")
        whole = decided(replace(request, minimize="Time", no_split_reason="disabled"), cluster).chosen.prediction
        fastest = decided(replace(request, minimize="Time"), cluster).chosen.prediction
        between_s = objective.STARTUP_S + (whole.total_p90_s + fastest.total_p90_s) / 2
        decision = decided(replace(request, deadline_s=between_s), cluster)
        assert decision.chosen.splits_model and decision.warning is None
        hopeless = decided(replace(request, deadline_s=between_s / 1000), cluster)
        assert hopeless.warning is not None and "no plan meets the deadline" in hopeless.warning

    def test_reasons_name_pipeline_bubble_and_activation_all_reduce(self) -> None:
        reasons = refusals(replace(GPT, nodes_min=3, nodes_max=3, candidates_kept=1), cpus(3))
        (pipeline,) = [reason for summary, reason in reasons.items() if "Pipeline of 3 stages" in summary]
        assert " % slower: " in pipeline and "pipeline bubble " in pipeline
        (tensor,) = [reason for summary, reason in reasons.items() if "x cpu, Tensor, " in summary]
        assert "all-reduce of activations" in tensor

    def test_scaling_curve_includes_pipelines(self) -> None:
        curve = scaling(replace(RESNET18, memory_per_pod_nbytes=SMALL_PODS), cpus(4), {})
        assert [(n, c.strategy) for n, c in curve][:2] == [(2, "Pipeline"), (3, "Pipeline")]

    def test_model_parallelism_needs_one_fixed_group(self) -> None:
        request = replace(RESNET18, memory_per_pod_nbytes=SMALL_PODS, fixed=(FixedChoice("cpu", 3),))
        chosen = decided(request, cpus(3)).chosen
        assert (chosen.strategy, chosen.groups[0].nodes) == ("Pipeline", 3)
        two = (FixedChoice("cpu", 2, 1, 32), FixedChoice("cpu", 1))
        reasons = refusals(replace(DIGITS, strategy="Auto", fixed=two), THREE)
        assert "the whole batch on every rank" in reasons["Pipeline"]

    def test_gpus_exchange_activations_through_main_memory(self) -> None:
        """Main memory must also hold the whole model for checkpoints, and the batches."""
        gpus = view({"count": 1, "device": A100, "devices": 4, "cpu": 32, "memory": "64Gi"})
        request = replace(RESNET18, model="resnet50", strategy="Pipeline", stages=2, micro_batches=8)
        near = decided(request, gpus).chosen.prediction
        far = view({"count": 2, "device": A100, "devices": 1, "cpu": 32, "memory": "64Gi", "bandwidth": "1000G"})
        assert near.communication_s == pytest.approx(decided(request, far).chosen.prediction.communication_s, rel=0.5)
        few = view({"count": 1, "device": A100, "devices": 4, "cpu": 32, "memory": "1Gi"})
        assert "gathers the whole model for checkpoints" in rejected(request, few).message

    def test_model_parallel_plan_never_mixes_devices(self) -> None:
        mixed = view(
            {"count": 2, "device": T4, "devices": 1, "cpu": 8, "memory": "32Gi"},
            {"count": 2, "device": A100, "devices": 1, "cpu": 8, "memory": "32Gi"},
        )
        decision = decided(replace(GPT, candidates_kept=100), mixed)
        assert {len(c.groups) for c in decision.candidates if c.splits_model} == {1}


class TestExcluded:
    @pytest.mark.parametrize(
        ("request_", "kind", "words"),
        [
            (replace(DIGITS, strategy="Auto"), "Tensor", "no pairs of linear layers"),
            (replace(GPT, collective="Ring"), "Pipeline", "spec.collective is Ring"),
            (replace(GPT, collective="ParameterServer"), "Tensor", "spec.collective is ParameterServer"),
            (replace(GPT, no_split_reason="the user says so"), "Pipeline", "the user says so"),
            (replace(GPT, no_split_reason="the user says so"), "Tensor", "the user says so"),
            (
                replace(GPT, model=None, parameters=10**6, flops_per_sample=1e9),
                "Pipeline",
                "the planner splits only built-in models by itself",
            ),
            (replace(GPT, compressed=True, collective="Ring"), "Pipeline", "gradientCompression"),
        ],
    )
    def test_excluded_strategy_has_a_reason(self, request_: Request, kind: str, words: str) -> None:
        decision = decided(replace(request_, candidates_kept=100), THREE)
        reasons = {r.summary: r.reason for r in decision.refusals}
        assert reasons[kind].startswith("not considered: ") and words in reasons[kind]
        assert kind not in {c.strategy for c in decision.candidates}

    def test_one_rank_has_no_model_parallel_candidates(self) -> None:
        assert not any(word in r for r in refusals(replace(GPT, nodes_max=1), THREE) for word in ("Pipeline", "Tensor"))

    def test_requested_collective_reduces_activations(self) -> None:
        decision = decided(replace(GPT, collective="Tree", candidates_kept=100), THREE)
        assert {c.collective for c in decision.candidates if c.strategy == "Tensor"} == {"Tree"}
