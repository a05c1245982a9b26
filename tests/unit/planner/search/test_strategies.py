"""Tests of plans with a sharded optimizer and other strategies: memory, time, and when they are chosen."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.cluster.catalogue import gpu_nbytes
from dljob.perf.resources import memory
from dljob.perf.step.communication import Link, ring_s, scatter_gather_s
from dljob.perf.workload.workload import builtin
from dljob.planner import Choice, FixedChoice, Infeasible, Request, plan
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.node_layout import Layout
from dljob.planner.candidates.options import options, sharing_options
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.search import objective
from dljob.planner.search.screen import Screen
from support.planner_questions import DIGITS, RESNET, T4, THREE, decided, rejected, view

T4S = view({"count": 8, "device": T4, "devices": 2, "cpu": 16, "memory": "256Gi", "bandwidth": "3G"})


def large(parameters: float) -> Request:
    """Return a script with AdamW. A rank stores 16 bytes per parameter, or 8 and a part of 8 if sharded."""
    return Request(
        job="j",
        global_batch=64,
        total_steps=10,
        profile="own",
        parameters=int(parameters),
        flops_per_sample=1e10,
        activation_nbytes_per_sample=10**6,
        optimizer="AdamW",
    )


links = st.builds(Link, st.floats(0, 1e-2), st.floats(1e6, 1e12), st.floats(1e8, 1e12))


class TestTerms:
    @given(st.floats(1.0, 1e11), st.integers(1, 512), links, st.integers(1, 50))
    def test_reduce_scatter_and_all_gather_add_up_to_a_ring(
        self, nbytes: float, n: int, link: Link, buckets: int
    ) -> None:
        to_owners, from_owners = scatter_gather_s(nbytes, n, link, buckets)
        whole = buckets * ring_s(nbytes / buckets, n, link) if n > 1 else 0.0
        assert to_owners + from_owners == pytest.approx(whole)
        assert 0 <= from_owners <= to_owners

    @given(st.sampled_from(["SGD", "AdamW"]), st.integers(1, 500), st.integers(1, 500), st.booleans())
    def test_memory_falls_with_ranks_towards_that_without_state(self, name: Any, a: int, b: int, is_gpu: bool) -> None:
        workload = builtin("resnet50", None, name)
        few, many = sorted((a, b))
        needed = [memory.rank_nbytes(memory.sharded(workload, n), 4, is_gpu) for n in (1, few, many)]
        without = memory.rank_nbytes(replace(workload, optimizer_slots=0), 4, is_gpu)
        assert memory.rank_nbytes(workload, 4, is_gpu) == needed[0] >= needed[1] >= needed[2] >= without


class TestChoice:
    @pytest.mark.parametrize(("parameters", "minimum"), [(1e9, 2), (1.3e9, 4), (1.44e9, 8)])
    def test_sharded_optimizer_is_chosen_if_nothing_else_fits(self, parameters: float, minimum: int) -> None:
        request = large(parameters)
        assert rejected(request, T4S).reason == "DoesNotFit"
        chosen = decided(replace(request, strategy="Auto"), T4S).chosen
        assert (chosen.strategy, chosen.collective) == ("Optimizer", "Torch")
        assert objective.size(chosen) >= minimum and "sharded optimizer" in chosen.summary
        assert chosen.prediction.memory_nbytes <= gpu_nbytes(T4, {}) < 14.4 * 2**30
        few = view({"count": minimum // 2, "device": T4, "devices": 1, "cpu": 16, "memory": "256Gi"})
        assert rejected(replace(request, strategy="Auto"), few).reason == "DoesNotFit"

    def test_sharded_optimizer_is_not_chosen_if_the_model_fits(self) -> None:
        """The all-gather follows the update, and no computation hides it."""
        fixed = (FixedChoice("t4", 8, 2),)
        data, sharded = (decided(replace(RESNET, strategy=s, fixed=fixed), T4S).chosen for s in ("Data", "Optimizer"))
        assert decided(replace(RESNET, strategy="Auto", fixed=fixed), T4S).chosen == data
        p, q = data.prediction, sharded.prediction
        assert q.communication_s > p.communication_s and q.compute_s < p.compute_s
        assert q.memory_nbytes < p.memory_nbytes and q.host_memory_nbytes < p.host_memory_nbytes

    @settings(deadline=None, max_examples=25)
    @given(st.floats(1e6, 2e9), st.integers(1, 8), st.integers(1, 512), st.sampled_from(["Time", "Energy", "Cost"]))
    def test_auto_is_as_good_as_the_better_strategy(
        self, parameters: float, nodes: int, batch: int, minimize: Any
    ) -> None:
        cluster = view({"count": nodes, "device": T4, "devices": 2, "cpu": 16, "memory": "256Gi"})
        request = replace(large(parameters), global_batch=batch, minimize=minimize)
        auto, *each = (plan(replace(request, strategy=s), cluster, {}) for s in ("Auto", "Data", "Optimizer"))
        scores = [objective.score(request, f.chosen.prediction) for f in each if not isinstance(f, Infeasible)]
        if not scores:
            assert isinstance(auto, Infeasible) and auto.reason == "DoesNotFit"
            return
        assert not isinstance(auto, Infeasible)
        assert objective.score(request, auto.chosen.prediction) <= min(scores) * (1 + objective.INDISTINCT) ** 2

    @pytest.mark.parametrize("collective", ["Tree", "ParameterServer"])
    def test_collectives_without_reduce_scatter_exclude_sharding(self, collective: Any) -> None:
        request = replace(DIGITS, nodes_min=3, collective=collective, strategy="Auto")
        decision = decided(request, THREE)
        assert {c.strategy for c in decision.candidates} == {"Data"}

    def test_sharded_optimizer_uses_a_ring_on_cpus(self) -> None:
        chosen = decided(replace(DIGITS, nodes_min=3, strategy="Optimizer"), THREE).chosen
        assert (chosen.collective, chosen.strategy) == ("Ring", "Optimizer")
        assert chosen.summary == "3 x cpu, Ring, sharded optimizer, 32+32+32"

    def test_screening_agrees_with_the_exact_prediction(self) -> None:
        request = replace(large(5e8), strategy="Optimizer")
        workload = workload_of(request)
        (pool,) = eligible(request, T4S).pools
        rank_options = [
            o
            for layout in (Layout(1, 1.0), Layout(2, 1.0))
            for whole in [options(pool, layout, workload, request, {})]
            for o in sharing_options(whole, layout, workload, request, {}, 16)
        ]
        screen = Screen(rank_options, request, workload)
        for i in range(len(rank_options)):
            for count in (1, 2, 8):
                found = screen.screen(screen.types.rows([{i: count}]))
                exact = evaluate([Part(rank_options[i], count)], "Torch", request, workload)
                if isinstance(exact, Choice):
                    assert found.step_s[0] == pytest.approx(exact.prediction.step_s, rel=0.03)


class TestOtherStrategies:
    def test_strategies_not_requested_are_listed_with_their_cost(self) -> None:
        decision = decided(replace(DIGITS, nodes_min=3), THREE)
        lines = {r.summary: r.reason for r in decision.refusals}
        (sharded,) = [reason for summary, reason in lines.items() if "sharded optimizer" in summary]
        assert sharded.startswith("not requested (parallelism.strategy Optimizer or Auto): ")
        assert "MiB per rank instead of" in sharded
        for name, how in (("StaleSynchronous", "Server within 3 steps"), ("Asynchronous", "Server, asynchronous")):
            (asynchronous,) = [reason for summary, reason in lines.items() if how in summary]
            assert asynchronous.startswith(f"not requested (parallelism.synchronization {name}): ")
            assert asynchronous.endswith("the gradients are 1 update old")

    def test_strategy_that_does_not_fit_is_named_once(self) -> None:
        """Regression: the line ended with 'Tensor, Tensor'."""
        large = replace(DIGITS, model="mlp", global_batch=1_000_000, total_steps=10)
        lines = [each.summary for each in decided(large, view({"cpu": 8, "memory": "16Gi"})).refusals]
        assert any(each.endswith(" (7 ranks each), Tensor") for each in lines), lines

    def test_model_parallelism_is_evaluated_if_the_trainer_supports_it(self) -> None:
        lines = {r.summary: r.reason for r in decided(replace(DIGITS, nodes_min=3), THREE).refusals}
        (pipeline,) = [reason for summary, reason in lines.items() if "Pipeline of 3 stages, 12 micro" in summary]
        assert pipeline.startswith("not requested (parallelism.strategy Pipeline or Auto): ")
        assert lines["3 x cpu, Tensor"] == "not possible: the model has no pairs of linear layers"
        request = replace(DIGITS, model="mlp", nodes_min=3)
        (tensor,) = [r.reason for r in decided(request, THREE).refusals if "x cpu, Tensor, " in r.summary]
        assert tensor.startswith("not requested (parallelism.strategy Tensor or Auto): ")
        script = replace(large(1e6), optimizer="SGD", fixed=(FixedChoice("t4", 2, 2),))
        assert not any("Pipeline" in r.summary for r in decided(script, T4S).refusals), "scripts cannot be split"
        many = view({"count": 17, "cpu": 2})
        assert not any("Pipeline" in r.summary for r in decided(replace(DIGITS, nodes_min=17), many).refusals)

    @pytest.mark.parametrize(
        "request_",
        [
            pytest.param(replace(DIGITS, nodes_max=1), id="one rank"),
            pytest.param(replace(DIGITS, momentum=0.0, nodes_min=3), id="no optimizer state"),
            pytest.param(replace(DIGITS, nodes_min=3, collective="Tree"), id="a collective without reduce-scatter"),
            pytest.param(replace(DIGITS, nodes_min=3, strategy="Auto"), id="requested"),
        ],
    )
    def test_sharding_without_an_effect_is_not_listed(self, request_: Request) -> None:
        lines = decided(request_, THREE).refusals
        assert not any("sharded" in r.summary and r.reason.startswith("not requested") for r in lines)

    def test_rejection_says_whether_state_or_activations_are_too_large(self) -> None:
        few = view({"device": T4, "devices": 1, "cpu": 16, "memory": "256Gi"})
        assert "do not depend on the batch size" in rejected(large(2e9), few).message
        images = replace(large(1e6), activation_nbytes_per_sample=10**9)
        assert "are activations" in rejected(images, few).message


A100 = "NVIDIA-A100-SXM4-80GB"
A100S = view({"count": 4, "device": A100, "devices": 8, "cpu": 96, "memory": "1000Gi", "bandwidth": "100G"})
XL = Request(
    job="xl", global_batch=512, total_steps=1000, like="GPT-2-XL", precision="BF16", recomputation="Auto",
    optimizer="AdamW", chooses_micro_batches=True,
)  # fmt: skip


def larger_buckets(request: Request, nodes: int = 4) -> list[str]:
    fixed = replace(request, fixed=(FixedChoice(A100, nodes, 8),))
    return [each.reason for each in decided(fixed, A100S).refusals if "collective DDP" in each.reason]


class TestLargerBuckets:
    def test_collective_that_saves_time_is_named(self) -> None:
        """Regression: GPT-2 XL on 32 GPUs trains a third faster with DDP's buckets, and no line of the plan said so."""
        (reason,) = larger_buckets(XL)
        asked = decided(replace(XL, collective="DDP", fixed=(FixedChoice(A100, 4, 8),)), A100S).chosen.prediction
        best = decided(replace(XL, fixed=(FixedChoice(A100, 4, 8),)), A100S).chosen.prediction
        assert asked.step_s < 0.8 * best.step_s
        assert reason.startswith("not requested (collective DDP): ") and "instead of" in reason

    @pytest.mark.parametrize(
        "given",
        [{"collective": "Torch"}, {"collective": "DDP"}, {"strategy": "Optimizer"}, {"reduced_by_script": True}],
        ids=str,
    )
    def test_jobs_that_cannot_use_it_or_chose_are_not_told(self, given: dict[str, Any]) -> None:
        assert larger_buckets(replace(XL, **given)) == []

    def test_buckets_that_save_little_are_not_named(self) -> None:
        assert larger_buckets(replace(XL, like="GPT-2", global_batch=512), nodes=1) == []
