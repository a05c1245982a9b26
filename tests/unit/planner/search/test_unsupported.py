"""Tests of plans that the trainer cannot run yet: what they cost, when they are named, and that they are never chosen."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node
from dljob.perf.step import model_split as split
from dljob.perf.workload.workload import in_precision
from dljob.planner import Choice, Decision, FixedChoice, Infeasible, Request, plan
from dljob.planner.candidates.evaluate import Part, evaluate
from dljob.planner.candidates.node_layout import Layout
from dljob.planner.candidates.options import Option, options
from dljob.planner.candidates.pools import eligible
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.candidates.strategies.model_split import placements, predict
from dljob.planner.candidates.strategies.split_candidate import SplitCandidate
from dljob.planner.types import Prediction
from support.planner_questions import DIGITS, RESNET, THREE, rejected

A100 = "NVIDIA-A100-SXM4-80GB"
CLUSTER = ClusterView(
    tuple(Node(f"n{i}", A100, 8, 8, 64, 64, 2**40, link_bandwidth_Bps=25e9, is_gpu=True) for i in range(4))
)
XL = Request(job="xl", global_batch=512, total_steps=1000, like="GPT-2-XL", optimizer="AdamW", asks_unsupported=True)
TOKENS = Request(job="j", global_batch=64, total_steps=100, model="gpt-mini", dataset="synthetic-tokens")


def option(request: Request, ranks_per_node: int, view: ClusterView = CLUSTER) -> Option:
    (pool,) = eligible(request, view).pools
    (found,) = options(pool, Layout(ranks_per_node, 1.0), workload_of(request), request, {})
    return found


def predicted(candidate: SplitCandidate, request: Request) -> Prediction:
    found = predict(candidate, request, split.cut_up(workload_of(request)))
    assert isinstance(found, Prediction), found
    return found


class TestWhatIsNamed:
    def test_a_job_that_does_not_fit_gets_plans_that_would(self) -> None:
        found = rejected(XL, CLUSTER)
        assert found.reason == "DoesNotFit"
        assert found.unsupported
        for each in found.unsupported:
            assert each.reason.startswith("would fit: ")
            assert each.prediction.memory_nbytes <= 80 * 2**30

    def test_pipelines_of_scripts_say_that_the_trainer_can_run_them_if_the_script_cuts_its_model(self) -> None:
        for precision, can in (("FP32", True), ("BF16", False)):
            found = rejected(replace(XL, precision=precision), CLUSTER)
            pipelines = [each.reason for each in found.unsupported if "pipeline" in each.summary]
            assert pipelines and all(("the trainer can, if the script" in each) == can for each in pipelines)

    def test_zero_3_of_a_script_says_with_which_strategy_the_trainer_runs_it(self) -> None:
        asked = replace(XL, strategy="Pipeline", stages=2, micro_batches=8)
        (sharded,) = [each.reason for each in rejected(asked, CLUSTER).unsupported if "ZeRO-3" in each.summary]
        assert sharded.endswith("; the trainer can, with parallelism.strategy Sharded")

    @pytest.mark.parametrize("batch", [64, 512])
    def test_faster_plans_are_faster_and_are_not_candidates(self, batch: int) -> None:
        asked = replace(XL, global_batch=batch, precision=None, chooses_micro_batches=True)
        found = plan(asked, CLUSTER, {})
        assert isinstance(found, Decision)
        assert found.unsupported and not any("ZeRO-3" in each.summary for each in found.unsupported)
        assert any("strategy Sharded" in each.reason for each in found.refusals), "the trainer can run ZeRO-3"
        for each in found.unsupported:
            assert each.prediction.step_s < found.chosen.prediction.step_s
            assert each.reason.startswith("would be ")
        shown = {choice.summary for choice in (*found.candidates, *found.trade_offs)}
        assert not shown & {each.summary for each in found.unsupported}

    @settings(max_examples=20, deadline=None)
    @given(
        st.sampled_from([RESNET, TOKENS, XL]),
        st.sampled_from([8, 96, 512]),
        st.sampled_from(["Data", "Optimizer", "Auto"]),
        st.sampled_from(["Time", "Energy", "Cost"]),
        st.sampled_from([None, 3600.0]),
        st.booleans(),
    )
    def test_the_plan_does_not_depend_on_them(
        self, base: Request, batch: int, strategy: Any, minimize: Any, deadline_s: float | None, accumulates: bool
    ) -> None:
        asked = replace(
            base, global_batch=batch, strategy=strategy, minimize=minimize, deadline_s=deadline_s,
            chooses_micro_batches=accumulates,
        )  # fmt: skip
        without, found = (plan(replace(asked, asks_unsupported=each), CLUSTER, {}) for each in (False, True))
        assert replace(found, unsupported=()) == without
        assert len(found.unsupported) <= 2

    @pytest.mark.parametrize(
        "change",
        [
            {"fixed": (FixedChoice(A100, 4, 8),)},
            {"reduced_by_script": True, "collective": "Torch"},
            {"synchronization": "Asynchronous", "collective": "ParameterServer", "nodes_min": 2},
            {"asks_unsupported": False},
        ],
    )
    def test_other_jobs_get_none(self, change: dict[str, Any]) -> None:
        found = plan(replace(XL, **change), CLUSTER, {})
        assert isinstance(found, Decision | Infeasible)
        assert found.unsupported == ()

    def test_small_jobs_on_cpus_get_none(self) -> None:
        assert plan(replace(DIGITS, asks_unsupported=True), THREE, {}).unsupported == ()


class TestHybrids:
    """Laws of data parallelism combined with pipelines or tensor parallelism."""

    @given(st.sampled_from([2, 3, 4, 6]), st.sampled_from([1, 2, 8, 16]))
    def test_one_replica_is_a_pipeline(self, stages: int, k: int) -> None:
        part = Part(option(TOKENS, 2 if stages % 2 == 0 else 1), stages // 2 if stages % 2 == 0 else stages)
        alone, hybrid = SplitCandidate(part, "Pipeline", "MPI", k), SplitCandidate(part, "Pipeline", "MPI", k, 1)
        assert predicted(alone, TOKENS) == predicted(hybrid, TOKENS)
        assert len(placements(hybrid)) == 1

    @pytest.mark.parametrize("nodes", [1, 2, 4])
    def test_pipelines_of_one_stage_are_data_parallelism(self, nodes: int) -> None:
        part = Part(option(TOKENS, 4), nodes)
        data = evaluate([part], "Torch", TOKENS, workload_of(TOKENS))
        assert isinstance(data, Choice)
        hybrid = predicted(SplitCandidate(part, "Pipeline", "Torch", 1, part.ranks), TOKENS)
        assert hybrid.step_s == pytest.approx(data.prediction.step_s, rel=0.02)
        assert hybrid.memory_nbytes == pytest.approx(data.prediction.memory_nbytes, rel=0.02)

    @given(st.sampled_from([(2, 4), (4, 2), (4, 4), (2, 8)]), st.sampled_from([4, 8]), st.sampled_from([8, 16]))
    def test_more_replicas_of_the_same_pipeline_never_speed_up_a_step(
        self, sizes: tuple[int, int], k: int, per_replica: int
    ) -> None:
        """With the same samples for each replica, more replicas only add an all-reduce and waiting."""
        p, d = sizes
        one = Part(option(TOKENS, p), 1)
        many = Part(option(TOKENS, p), min(4, d))
        asked = replace(TOKENS, global_batch=per_replica)
        alone = predicted(SplitCandidate(one, "Pipeline", "MPI", k), asked)
        more = predicted(
            SplitCandidate(many, "Pipeline", "MPI", k, min(4, d)), replace(asked, global_batch=per_replica * min(4, d))
        )
        assert more.step_s >= alone.step_s * (1 - 1e-9)
        assert more.memory_nbytes == alone.memory_nbytes

    def test_replicas_beside_each_other_reduce_gradients_within_nodes(self) -> None:
        """Four pipelines of four stages on four nodes with four GPUs: see which groups share which link."""
        part = Part(option(TOKENS, 4), 4)
        assert len(placements(SplitCandidate(part, "Pipeline", "Torch", 4, 4))) == 1, "the one that the trainer runs"
        beside, across = placements(SplitCandidate(part, "Pipeline", "Torch", 4, 4, anywhere=True))
        assert beside.nodes == 4
        assert beside.reducing.bandwidth_Bps == pytest.approx(25e9 / 4), "four groups share a node's network"
        assert across.nodes == 1
        assert across.reducing.bandwidth_Bps > 100e9, "a stage's four ranks are on one node"
        assert across.messages.bandwidth_Bps < beside.messages.bandwidth_Bps

    def test_tensor_parallel_groups_split_memory_and_arithmetic(self) -> None:
        request = replace(XL, global_batch=64)
        part = Part(option(request, 8), 4)
        found = [predicted(SplitCandidate(part, "Tensor", "Torch", 8, part.ranks // t), request) for t in (2, 4, 8)]
        assert [p.memory_nbytes for p in found] == sorted((p.memory_nbytes for p in found), reverse=True)


def test_pipelines_send_activations_in_16_bits_also_between_convolutions() -> None:
    """Regression: only parameters of convolutional networks are gathered in float32, but messages counted as much."""
    slow = ClusterView(tuple(replace(each, link_bandwidth_Bps=1e5) for each in CLUSTER.nodes))
    candidate = SplitCandidate(Part(option(RESNET, 1, slow), 2), "Pipeline", "MPI", 2)
    sent = []
    for precision in ("FP32", "BF16"):
        found = predict(candidate, RESNET, split.cut_up(in_precision(workload_of(RESNET), precision)))
        assert isinstance(found, Prediction), found
        sent.append(found.communication_s)
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.01)
