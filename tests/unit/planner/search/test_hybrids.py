"""Tests of hybrids: replicas of a model whose ranks split it, as requested and as the planner's own choice."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcontract import replica_batches
from dljob.api import DLJobSpec
from dljob.cluster import ClusterView
from dljob.job.plan.request import planner_request
from dljob.perf.step import model_split as split
from dljob.planner import Choice, Infeasible, Request, plan
from dljob.planner.candidates.request_workload import workload_of
from dljob.planner.search import objective
from support.planner_questions import A100, decided, rejected, view

PIPELINE = {"model": {"name": "gpt-mini"}, "dataset": {"name": "synthetic-tokens"}, "globalBatchSize": 64, "steps": 5}
RESNET50 = Request(
    job="j", global_batch=64, total_steps=100, model="resnet50", dataset="synthetic-images", strategy="Auto",
    replicas=None,
)  # fmt: skip
GPT = replace(RESNET50, model="gpt-mini", dataset="synthetic-tokens")
MLP = replace(RESNET50, model="mlp", dataset=None)


def cpus(count: int, bandwidth: str = "1.25G", memory: str = "4Gi") -> ClusterView:
    return view({"count": count, "cpu": 2, "memory": memory, "bandwidth": bandwidth})


def assert_runnable(request: Request, found: Choice) -> None:
    """Assert that a plan with model parallelism fulfils what the contract and the trainer require."""
    (group,) = found.groups
    model, (over, rest) = split.cut_up(workload_of(request)), divmod(len(group.shares), found.replicas)
    batches = replica_batches(request.global_batch, found.replicas)
    assert not rest and over >= 2 and min(batches) >= 1
    assert group.shares == tuple(batch for batch in batches for _ in range(over))
    if found.strategy == "Pipeline":
        assert over <= len(model.stages) and found.collective == ("MPI" if found.replicas == 1 else "Ring")
        assert 1 <= found.micro_batches <= max(batches)
    else:
        assert model.pairs is not None and over <= model.pairs.units and found.micro_batches == 1


class TestPipelineMemory:
    """Llama 2 7B on eight GPUs. A stage keeps the activations of a micro-batch for each stage."""

    LLAMA = Request(
        job="j", global_batch=512, total_steps=100, like="Llama-2-7B", strategy="Pipeline", stages=8, micro_batches=32,
        asks_unsupported=True,
    )  # fmt: skip
    NODE = view({"device": "NVIDIA-A100-SXM4-80GB", "devices": 8, "cpu": 64, "memory": "1000Gi"})

    def test_batch_has_more_micro_batches_if_memory_needs_them(self) -> None:
        """Regression: the advice was to lower globalBatchSize, to 32 samples."""
        assert decided(replace(self.LLAMA, global_batch=32), self.NODE).chosen.micro_batches == 32
        asked = replace(self.LLAMA, may_divide_further=True)
        assert decided(asked, self.NODE).chosen.micro_batches == 512

    def test_too_few_micro_batches_are_named(self) -> None:
        found = rejected(self.LLAMA, self.NODE)
        assert (found.reason, found.field) == ("DoesNotFit", "spec.parallelism.microBatches")
        assert "found 32, " in found.message and "expected more, such as 512: raise microBatches" in found.message
        assert found.refusals and found.unsupported

    def test_nearly_as_many_micro_batches_as_possible_are_too_few(self) -> None:
        """Regression: an UnboundLocalError, because no larger number of them gives smaller ones."""
        found = rejected(replace(self.LLAMA, global_batch=5000, micro_batches=3000), self.NODE)
        assert (found.reason, found.field) == ("DoesNotFit", "spec.globalBatchSize")
        assert "found 5000" in found.message and "expected at most 4096" in found.message
        assert decided(replace(self.LLAMA, global_batch=4096, micro_batches=4096), self.NODE)

    @pytest.mark.parametrize("may_divide", [False, True])
    def test_too_few_stages_are_named(self, may_divide: bool) -> None:
        asked = replace(self.LLAMA, stages=2, optimizer="AdamW", may_divide_further=may_divide)
        found = rejected(asked, self.NODE)
        assert (found.reason, found.field) == ("DoesNotFit", "spec.parallelism.stages")
        assert "found 2, even with the smallest micro-batches" in found.message
        assert "raise stages to at least 4," in found.message
        assert decided(replace(asked, stages=4, may_divide_further=True), self.NODE)

    def test_more_stages_are_no_advice_if_the_activations_of_a_sample_are_too_large(self) -> None:
        """Regression: Llama 2 70B needs as much with 64 stages as with 8, and got the advice to raise them."""
        found = rejected(replace(self.LLAMA, like="Llama-2-70B"), self.NODE)
        assert found.field == "spec.parallelism.stages" and "raise stages" not in found.message

    @pytest.mark.parametrize("limit", [None, 60 * 2**30])
    def test_too_little_main_memory_is_not_blamed_on_the_stages(self, limit: int | None) -> None:
        """Regression: the field was stages or globalBatchSize, and the job did not wait for memory of other pods."""
        small = view({"device": "NVIDIA-A100-SXM4-80GB", "devices": 8, "cpu": 64, "memory": "100Gi"})
        found = rejected(replace(self.LLAMA, memory_per_pod_nbytes=limit), small)
        assert (found.reason, found.field) == ("DoesNotFit", "spec.resources.memory")
        assert found.transient == (limit is None)
        assert f"found {60 if limit else 100} GiB" in found.message

    @pytest.mark.parametrize("may_divide", [False, True])
    def test_memory_of_the_spec_that_is_too_small_on_cpus_is_named(self, may_divide: bool) -> None:
        cluster = cpus(2, memory="64Gi")
        asked = replace(GPT, strategy="Pipeline", stages=2, micro_batches=8, global_batch=512)
        asked = replace(asked, memory_per_pod_nbytes=2**28, may_divide_further=may_divide)
        found = rejected(asked, cluster)
        assert (found.field, found.transient) == ("spec.resources.memory", False)
        ((expected, unit),) = re.findall(r"expected at least ([\d.]+) (MiB|GiB)", found.message)
        enough = replace(asked, memory_per_pod_nbytes=int(1.01 * float(expected) * 2 ** {"MiB": 20, "GiB": 30}[unit]))
        assert decided(enough, cluster).chosen.strategy == "Pipeline"

    def test_plan_that_is_compared_with_another_strategy_has_as_many_as_memory_needs(self) -> None:
        """Regression: the pipeline "does not fit", although the planner would divide it further."""
        asked = Request(
            job="j", global_batch=8192, total_steps=100, model="gpt-mini", dataset="synthetic-tokens",
            chooses_micro_batches=True,
        )  # fmt: skip
        lines = {each.summary: each.reason for each in decided(asked, cpus(2, memory="2Gi")).refusals}
        assert "not requested" in lines["2 x cpu, Pipeline of 2 stages, 64 micro-batches"]

    def test_figure_of_the_spec_is_kept(self) -> None:
        stages = {"strategy": "Pipeline", "stages": 2}
        for parallelism, expected in (({**stages, "microBatches": 8}, (8, False)), (stages, (8, True))):
            spec = DLJobSpec.model_validate({**PIPELINE, "parallelism": parallelism})
            request = planner_request("job", spec)
            assert (request.micro_batches, request.may_divide_further) == expected


class TestAuto:
    @settings(deadline=None, max_examples=40)
    @given(
        st.sampled_from([RESNET50, GPT, MLP]),
        st.sampled_from([2, 3, 4, 6, 8, 12]),
        st.sampled_from(["1M", "12.5M", "1.25G"]),
        st.sampled_from([None, 2**30, 2**31]),
        st.sampled_from([1, 5, 64, 256]),
        st.sampled_from(["Time", "Energy", "Cost"]),
    )
    def test_hybrids_are_runnable_and_make_no_plan_worse(
        self, base: Request, nodes: int, bandwidth: str, memory: int | None, batch: int, minimize: Any
    ) -> None:
        request = replace(
            base, global_batch=batch, memory_per_pod_nbytes=memory, minimize=minimize, candidates_kept=100
        )
        cluster = cpus(nodes, bandwidth)
        found, without = (plan(each, cluster, {}) for each in (request, replace(request, replicas=1)))
        if isinstance(found, Infeasible):
            assert isinstance(without, Infeasible)
            return
        for each in found.candidates:
            if each.splits_model:
                assert_runnable(request, each)
        if not isinstance(without, Infeasible):
            assert min(objective.score(request, c.prediction) for c in found.candidates) <= min(
                objective.score(request, c.prediction) for c in without.candidates
            )

    def test_replicas_of_a_model_that_no_node_can_hold(self) -> None:
        """A pipeline over all nodes is idle longer, and more samples pass each of its stages."""
        request = replace(GPT, global_batch=192, memory_per_pod_nbytes=850 * 2**20)
        assert rejected(replace(request, strategy="Data"), cpus(8)).reason == "DoesNotFit"
        alone = decided(replace(request, replicas=1), cpus(8)).chosen
        found = decided(request, cpus(8)).chosen
        assert found.splits_model and found.replicas > 1, found.summary
        assert found.prediction.step_s < alone.prediction.step_s
        assert f", {found.replicas} pipelines of " in found.summary and found.summary.endswith(", Ring")

    def test_they_are_not_named_as_plans_that_the_trainer_cannot_run(self) -> None:
        asked = replace(GPT, asks_unsupported=True)
        cluster = view({"count": 4, "device": A100, "devices": 8, "cpu": 64, "memory": "512Gi", "bandwidth": "25G"})
        assert not any("pipelines of" in each.summary for each in decided(asked, cluster).unsupported)


class TestRequested:
    @pytest.mark.parametrize(("stages", "replicas", "batch"), [(2, 3, 64), (3, 2, 7), (2, 4, 4)])
    def test_pipelines(self, stages: int, replicas: int, batch: int) -> None:
        request = replace(
            RESNET50, strategy="Pipeline", stages=stages, replicas=replicas, micro_batches=4, global_batch=batch
        )
        chosen = decided(request, cpus(8)).chosen
        assert (chosen.replicas, len(chosen.groups[0].shares)) == (replicas, stages * replicas)
        assert_runnable(request, chosen)

    def test_tensor_parallel_groups(self) -> None:
        request = replace(GPT, strategy="Tensor", replicas=2)
        chosen = decided(request, cpus(8)).chosen
        assert chosen.replicas == 2
        assert_runnable(request, chosen)

    def test_too_few_nodes(self) -> None:
        request = replace(RESNET50, strategy="Pipeline", stages=2, replicas=3, micro_batches=4)
        why = rejected(request, cpus(5))
        assert "found room for" in why.message and "2 ranks, one per stage, for each of 3 replicas" in why.message

    def test_one_replica_is_the_plan_without_replicas(self) -> None:
        request = replace(RESNET50, strategy="Pipeline", stages=2, replicas=1, micro_batches=4)
        chosen = decided(request, cpus(4)).chosen
        assert chosen.replicas == 1 and chosen.collective == "MPI"
