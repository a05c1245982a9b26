"""Tests of model-parallel plans: number of ranks, memory, computation and communication."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import ClusterView, catalogue
from dljob.perf.resources import energy, memory
from dljob.perf.step import compute
from dljob.perf.step import model_split as split
from dljob.perf.step.backends import backend
from dljob.perf.workload import structure
from dljob.perf.workload.workload import StatedPairs, builtin, hinted
from dljob.planner import FixedChoice, Request
from support.planner_questions import A100, decided, rejected, view

FOUR = view({"count": 4, "cpu": 2, "memory": "4Gi"})
GPT = Request(job="j", global_batch=64, total_steps=10, model="gpt-mini", dataset="synthetic-tokens")
PIPELINE = replace(GPT, strategy="Pipeline", stages=2, micro_batches=8)
TENSOR = replace(GPT, strategy="Tensor")


@given(st.floats(1e-6, 1), st.floats(0, 1), st.integers(1, 16), st.integers(1, 64))
def test_pipeline_time_is_within_its_bounds(slot_s: float, transfer_s: float, stages: int, micro_batches: int) -> None:
    """Without transfers, the time is the published sum of work and bubble. With transfers, it is at least that and at
    most the time of all slots and transfers in sequence."""
    bare = split.pipeline_s(slot_s, 0.0, stages, micro_batches)
    assert bare == pytest.approx((micro_batches + stages - 1) * slot_s)
    found = split.pipeline_s(slot_s, transfer_s, stages, micro_batches)
    assert bare <= found * (1 + 1e-12)
    assert found <= (micro_batches + stages - 1) * (slot_s + transfer_s) * (1 + 1e-12)


@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=9), st.integers(1, 32))
def test_pipeline_fills_and_drains_at_the_pace_of_each_stage(stage_s: list[float], micro_batches: int) -> None:
    """The prediction is the time of a simulation: each stage computes one micro-batch after another."""
    ends = [0.0] * len(stage_s)
    for _ in range(micro_batches):
        arrived = 0.0
        for i, seconds in enumerate(stage_s):
            arrived = ends[i] = max(arrived, ends[i]) + seconds
    others_s = sum(stage_s) - max(stage_s)
    found = split.pipeline_s(max(stage_s), 0.0, len(stage_s), micro_batches, others_s)
    assert found == pytest.approx(ends[-1])


def test_planned_pipeline_has_stages_of_different_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = split.cut_up(builtin("gpt-mini", "synthetic-tokens")).cut_into(2)
    assert cut.arithmetic > 0.51, "otherwise both stages are equal"
    found, pipeline_s = [], split.pipeline_s

    def recorded(slot_s: float, transfer_s: float, stages: int, micro_batches: int, others_s: float) -> float:
        found.append(others_s / slot_s)
        return pipeline_s(slot_s, transfer_s, stages, micro_batches, others_s)

    monkeypatch.setattr(split, "pipeline_s", recorded)
    decided(PIPELINE, FOUR)
    assert found
    assert found == [pytest.approx((1 - cut.arithmetic) / cut.arithmetic)] * len(found)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_stage_cuts_are_the_exhaustive_optimum(operations: list[int], stages: int) -> None:
    from itertools import combinations

    trainable = [n % 3 != 0 for n in operations]
    assert len(split.cuts(operations, trainable, stages)) == min(stages, sum(trainable))
    if sum(trainable) < stages:
        return
    cuts = [[0, *inner, len(trainable)] for inner in combinations(range(1, len(trainable)), stages - 1)]
    valid = [c for c in cuts if all(any(trainable[a:b]) for a, b in pairwise(c))]
    found = [*split.cuts(operations, trainable, stages)[-1], len(trainable)]
    assert found in valid

    def longest(cut: list[int]) -> int:
        return max(sum(operations[a:b]) for a, b in pairwise(cut))

    assert longest(found) == min(map(longest, valid))


def test_replicas_reduce_gradients_in_the_buckets_of_the_framework() -> None:
    """Larger buckets leave more of the all-reduce after the backward pass; only messages between stages are the same."""
    hybrid = replace(PIPELINE, model="resnet18", dataset=None, replicas=2)
    four, larger = (decided(replace(hybrid, backend=b), FOUR).chosen.prediction for b in (None, backend("Gloo")))
    assert larger.compute_s == four.compute_s
    assert larger.communication_s > four.communication_s


def test_pipeline_has_one_rank_per_stage() -> None:
    two, four = decided(PIPELINE, FOUR).chosen, decided(replace(PIPELINE, stages=4), FOUR).chosen
    assert two.summary == "2 x cpu, Pipeline of 2 stages, 8 micro-batches"
    assert [len(c.groups[0].shares) for c in (two, four)] == [2, 4]
    assert set(four.groups[0].shares) == {64}, "every stage processes every sample"
    single = decided(replace(GPT, nodes_max=1), FOUR).chosen.prediction
    assert single.step_s > two.prediction.step_s > four.prediction.step_s > single.step_s / 4
    steps = [decided(replace(PIPELINE, micro_batches=k), FOUR).chosen.prediction for k in (1, 2, 4, 8)]
    assert all(few.step_s > many.step_s for few, many in pairwise(steps)), "the bubble shrinks with more micro-batches"
    assert all(0 < p.efficiency < 1 for p in steps)


def test_model_parallel_rank_needs_less_memory() -> None:
    gpus = view({"count": 4, "device": A100, "devices": 1, "cpu": 32, "memory": "64Gi"})
    workload = builtin("gpt-mini", None)
    whole = memory.rank_nbytes(workload, 64, True)
    for request in (replace(PIPELINE, stages=4), TENSOR):
        part = decided(request, gpus).chosen.prediction
        assert memory.GPU_CONTEXT_NBYTES < part.memory_nbytes < whole
        assert part.host_memory_nbytes > workload.checkpoint_nbytes, "the checkpoint is assembled in main memory"


def test_only_checkpoints_need_memory_for_the_whole_state() -> None:
    """And for messages of rank 0 and the others: two copies of a part's parameters or optimizer state."""
    workload = builtin("gpt-mini", None)
    state_nbytes, model = workload.checkpoint_nbytes, split.cut_up(workload)
    assert model.pairs is not None
    two = split.stages_held(workload, model.cut_into(2), 8, 64)
    tensor = [split.tensor_held(workload, model.pairs, 4, 64)] * 4
    for request, parts in ((replace(PIPELINE, stages=2), two), (replace(TENSOR, nodes_min=4), tensor)):
        saved, unsaved = (decided(replace(request, checkpoints=kept), FOUR).chosen.prediction for kept in (True, False))
        most = max(2 * part.parameters for part in parts)
        assert split.gathering_nbytes(workload, parts)[0] == pytest.approx(state_nbytes + most, abs=1)
        assert state_nbytes / 2 < saved.memory_nbytes - unsaved.memory_nbytes <= state_nbytes + most + 1


def test_units_limit_tensor_parallel_ranks() -> None:
    many = view({"count": 8, "cpu": 2, "memory": "4Gi"})
    found = decided(TENSOR, many)
    assert {len(c.groups[0].shares) for c in found.candidates} <= {2, 3, 4}, "gpt-mini has four heads"
    pairs = split.cut_up(builtin("gpt-mini", None)).pairs
    assert pairs is not None and pairs.units == 4 and len(pairs.summed_elements) == 2 * 2 * 4
    mlp = split.cut_up(builtin("mlp", None)).pairs
    assert mlp is not None and (mlp.units, mlp.summed_elements) == (256, (128.0,)), "the input needs no all-reduce"
    assert split.cut_up(builtin("resnet18", None)).pairs is None


SCRIPT = replace(
    GPT, model=None, dataset=None, parameters=10**7, flops_per_sample=6e7, activation_nbytes_per_sample=10**6
)


@pytest.mark.parametrize(
    ("strategy", "words"), [("Pipeline", "equal parts of the parameters"), ("Tensor", "50% of the")]
)
def test_a_script_with_hints_alone_is_planned_with_assumed_layers(strategy: Any, words: str) -> None:
    """Stages are equal, and the plan says what it assumes. A model like a known one has the layers of that one."""
    request = replace(SCRIPT, strategy=strategy, stages=4 if strategy == "Pipeline" else None, micro_batches=8)
    found = decided(request, FOUR)
    assert found.chosen.strategy == strategy and found.warning is not None and words in found.warning
    assert "spec.model.hints has no layers" in found.warning
    like = replace(request, parameters=None, flops_per_sample=None, like="BERT-base", sample_nbytes=2048)
    assert "has no layers" not in (decided(like, view({"count": 4, "cpu": 2, "memory": "64Gi"})).warning or "")


def test_stated_pairs_replace_what_plans_assume_of_a_script() -> None:
    stated = StatedPairs(6, 4, 9 * 10**6, 4.5e7, 250_000, 48_000)
    pairs = split.cut_up(hinted(10**7, 6e7, 1e6, pairs=stated)).pairs
    assert pairs is not None and (pairs.parameters, pairs.units) == (9 * 10**6, 4)
    assert (pairs.arithmetic, pairs.outputs) == pytest.approx((0.75, 0.25))
    assert pairs.summed_elements == (1000.0,) * 12, "two all-reduces for each of 6 pairs"
    request = replace(SCRIPT, strategy="Tensor", pairs=stated)
    found = decided(request, FOUR)
    assert "has no layers" not in (found.warning or "")
    assert {len(c.groups[0].shares) for c in found.candidates} <= {1, 2, 3, 4}
    assumed = decided(replace(request, pairs=None), FOUR)
    assert "model.hints.pairs" in (assumed.warning or "")


def test_stages_of_a_script_with_hints_alone_are_equal() -> None:
    model = split.cut_up(hinted(10**7, 6e7, 1e6))
    for stages in (2, 5, 10):
        cut = model.cut_into(stages)
        assert cut.arithmetic == pytest.approx(1 / stages) and cut.parameters == 10**7 // stages
    assert model.pairs is not None and (model.pairs.arithmetic, model.pairs.units) == (0.5, 8)
    assert len(model.pairs.summed_elements) == 24, "two all-reduces for each of 12 pairs of 50 layers"


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        (
            replace(PIPELINE, stages=5),
            "spec.parallelism.stages",
            "found room for 4 ranks on all types of device; expected 5 ranks",
        ),
        (replace(PIPELINE, nodes_max=1), "spec.parallelism.stages", "expected 2 ranks, one per stage"),
        (replace(TENSOR, nodes_max=1), "spec.nodes", "expected 2 to "),
        (replace(PIPELINE, fixed=(FixedChoice("cpu", 3),)), "spec.planning.groups", "found groups with 3 ranks"),
        (
            replace(PIPELINE, stages=99),
            "spec.parallelism.stages",
            "found 99; expected at most ",
        ),
        (replace(PIPELINE, memory_per_pod_nbytes=2**28), "spec.resources.memory", "part of the model needs"),
    ],
)
def test_invalid_requests_are_rejected(request_: Request, field: str, words: str) -> None:
    why = rejected(request_, FOUR)
    assert why.field == field and words in why.message, why


def test_pipeline_uses_a_fixed_group() -> None:
    chosen = decided(replace(PIPELINE, fixed=(FixedChoice("cpu", 2),)), FOUR).chosen
    assert (chosen.groups[0].nodes, chosen.groups[0].shares) == (2, (64, 64))


def test_part_of_a_model_draws_hardly_more_power_than_the_whole_model_on_a_gpu() -> None:
    """Fixed bug: ranks that split a model or shard its parameters counted with the power of a GPU without pauses.

    With 8 short sequences, a GPU mostly waits for its host, which launches the kernels. Waiting for other ranks takes
    a little more power than that.
    """
    gpus, job = (
        view({"count": 4, "device": A100, "devices": 1, "cpu": 32, "memory": "64Gi"}),
        replace(GPT, global_batch=8),
    )
    whole_W = watts_per_rank(replace(job, strategy="Data", nodes_max=1), gpus)
    assert whole_W < 0.75 * energy.rank_watts(catalogue.gpu_or_assumed(A100), 1.0)
    pipeline = replace(job, strategy="Pipeline", stages=2, micro_batches=2)
    for request in (pipeline, replace(job, strategy="Tensor"), replace(job, strategy="Sharded")):
        assert watts_per_rank(request, gpus) <= 1.05 * whole_W, request.strategy


def watts_per_rank(request: Request, nodes: ClusterView) -> float:
    """Return the mean power of a rank in the plan for a request."""
    chosen = decided(request, nodes).chosen
    assert chosen.prediction.energy_J is not None
    ranks = sum(group.nodes * group.ranks_per_node for group in chosen.groups)
    return chosen.prediction.energy_J / chosen.prediction.total_s / ranks


def test_a_pipeline_on_gpus_has_the_overhead_of_a_step_once() -> None:
    """Fixed bug: each micro-batch had the difference between the overheads of a step on GPUs and on CPUs."""
    gpus = view({"count": 2, "device": A100, "devices": 1, "cpu": 32, "memory": "64Gi"})
    computing = [
        decided(replace(PIPELINE, micro_batches=k), gpus).chosen.prediction.compute_s for k in (1, 2, 4, 8, 16)
    ]
    workload = builtin("gpt-mini", None)
    part = split.cut_up(workload).cut_into(2).arithmetic
    launches_s = part * compute.GPU_LAYER_OVERHEAD_S * structure.host_layers(workload)
    added_s = [many - few for few, many in pairwise(computing)]
    for k, more_s in zip((1, 2, 4, 8), added_s, strict=True):
        assert more_s <= k * launches_s * 1.01, "each micro-batch launches the kernels of its stage's layers again"
