"""Tests of plans with strategy Sharded: what they need, when they are chosen or named, and that the trainer accepts them."""

from bisect import bisect_left
from dataclasses import replace
from typing import Any

import pytest

from dljob.api import DLJobSpec
from dljob.cluster import ClusterView, Node
from dljob.cluster.domains import Spot
from dljob.job.plan.request import planner_request
from dljob.job.plan.trainer import trainer_plan
from dljob.perf.resources.memory import STORE_CLIENT_NBYTES
from dljob.perf.step.interruptions import Interruptions
from dljob.planner import Choice, Decision, FixedChoice, Infeasible, Request, plan
from support.planner_questions import rejected

A100 = "NVIDIA-A100-SXM4-80GB"
CLUSTER = ClusterView(
    tuple(Node(f"n{i}", A100, 8, 8, 64, 64, 2**40, link_bandwidth_Bps=25e9, is_gpu=True) for i in range(4))
)
CPUS = ClusterView(tuple(Node(f"c{i}", "cpu", 1, 1, 16, 16, 64 * 2**30) for i in range(3)))
XL = Request(
    job="xl", global_batch=512, total_steps=1000, like="GPT-2-XL", optimizer="AdamW", chooses_micro_batches=True
)
LARGE = replace(XL, like=None, parameters=8 * 10**9, flops_per_sample=5e13, activation_nbytes_per_sample=10**9)
SHARDED: dict[str, Any] = {"strategy": "Sharded"}


def chosen(request: Request, view: ClusterView = CLUSTER) -> Choice:
    found = plan(request, view, {})
    assert isinstance(found, Decision), found
    assert found.unsupported == ()
    return found.chosen


def test_ranks_need_less_memory_the_more_they_are() -> None:
    single = replace(XL, chooses_micro_batches=False, micro_batches=512)  # one sample in each micro-batch
    found = {n: chosen(replace(single, **SHARDED, fixed=(FixedChoice(A100, n, 8),))) for n in (1, 2, 4)}
    assert all(each.strategy == "Sharded" and each.collective == "Torch" for each in found.values())
    one, two, four = (each.prediction.memory_nbytes for each in found.values())
    assert one > two > four
    assert chosen(single).prediction.memory_nbytes - four > 11 * 1_557_611_200, "most of 16 bytes per parameter"


def test_model_that_fits_in_no_other_way_is_planned_if_requested_and_otherwise_named() -> None:
    """A model of 8 billion parameters needs 128 GB with AdamW in float32, which no GPU has."""
    best = chosen(replace(LARGE, **SHARDED))
    assert best.prediction.memory_nbytes <= 80 * 2**30 and best.summary.endswith(("Sharded", "micro-batches"))
    refused = rejected(LARGE, CLUSTER)
    assert refused.reason == "DoesNotFit"
    assert any("not requested (parallelism.strategy Sharded), would fit" in each.reason for each in refused.refusals)


def test_strategy_is_compared_with_the_chosen_plan() -> None:
    found = plan(replace(XL, chooses_micro_batches=False, micro_batches=64), CLUSTER, {})
    assert isinstance(found, Decision) and found.chosen.strategy == "Data"
    assert any("not requested (parallelism.strategy Sharded)" in each.reason for each in found.refusals), found.refusals
    assert not any("ZeRO-3" in each.summary for each in found.unsupported)


def test_16_bits_and_activation_checkpointing_are_chosen_where_they_pay() -> None:
    """A batch of 2,048 sequences: tensor cores compute it faster, and recomputing is needed where samples are large."""
    large = replace(LARGE, **SHARDED, global_batch=2048, activation_nbytes_per_sample=4 * 10**9)
    whole = chosen(large)
    half = chosen(replace(large, precision=None))
    assert (whole.precision, half.precision) == ("FP32", "BF16") and ", BF16" in half.summary
    assert half.prediction.step_s < 0.5 * whole.prediction.step_s
    blocks = replace(large, precision=None, checkpointed_nbytes_per_sample=10**8, recomputation="Auto")
    kept = chosen(replace(blocks, activation_nbytes_per_sample=10**9))
    assert not kept.recomputes, "samples fit"
    again = chosen(replace(blocks, activation_nbytes_per_sample=10**11))
    assert again.recomputes and again.summary.endswith(", BF16, activation checkpointing")
    asked = chosen(replace(blocks, activation_nbytes_per_sample=10**9, recomputation="Always"))
    assert asked.recomputes and asked.prediction.memory_nbytes < kept.prediction.memory_nbytes


def test_reasons_for_precision_and_recomputation_are_those_of_the_plan() -> None:
    asked = replace(LARGE, **SHARDED, precision=None, recomputation="Auto", checkpointed_nbytes_per_sample=10**8)
    found = plan(asked, CLUSTER, {})
    assert isinstance(found, Decision)
    assert found.precision_reason is not None and found.precision_reason.startswith("BF16: NVIDIA-A100-SXM4-80GB multi")
    assert found.recomputation_reason is not None and "fits into memory" in found.recomputation_reason


def test_known_layers_need_less_memory_than_unknown_ones() -> None:
    """Without known layers, a quarter of the parameters is assumed in each unit."""
    known = replace(XL, **SHARDED)
    hinted = replace(
        known, like=None, parameters=1_557_611_200, flops_per_sample=1e13, activation_nbytes_per_sample=10**8
    )
    fixed = (FixedChoice(A100, 4, 8),)
    a, b = (
        chosen(replace(each, fixed=fixed, chooses_micro_batches=False, micro_batches=16)) for each in (known, hinted)
    )
    parameters_nbytes = 4 * 1_557_611_200
    assert b.prediction.memory_nbytes > 0.75 * parameters_nbytes
    assert a.prediction.host_memory_nbytes > 8 * parameters_nbytes, "each of 8 ranks creates the model in main memory"


def test_stated_units_need_less_memory_than_assumed_ones() -> None:
    """Llama 2 70B: 80 layers of 856 million parameters. Its gradients and optimizer state alone need 12 bytes each."""
    llama: dict[str, Any] = {
        "parameters": 69 * 10**9,
        "flops_per_sample": 1.7e15,
        "precision": None,
        "global_batch": 64,
    }
    llama |= {"activation_nbytes_per_sample": 10**11, "checkpointed_nbytes_per_sample": 6 * 10**9}
    many = ClusterView(
        tuple(Node(f"n{i}", A100, 8, 8, 64, 64, 2**41, link_bandwidth_Bps=25e9, is_gpu=True) for i in range(8))
    )
    asked = replace(LARGE, **SHARDED, **llama, recomputation="Always")
    refused = rejected(asked, many)
    assert refused.reason == "DoesNotFit" and "hints.largestUnitParameters" in refused.message
    found = chosen(replace(asked, largest_unit=856_000_000), many)
    assert found.recomputes and found.precision == "BF16"


def test_too_little_main_memory_for_the_models_of_all_ranks_is_not_blamed_on_the_batch() -> None:
    """Regression: lowering globalBatchSize was the advice, although the GPUs had enough memory for any batch."""
    asked = replace(LARGE, **SHARDED, parameters=3 * 10**10, largest_unit=4 * 10**8, precision="BF16")
    small = ClusterView(tuple(replace(node, free_memory_nbytes=192 * 2**30) for node in CLUSTER.nodes))
    refused = rejected(asked, small)
    assert (refused.reason, refused.field, refused.transient) == ("DoesNotFit", "spec.resources.memory", True)
    assert "in which a pod with 2 ranks can create the model" in refused.message
    assert rejected(replace(asked, global_batch=8), small).field == refused.field
    assert chosen(asked).prediction.host_memory_nbytes > 192 * 2**30, "with more main memory, the same GPUs are enough"


def test_model_that_is_created_in_parts_needs_less_main_memory() -> None:
    """Llama 3 70B on 64 GPUs: eight copies of 282 GB do not fit into a node of 1 TiB."""
    many = ClusterView(
        tuple(Node(f"n{i}", A100, 8, 8, 96, 96, 2**40, link_bandwidth_Bps=5e10, is_gpu=True) for i in range(8))
    )
    asked = replace(XL, **SHARDED, like="Llama-3-70B", precision="BF16", recomputation="Always")
    refused = rejected(asked, many)
    assert refused.field == "spec.resources.memory" and "set spec.parallelism.deferredInit" in refused.message
    unit, part = 4 * 2 * 128_256 * 8192, 12 * 70.6e9 / 64
    assert chosen(replace(asked, deferred_init=True), many).prediction.host_memory_nbytes < 8 * (
        2.5 * unit + 1.3 * part
    )


def test_ranks_on_cpus_that_create_parts_need_their_part_and_two_units() -> None:
    ten = ClusterView(tuple(Node(f"c{i}", "cpu", 1, 1, 16, 16, 64 * 2**30) for i in range(10)))
    asked = replace(LARGE, **SHARDED, parameters=4 * 10**9, largest_unit=10**8, activation_nbytes_per_sample=10**7)
    asked = replace(asked, flops_per_sample=6e9, nodes_min=10, checkpoints=False, optimizer="SGD", momentum=0.0)
    whole, parts = (chosen(replace(asked, deferred_init=each), ten).prediction for each in (False, True))
    assert whole.memory_nbytes > 4 * 4 * 10**9 * (1 + 1 / 10)
    assert parts.memory_nbytes < 0.5 * whole.memory_nbytes


def test_model_that_ranks_on_cpus_can_create_only_in_parts_is_not_blamed_on_the_batch() -> None:
    """Regression: the advice was a smaller globalBatchSize, with which no rank has room for the whole model either."""
    asked = replace(LARGE, **SHARDED, parameters=2 * 10**10, activation_nbytes_per_sample=10**7, largest_unit=10**8)
    asked = replace(asked, optimizer="SGD", momentum=0.0, checkpoints=False, flops_per_sample=6e9)
    many = ClusterView(tuple(replace(CPUS.nodes[0], name=f"c{i}") for i in range(10)))
    refused = rejected(asked, many)
    assert refused.field == "spec.resources.memory" and refused.transient
    assert "set spec.parallelism.deferredInit" in refused.message
    assert chosen(replace(asked, deferred_init=True), many)
    assert rejected(replace(asked, parameters=10**12), many).field == "spec.globalBatchSize"


def test_loaded_weights_stay_until_all_parts_are_created() -> None:
    """Regression: either the weights or the parts counted. The initial values refer to the weights to the end."""
    two, base = ClusterView(tuple(Node(f"c{i}", "cpu", 1, 1, 16, 16, 64 * 2**30) for i in range(2))), 10**10
    asked = replace(LARGE, **SHARDED, parameters=10**7, frozen_nbytes=base, largest_unit=10**8, deferred_init=True)
    asked = replace(asked, activation_nbytes_per_sample=10**6, flops_per_sample=6e9, nodes_min=2)
    assert chosen(asked, two).prediction.memory_nbytes > base * (1 + 1 / 4) + 2 * 4 * 10**8


@pytest.mark.parametrize("in_store", [False, True])
def test_largest_memory_that_is_too_small_is_refused_as_memory(in_store: bool) -> None:
    """Regression: within the memory of a pod beside its ranks, lowering globalBatchSize was the advice."""
    asked = replace(LARGE, **SHARDED, parameters=3 * 10**10, largest_unit=4 * 10**8, precision="BF16")
    asked = replace(asked, checkpoints_in_store=in_store)

    def found(free_mebibytes: int) -> Decision | Infeasible:
        nodes = tuple(replace(node, free_memory_nbytes=free_mebibytes * 2**20) for node in CLUSTER.nodes)
        return plan(asked, ClusterView(nodes), {})

    least = bisect_left(range(2**20), True, key=lambda free: isinstance(found(free), Decision))
    refused = found(least - 1)
    assert isinstance(refused, Infeasible) and refused.field == "spec.resources.memory"


def test_ranks_on_cpus_hold_the_whole_model_at_their_start() -> None:
    small = replace(LARGE, **SHARDED, parameters=10**9, activation_nbytes_per_sample=10**7, flops_per_sample=6e9)
    assert chosen(small, CPUS).prediction.memory_nbytes > 4 * 10**9 * (1 + 1 / 3)
    refused = plan(replace(small, parameters=10**10), CPUS, {})
    assert isinstance(refused, Infeasible) and refused.reason == "DoesNotFit"
    assert any("does not fit" in each.reason and "Sharded" in each.summary for each in refused.refusals)


@pytest.mark.parametrize(("view", "nodes"), [(CLUSTER, 4), (CPUS, 3)], ids=["gpus", "cpus"])
def test_checkpoints_need_room_for_the_part_of_each_rank_and_its_client_of_a_store(
    view: ClusterView, nodes: int
) -> None:
    device, each = view.nodes[0].device, view.nodes[0].devices
    small = replace(LARGE, **SHARDED, parameters=10**9, activation_nbytes_per_sample=10**7, flops_per_sample=6e9)
    small = replace(small, global_batch=96, fixed=(FixedChoice(device, nodes, each),))
    volume, store, none = (
        chosen(replace(small, **given), view).prediction
        for given in ({}, {"checkpoints_in_store": True}, {"checkpoints": False})
    )
    assert store.host_memory_nbytes - volume.host_memory_nbytes == each * STORE_CLIENT_NBYTES
    assert store.memory_nbytes == volume.memory_nbytes, "no rank gathers the state"
    part = 12 * 10**9 / 3 if view is CPUS else 0  # on GPUs, the model that a rank creates is larger
    assert volume.host_memory_nbytes - none.host_memory_nbytes == pytest.approx(1.1 * part, rel=1e-6)


def test_time_of_a_checkpoint_follows_from_the_bandwidth_alone() -> None:
    sharded = replace(XL, **SHARDED, fixed=(FixedChoice(A100, 4, 8),))
    volume, store = (plan(replace(sharded, checkpoints_in_store=each), CLUSTER, {}) for each in (False, True))
    assert isinstance(volume, Decision) and isinstance(store, Decision)
    state = 12 * 1_557_611_200
    assert volume.checkpoint_s == pytest.approx(state / 2e8) and store.checkpoint_s == pytest.approx(state / 1e8)


def test_interruptions_cost_less_if_each_rank_writes_its_part() -> None:
    """A checkpoint costs a rank the time for its part of the state, without interruptions, too."""
    fixed = replace(XL, **SHARDED, fixed=(FixedChoice(A100, 4, 8),))
    fixed = replace(fixed, total_steps=100_000, checkpoint_interval_s=600.0)
    spot = replace(fixed, spot=Spot(interruptions_per_h=0.05))
    view = ClusterView(tuple(replace(n, labels={"karpenter.sh/capacity-type": "spot"}) for n in CLUSTER.nodes))
    calm = chosen(fixed, view).prediction
    calm_s = calm.total_s - calm.checkpoints_s
    for in_store, bandwidth_Bps in ((False, 2e8), (True, 1e8)):
        found = chosen(replace(spot, checkpoints_in_store=in_store), view).prediction
        expected = Interruptions(0.05, 12 * 1_557_611_200 / bandwidth_Bps / 32, 600.0).expected_s(calm_s, 4)
        assert found.total_s == pytest.approx(float(expected)) and found.total_s > calm.total_s
        cost_s = 12 * 1_557_611_200 / bandwidth_Bps / 32
        assert found.checkpoints_s == pytest.approx(calm_s / 600 * cost_s)
        assert found.total_s == pytest.approx(calm_s + found.checkpoints_s + found.interruption_s)


@pytest.mark.parametrize("batch", [512, 510])
@pytest.mark.parametrize("fields", [{}, {"precision": "Auto", "activationCheckpointing": "Always"}])
def test_trainer_accepts_the_plan(batch: int, fields: dict[str, Any]) -> None:
    hints = {"parameters": 8 * 10**9, "flopsPerSample": 5e13, "activationBytesPerSample": 10**8}
    given: dict[str, Any] = {
        "model": {"hints": hints | {"checkpointedActivationBytesPerSample": 10**7}},
        "trainer": {"command": ["python", "t.py"]},
        "dataset": {"uri": "pvc://a/b", "samples": 10**6, "sampleBytes": 1000},
        "globalBatchSize": batch,
        "steps": 100,
        "parallelism": {"strategy": "Sharded", "gradientAccumulation": "Auto", "deferredInit": bool(fields)},
        "optimizer": {"name": "AdamW"},
        **fields,
    }
    spec = DLJobSpec.model_validate(given)
    decision = plan(planner_request("job", spec), CLUSTER, {})
    assert isinstance(decision, Decision), decision
    made = trainer_plan("job", "ns", "uid", spec, decision, 1, 1, "service", "cluster.local")
    assert made.shards_model and made.collective == "Torch" and made.min_ranks == len(made.ranks)
    assert made.model.deferred == bool(fields)
    shares = [rank.share for rank in made.ranks]
    assert sum(shares) == batch and max(shares) - min(shares) <= 1
    assert not made.rebalance and not made.measure_collective
    assert (made.precision, made.activation_checkpointing) == (("BF16", True) if fields else ("FP32", False))


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_a_step_reads_the_input_of_all_its_micro_batches(micro_batches: int) -> None:
    """Regression: only the input of one micro-batch counted."""
    stored = replace(XL, dataset_samples=10**6, sample_nbytes=10**8, **SHARDED)
    stored = replace(stored, chooses_micro_batches=False, micro_batches=micro_batches, fixed=(FixedChoice(A100, 4, 8),))
    found = chosen(stored).prediction
    assert found.compute_s + found.data_s == pytest.approx(512 * 1e8 / 4 / 5e8, rel=0.01), "the four disks set the pace"


def test_too_little_memory_is_one_line_for_each_device() -> None:
    """Regression: 128 nodes gave 56 lines, and each called the activations of a whole batch training state."""
    many = ClusterView(
        tuple(Node(f"n{i}", A100, 8, 8, 64, 64, 2**40, link_bandwidth_Bps=25e9, is_gpu=True) for i in range(128))
    )
    whole = replace(
        LARGE, **SHARDED, chooses_micro_batches=False, global_batch=4096, activation_nbytes_per_sample=10**11
    )
    refused = rejected(whole, many)
    (line,) = refused.refusals
    assert line.summary == f"up to 1024 x {A100}, Sharded"
    assert line.reason.startswith("does not fit: a rank with 4 samples and ") and "but has 79.4 GiB" in line.reason
    fixed = rejected(replace(whole, fixed=(FixedChoice(A100, 4, 8),)), many)
    assert [each.summary for each in fixed.refusals] == [f"32 x {A100}, Sharded"]


def test_ranks_that_are_too_few_are_one_line_beside_a_plan() -> None:
    found = plan(replace(LARGE, **SHARDED), CLUSTER, {})
    assert isinstance(found, Decision)
    (line,) = [each for each in found.refusals if "does not fit" in each.reason]
    assert line.summary.startswith("up to ") and line.summary.endswith(f" x {A100}, Sharded")


@pytest.mark.parametrize(
    ("given", "field", "text"),
    [
        (
            {"activation_nbytes_per_sample": 10**12},
            "activationBytesPerSample",
            "correct the figure, shorten the samples",
        ),
        ({"parameters": 10**12}, "parameters", "25% of the parameters are assumed to be gathered at once"),
    ],
)
def test_a_sample_that_no_rank_can_hold_names_the_figure(given: dict[str, Any], field: str, text: str) -> None:
    """Regression: the message named the global batch size, though no batch fits."""
    refused = rejected(replace(LARGE, **SHARDED, **given), CLUSTER)
    assert (refused.reason, refused.field) == ("DoesNotFit", f"spec.model.hints.{field}")
    assert refused.message.startswith("found a model with which each of 32 ranks needs ") and text in refused.message
