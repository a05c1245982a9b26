"""Tests of known models whose parameters are frozen, with adapters beside them (``hints.trainedParameters``)."""

from dataclasses import replace

import pytest

from dljob.perf.resources import memory
from dljob.perf.step import zero
from dljob.perf.step.communication import Link
from dljob.perf.workload.frozen import with_frozen_base
from dljob.perf.workload.workload import in_precision, recomputing, reference
from dljob.planner import Infeasible, Request, plan
from support.planner_questions import decided, view

NAMES = ("Llama-3-8B", "GPT-2", "ResNet-50", "ViT-B-16")
ADAPTERS = 500_000


@pytest.mark.parametrize("name", NAMES)
def test_only_adapters_are_trained(name: str) -> None:
    whole = reference(name, "AdamW")
    found = with_frozen_base(whole, ADAPTERS)
    assert (found.parameters, found.frozen_nbytes) == (ADAPTERS, 4 * whole.parameters)
    assert found.gradient_nbytes == 4 * ADAPTERS
    assert found.activation_nbytes == whole.activation_nbytes
    assert all(layer.parameters >= 0 and layer.backward_FLOPs >= 0 for layer in found.layers)
    products = sum(layer.forward_FLOPs for layer in whole.layers if layer.parameters)
    saved = whole.flops_per_sample - found.flops_per_sample
    assert saved == pytest.approx(products * (1 - ADAPTERS / whole.parameters)), "no gradients of frozen weights"
    assert memory.rank_nbytes(found, 1, is_gpu=True) < memory.rank_nbytes(whole, 1, is_gpu=True)


@pytest.mark.parametrize("name", NAMES)
def test_all_parameters_trained_beside_frozen_ones_cost_as_much_as_the_model(name: str) -> None:
    whole = reference(name)
    found = with_frozen_base(whole, whole.parameters)
    assert found.flops_per_sample == pytest.approx(whole.flops_per_sample)
    assert [each.parameters for each in found.layers] == [each.parameters for each in whole.layers]


def test_size_of_the_frozen_parameters_may_be_stated() -> None:
    base = reference("Llama-3-8B", "AdamW")
    half, quarter = (with_frozen_base(base, ADAPTERS, base.parameters * nbytes // 2) for nbytes in (4, 1))
    saved = memory.rank_nbytes(half, 1, is_gpu=True) - memory.rank_nbytes(quarter, 1, is_gpu=True)
    assert saved == pytest.approx(memory.MARGIN * 1.5 * base.parameters)


def test_unit_has_the_same_part_of_frozen_parameters_as_of_all() -> None:
    base = reference("Llama-3-8B")
    found = with_frozen_base(base, ADAPTERS)
    assert found.stated_unit == pytest.approx(zero.unit_parameters(base) / base.parameters)
    assert zero.unit_nbytes(found) == pytest.approx(4 * zero.unit_parameters(base), rel=0.1)


def test_frozen_parameters_are_gathered_with_zero_3() -> None:
    """Fixed bug: predictions of sharded LoRA counted the communication of the adapters only."""
    base, link = reference("Llama-3-8B"), Link(1e-5, 1e10, 1e10)
    found = [in_precision(each, "BF16") for each in (base, with_frozen_base(base, ADAPTERS))]
    whole_s, lora_s = (zero.exposed_communication_s(each, 3, 16, link, 2, 1.0, 1, 0.0) for each in found)
    # Two gathers of 2 bytes per parameter, without sending and summing gradients of 4 bytes.
    assert lora_s / whole_s == pytest.approx(4 / 12, rel=0.05)
    plain_s = zero.exposed_communication_s(replace(found[1], frozen_nbytes=0), 3, 16, link, 2, 1.0, 1, 0.0)
    assert plain_s < 0.01 * lora_s


def test_adapters_fit_where_the_whole_model_does_not() -> None:
    cluster = view(
        {"count": 1, "device": "NVIDIA-A100-SXM4-80GB", "gpu": True, "devices": 4, "cpu": 64, "memory": "1Ti"}
    )
    asked = Request(
        job="j", global_batch=8, total_steps=10, like="Llama-3-8B", optimizer="AdamW", precision="BF16",
        recomputation="Always", micro_batches=2,
    )  # fmt: skip
    assert isinstance(plan(asked, cluster, {}), Infeasible)
    lora = replace(asked, trained_parameters=20_000_000, frozen_nbytes=16_000_000_000)
    assert decided(lora, cluster).chosen.prediction.memory_nbytes < 80e9
    wrong = plan(replace(lora, trained_parameters=9 * 10**9), cluster, {})
    assert isinstance(wrong, Infeasible) and "hints.trainedParameters: found 9000000000" in wrong.message
    assert recomputing(reference("Llama-3-8B")).flops_per_sample > reference("Llama-3-8B").flops_per_sample
