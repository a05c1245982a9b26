"""Tests of the precision of plans: the planner's choice for each device, its time and memory, and the messages."""

from dataclasses import replace
from typing import Any

import pytest

from dljob.calibrate import LearnedPoint
from dljob.cluster import ClusterView, catalogue
from dljob.perf.resources import memory
from dljob.perf.step.compute import roofline
from dljob.perf.workload.workload import builtin, in_precision, reference
from dljob.planner import Decision, FixedChoice, Learned, Request, plan
from dljob.planner.search.objective import INDISTINCT, score
from dljob.planner.types.request import PRECISIONS
from support.planner_questions import A100, DIGITS, RESNET, T4, THREE, decided, rejected, view

V100, K80, H100, UNKNOWN = "Tesla-V100-SXM2-16GB", "Tesla-K80", "NVIDIA-H100-80GB-HBM3", "NVIDIA-X9000"
MIG = "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb"
HEAVY = Request(job="j", global_batch=96, total_steps=100, profile="x", parameters=10**6, flops_per_sample=1e11,
                activation_nbytes_per_sample=10**6)  # fmt: skip
"""A job whose ranks spend their time with matrix products, so that 16 bits pay on all devices with units for them."""
GPT2 = Request(job="j", global_batch=64, total_steps=100, profile="x", like="GPT-2", optimizer="AdamW")


def gpus(*devices: str, nodes: int = 2) -> ClusterView:
    entries: list[dict[str, Any]] = [
        {"count": nodes, "device": each, "devices": 2, "gpu": True, "cpu": 16, "memory": "128Gi", "bandwidth": "100G"}
        for each in devices
    ]
    return view(*entries)


AUTOMATIC = {
    "A100": (gpus(A100), "BF16"),
    "H100": (gpus(H100), "BF16"),
    "part of an A100": (gpus(MIG), "BF16"),
    "V100": (gpus(V100), "FP16"),
    "T4": (gpus(T4), "FP16"),
    "K80": (gpus(K80), "FP32"),
    "unknown GPU": (gpus(UNKNOWN), "FP32"),
    "CPU": (THREE, "FP32"),
    "A100 or CPU": (view({"count": 1, "cpu": 2}, {"count": 1, "device": A100, "devices": 1}), "BF16"),
}


@pytest.mark.parametrize("name", AUTOMATIC)
@pytest.mark.parametrize("fixed", [False, True])
def test_auto_chooses_by_the_units_of_the_device(name: str, fixed: bool) -> None:
    cluster, expected = AUTOMATIC[name]
    device = cluster.device_types[0]
    groups = (FixedChoice(device, 2),) if fixed and len(cluster.device_types) == 1 else ()
    found = decided(replace(HEAVY, precision=None, fixed=groups), cluster)
    assert found.chosen.precision == expected
    assert (f", {expected}" in found.chosen.summary) == (expected != "FP32")
    assert found.precision_reason is not None and found.precision_reason.startswith(f"{expected}: ")


def test_all_devices_of_a_plan_have_the_precision_that_all_have_units_for() -> None:
    """An A100 has units for float16, too, so it computes in float16 beside a V100, and in float32 beside a K80."""
    for devices, expected in (
        ((A100, V100), "FP16"),
        ((A100, K80), "FP32"),
        ((V100, T4), "FP16"),
        ((A100, H100), "BF16"),
    ):
        fixed = tuple(FixedChoice(device, 1) for device in devices)
        found = decided(replace(HEAVY, precision=None, fixed=fixed), gpus(*devices)).chosen
        assert found.precision == expected, devices
    free = decided(replace(HEAVY, precision=None, nodes_min=4), gpus(A100, V100))
    assert free.chosen.precision == "FP16" and len(free.chosen.groups) == 2
    for choice in free.candidates:
        alone = {group.device for group in choice.groups} == {A100}
        assert choice.precision == ("BF16" if alone else "FP16")


def test_without_loss_scaling_float16_is_never_chosen() -> None:
    found = decided(replace(RESNET, precision=None, may_scale_loss=False), gpus(V100))
    assert found.chosen.precision == "FP32" and "cannot scale losses" in (found.precision_reason or "")
    assert decided(replace(RESNET, precision=None, may_scale_loss=False), gpus(A100)).chosen.precision == "BF16"


def test_auto_stays_in_float32_if_only_that_fits_into_memory() -> None:
    """Group norms make the built-in ResNets keep more bytes in 16 bits: 1,105 samples fit instead of 1,381."""
    one = gpus(A100, nodes=1)
    request = Request(
        job="j", global_batch=1200, total_steps=10, model="resnet50", dataset="synthetic-images", nodes_max=1,
        fixed=(FixedChoice(A100, 1, 1),),
    )  # fmt: skip
    assert rejected(replace(request, precision="BF16"), one).reason == "DoesNotFit"
    found = decided(replace(request, precision=None), one)
    assert found.chosen.precision == "FP32"
    assert found.precision_reason == "FP32: in 16 bits, the job does not fit into memory"
    neither = replace(request, precision=None, global_batch=1500)
    assert rejected(neither, one).reason == "DoesNotFit"


MIXED = {
    "A100 whose memory suffices in float32 only, beside CPUs": (
        replace(RESNET, global_batch=1200),
        view({"count": 4, "cpu": 32, "memory": "128Gi"}, {"count": 1, "device": A100, "devices": 1, "cpu": 16}),
    ),
    "small model, for which 16 bits cost more than they save, beside an old GPU": (
        replace(DIGITS, global_batch=4096), gpus(A100, K80),
    ),
    "small model on equal GPUs": (DIGITS, gpus(A100)),
    "group norms": (replace(RESNET, model="resnet18"), gpus(A100, V100)),
    "16 bits pay": (HEAVY, gpus(A100, V100, K80)),
    "16 bits pay, and only float16 is common": (replace(HEAVY, nodes_min=4), gpus(A100, V100)),
    "no loss scaling": (replace(RESNET, may_scale_loss=False), gpus(A100, V100)),
    "fixed groups": (replace(DIGITS, fixed=(FixedChoice(A100, 1, 2),)), gpus(A100)),
}  # fmt: skip


@pytest.mark.parametrize("minimize", ["Time", "Energy", "Cost"])
@pytest.mark.parametrize("name", MIXED)
def test_auto_is_not_worse_than_any_precision(name: str, minimize: Any) -> None:
    """Fixed bug: devices with 16-bit units were never considered in float32, which took up to three times as long."""
    request, cluster = MIXED[name]
    request = replace(request, minimize=minimize)
    found = decided(replace(request, precision=None), cluster)
    allowed = [each for each in PRECISIONS if each != "FP16" or request.may_scale_loss]
    given = [plan(replace(request, precision=each), cluster, {}) for each in allowed]
    scores = [score(request, each.chosen.prediction) for each in given if isinstance(each, Decision)]
    assert score(request, found.chosen.prediction) <= min(scores) * (1 + INDISTINCT), found.chosen.summary
    assert (found.precision_reason or "").startswith(f"{found.chosen.precision}: ")


def test_the_reason_compares_float32_with_the_best_plan_in_16_bits() -> None:
    found = decided(replace(DIGITS, precision=None), gpus(A100))
    assert found.chosen.precision == "FP32"
    why = found.precision_reason or ""
    assert why.startswith("FP32: the best plan in bfloat16 is not better (slower: ") and ", BF16" in why
    heavy = decided(replace(HEAVY, precision=None), gpus(A100))
    assert all(choice.precision == "BF16" for choice in heavy.candidates), "slower plans in float32 are not shown"


def test_memory_is_too_small_only_if_it_is_in_all_precisions() -> None:
    """On an A100, 1,200 samples fit in float32 only, and 1,500 samples do not fit at all."""
    cluster, request = MIXED["A100 whose memory suffices in float32 only, beside CPUs"][::-1]
    fits = decided(replace(request, precision=None), cluster)
    assert [group.device for group in fits.chosen.groups] == [A100]
    assert not any(A100 in each.summary and "does not fit" in each.reason for each in fits.refusals)
    large = decided(replace(request, precision=None, global_batch=1500), cluster)
    assert any(A100 in each.summary and "does not fit" in each.reason for each in large.refusals)


def test_precisions_are_compared_on_the_same_basis() -> None:
    """A run in bfloat16 that took twice as long as predicted says that one in float32 takes longer than predicted."""
    before = {each: decided(replace(HEAVY, precision=each), gpus(A100)).chosen for each in PRECISIONS}
    ratio = 1.5 * before["FP32"].prediction.compute_s / before["BF16"].prediction.compute_s
    batch = max(before["BF16"].groups[0].shares)
    seconds = ratio * before["BF16"].prediction.compute_s
    learned = {("x.bf16", A100): Learned((LearnedPoint(batch, seconds, 50), LearnedPoint(2 * batch, 2 * seconds, 50)))}
    found = decided(replace(HEAVY, precision=None), gpus(A100), learned)
    assert found.chosen.precision == "BF16" and found.chosen.prediction.basis == "profile"
    faster = tuple(LearnedPoint(point.batch, point.compute_s / 2, 50) for point in learned["x.bf16", A100].points)
    both = {**learned, ("x", A100): Learned(faster)}
    assert decided(replace(HEAVY, precision=None), gpus(A100), both).chosen.precision == "FP32"


def test_measured_float16_is_compared_with_bfloat16() -> None:
    points = {"x.bf16": 2.0, "x.fp16": 1.0}
    learned = {
        (key, A100): Learned((LearnedPoint(12, seconds, 50), LearnedPoint(96, 8 * seconds, 50)))
        for key, seconds in points.items()
    }
    found = decided(replace(HEAVY, precision=None), gpus(A100), learned)
    assert found.chosen.precision == "FP16"
    assert (found.precision_reason or "").startswith("FP16: the best plan in bfloat16 is not better (")
    assert decided(replace(HEAVY, precision=None, may_scale_loss=False), gpus(A100), learned).chosen.precision == "BF16"


def test_a_job_without_the_field_is_planned_in_float32() -> None:
    found = decided(RESNET, gpus(A100))
    assert found.chosen.precision == "FP32" and found.precision_reason is None
    assert found == decided(replace(RESNET, precision="FP32"), gpus(A100))


def test_a_requested_precision_excludes_devices_without_units() -> None:
    found = decided(replace(RESNET, precision="BF16"), gpus(A100, V100))
    assert {group.device for group in found.chosen.groups} == {A100} and found.chosen.precision == "BF16"
    assert any(r.summary == V100 and "bfloat16" in r.reason for r in found.refusals)
    none = rejected(replace(RESNET, precision="BF16"), gpus(V100, K80))
    assert (none.reason, none.field, none.transient) == ("NoSuchDevice", "spec.precision", True)
    emulated = rejected(replace(DIGITS, precision="FP16"), THREE)
    assert emulated.field == "spec.precision" and "float16" in emulated.message
    both = (FixedChoice(A100, 1), FixedChoice(V100, 1))
    assert rejected(replace(RESNET, precision="BF16", fixed=both), gpus(A100, V100)).field == "spec.precision"


@pytest.mark.parametrize("cluster", [THREE, gpus(UNKNOWN)])
def test_a_device_that_may_have_units_is_allowed_on_request(cluster: ClusterView) -> None:
    slow, asked = decided(DIGITS, cluster), decided(replace(DIGITS, precision="BF16"), cluster)
    assert asked.chosen.precision == "BF16"
    ratio = asked.chosen.prediction.step_p90_s / asked.chosen.prediction.step_s
    assert ratio >= slow.chosen.prediction.step_p90_s / slow.chosen.prediction.step_s


def test_model_parallelism_stays_in_float32() -> None:
    mini = Request(
        job="j", global_batch=64, total_steps=10, model="gpt-mini", dataset="synthetic-tokens", strategy="Auto"
    )
    found = decided(replace(mini, precision="BF16"), gpus(A100))
    assert any(r.summary == "Pipeline" and "float32" in r.reason for r in found.refusals)
    assert all(not choice.splits_model for choice in found.candidates)
    mini = replace(mini, global_batch=4096)  # 16 bits pay
    either = decided(replace(mini, precision=None, fixed=(FixedChoice(A100, 2, 2),)), gpus(A100))
    assert all(choice.precision == ("FP32" if choice.splits_model else "BF16") for choice in either.candidates)
    assert any(choice.splits_model for choice in either.candidates)


def test_16_bits_take_less_time_and_memory() -> None:
    """The peak of an A100 is 16 times as high for matrix products in 16 bits as in float32 without TF32."""
    device = catalogue.gpu(A100)
    assert device is not None
    full = reference("GPT-2", "AdamW")
    half = in_precision(full, "BF16")
    assert roofline(half, device).seconds(16) < roofline(full, device).seconds(16) / 3
    assert memory.sample_nbytes(half) < 0.85 * memory.sample_nbytes(full)
    # The copies of the parameters make the part that does not depend on the batch larger.
    assert memory.fixed_nbytes(half) == memory.fixed_nbytes(full) + 2 * full.parameters
    assert half.gradient_nbytes == full.gradient_nbytes
    plans = [decided(replace(GPT2, precision=each), gpus(A100)).chosen.prediction for each in ("FP32", "BF16")]
    assert plans[1].step_s < plans[0].step_s and plans[1].memory_nbytes < plans[0].memory_nbytes


def test_group_norms_in_float32_need_more_memory_in_16_bits() -> None:
    """Autocast converts their inputs and outputs, and the backward pass needs both forms (measured with torch)."""
    full = reference("ResNet-152")
    assert in_precision(full, "BF16").activation_nbytes < 0.65 * full.activation_nbytes  # batch norms
    ours = builtin("resnet50", "synthetic-images")
    assert in_precision(ours, "BF16").activation_nbytes > ours.activation_nbytes


def test_measurements_count_for_their_precision_only() -> None:
    """Profiles of earlier releases have no precision, which means float32."""
    points = (LearnedPoint(16, 100.0, 50), LearnedPoint(64, 400.0, 50))
    for key, precision, applies in (("x", "FP32", True), ("x", "BF16", False), ("x.bf16", "BF16", True)):
        request = replace(GPT2, precision=precision)
        found = decided(request, gpus(A100), {(key, A100): Learned(points)}).chosen.prediction
        assert (found.basis == "profile") == applies == (found.step_s > 10), (key, precision)
