"""Tests of activation checkpointing in plans: its price, the planner's choice, the reasons, and the measurements."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.calibrate import LearnedPoint, StepPoint
from dljob.calibrate.learned import Place
from dljob.calibrate.noise import NoiseOf
from dljob.cluster import ClusterView, catalogue
from dljob.perf.resources import memory
from dljob.perf.step.compute import catalogue_curve, roofline, update_s
from dljob.perf.workload.models import MODELS
from dljob.perf.workload.references import REFERENCES
from dljob.perf.workload.workload import Workload, builtin, hinted, in_precision, recomputing, reference
from dljob.planner import FixedChoice, Infeasible, Learned, Request, plan
from dljob.planner.candidates import recomputation
from dljob.planner.candidates.recomputation import with_estimates
from dljob.planner.search.enumeration import Search
from support.planner_questions import A100, DIGITS, T4, THREE, decided, rejected, view

XL = Request(
    job="j", global_batch=128, total_steps=100, profile="x", like="GPT-2-XL", optimizer="AdamW", recomputation="Auto"
)
MINI = Request(job="j", global_batch=64, total_steps=10, model="gpt-mini", dataset="synthetic-tokens")
WITH_BLOCKS = [builtin(name, None) for name in MODELS] + [reference(name) for name in REFERENCES]
WITH_BLOCKS = [workload for workload in WITH_BLOCKS if workload.checkpointed_nbytes is not None]


def gpus(device: str = A100, nodes: int = 4) -> ClusterView:
    return view({
        "count": nodes, "device": device, "devices": 8, "gpu": True, "cpu": 96, "memory": "512Gi", "bandwidth": "100G",
    })  # fmt: skip


def both(workload: Workload) -> list[Workload]:
    return [workload, in_precision(workload, "BF16")]


@pytest.mark.parametrize("workload", WITH_BLOCKS, ids=lambda w: w.name)
@pytest.mark.parametrize("half", [False, True])
def test_recomputing_takes_more_time_and_less_memory(workload: Workload, half: bool) -> None:
    """The blocks' forward pass runs once more, up to the last tensor that their backward pass needs: not all of it."""
    plain = both(workload)[half]
    again = recomputing(plain)
    forward = sum(layer.forward_FLOPs for layer in plain.layers)
    more = again.flops_per_sample - plain.flops_per_sample
    assert 0.5 * forward < more < forward
    part = 0.75 if plain.name == "ResNet-18" else 0.6  # its eight blocks keep little more than their inputs
    assert again.activation_nbytes < part * plain.activation_nbytes
    assert (again.parameters, again.gradient_nbytes) == (plain.parameters, plain.gradient_nbytes)
    for device in (catalogue.gpu(A100), catalogue.cpu("cpu", 4.0)):
        assert device is not None
        for batch in (1, 16, 256):
            ratio = catalogue_curve(again, device).seconds(batch) / catalogue_curve(plain, device).seconds(batch)
            assert 1.05 < ratio < 1.45, (device.name, batch)
        assert update_s(again, device) == pytest.approx(update_s(plain, device), rel=0.02)
    room = 60e9 + 20.0 * plain.parameters
    assert memory.largest_batch(again, room, True) > memory.largest_batch(plain, room, True)


def test_models_without_blocks_have_no_price() -> None:
    without = {name for name in MODELS if builtin(name, None).checkpointed_nbytes is None}
    assert without == {"mlp", "digits-cnn", "lenet"}
    assert hinted(10, 1e6, 1e6).checkpointed_nbytes is None


def test_hints_price_a_whole_forward_pass() -> None:
    plain = hinted(10**6, 6e9, 1e8, checkpointed_nbytes_per_sample=2e7)
    again = recomputing(plain)
    assert again.flops_per_sample == pytest.approx(4 / 3 * plain.flops_per_sample)
    assert (again.activation_nbytes, recomputing(in_precision(plain, "FP16")).activation_nbytes) == (2e7, 2e7)


def test_never_and_no_field_give_the_same_plan() -> None:
    """Measurements with activation checkpointing do not change the times of jobs without it."""
    measured = {("gpt-mini.checkpointed", "cpu"): Learned((LearnedPoint(16, 100.0, 50),))}
    found = decided(MINI, THREE)
    assert found == decided(MINI, THREE, measured)
    assert not found.chosen.recomputes and found.recomputation_reason is None
    assert all(not choice.recomputes for choice in found.candidates)


def test_auto_makes_a_plan_fit() -> None:
    """GPT-2 XL in float32, without micro-batches, does not fit on 8 A100s: a published finding, for larger batches, too."""
    largest = replace(XL, global_batch=120)
    never = rejected(replace(largest, recomputation="Never"), gpus(nodes=1))
    assert never.reason == "DoesNotFit" and "spec.activationCheckpointing to Auto" in never.message
    found = decided(largest, gpus(nodes=1))
    assert found.chosen.recomputes and "activation checkpointing" in found.chosen.summary
    assert (found.recomputation_reason or "").startswith("without it, no plan fits into memory; a sample keeps 406 MiB")
    always = decided(replace(largest, recomputation="Always"), gpus(nodes=1))
    assert always.chosen == found.chosen
    assert (always.recomputation_reason or "").startswith("spec.activationCheckpointing is Always; ")
    fixed = replace(largest, fixed=(FixedChoice(A100, 1, 8),))
    assert decided(fixed, gpus()).chosen.recomputes
    assert rejected(replace(fixed, recomputation="Never"), gpus()).reason == "DoesNotFit"


@pytest.mark.parametrize("fixed", [(), (FixedChoice(A100, 1, 8),)])
def test_auto_keeps_activations_if_they_fit(fixed: Any) -> None:
    small = replace(XL, like="GPT-2", global_batch=64, fixed=fixed)
    found = decided(small, gpus())
    assert not found.chosen.recomputes
    assert "no better" in (found.recomputation_reason or "")
    assert found.chosen == decided(replace(small, recomputation="Never"), gpus()).chosen


def test_no_search_with_it_where_memory_limits_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[bool]()
    run = Search.run
    monkeypatch.setattr(Search, "run", lambda self: (searched.append(self.screen.workload.recomputes), run(self))[1])
    decided(replace(MINI, recomputation="Auto", strategy="Auto"), gpus())
    assert searched == [False, False], "one each for Data and Optimizer"
    searched.clear()
    decided(replace(MINI, recomputation="Auto", minimize="Energy"), gpus())
    assert searched == [False, True], "energy follows from more than times"
    searched.clear()
    measured = {("gpt-mini.checkpointed", A100): Learned((LearnedPoint(8, 0.001, 50), LearnedPoint(64, 0.002, 50)))}
    decided(replace(MINI, recomputation="Auto"), gpus(), measured)
    assert searched == [False, True], "measurements need not be consistent"
    searched.clear()
    decided(replace(XL, like="GPT-2-large", chooses_micro_batches=True), gpus(nodes=1))
    assert searched == [False, True], "memory limits the size of micro-batches"


@settings(max_examples=18, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([A100, T4, "cpu"]), st.integers(1, 3)), min_size=1, max_size=2),
    st.sampled_from([8, 64, 1000]),
    st.sampled_from(["Data", "Optimizer", "Auto"]),
    st.sampled_from([10**6, 10**8, 10**9]),
    st.floats(1e5, 3e8),
    st.booleans(),
)
def test_searches_that_are_left_out_change_no_plan(
    pools: list[tuple[str, int]], batch: int, strategy: Any, parameters: int, activations: float, divides: bool
) -> None:
    cluster = view(*(
        {"count": count, "device": device, "devices": 4, "cpu": 16, "memory": "32Gi", "bandwidth": "10G"}
        if device != "cpu" else {"count": count, "cpu": 4, "memory": "8Gi"}
        for device, count in pools
    ))  # fmt: skip
    asked = Request(
        job="j", global_batch=batch, total_steps=1000, profile="x", strategy=strategy, recomputation="Auto",
        parameters=parameters, flops_per_sample=20.0 * parameters, activation_nbytes_per_sample=int(activations),
        checkpointed_nbytes_per_sample=int(activations / 8), precision=None, chooses_micro_batches=divides,
    )  # fmt: skip
    found = plan(asked, cluster, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputation, "cannot_pay", lambda *_: False)
        every = plan(asked, cluster, {})
    if isinstance(found, Infeasible) or isinstance(every, Infeasible):
        assert found == every
    else:
        assert found.chosen == every.chosen


def test_auto_uses_fewer_nodes_for_a_lower_cost() -> None:
    """Activations of GPT-2 large need several nodes, between which a slow network takes longer than recomputing."""
    asked = replace(XL, like="GPT-2-large", minimize="Cost")
    cluster = view({
        "count": 4, "device": A100, "devices": 8, "gpu": True, "cpu": 96, "memory": "512Gi", "bandwidth": "1G",
    })  # fmt: skip
    plain, found = decided(replace(asked, recomputation="Never"), cluster).chosen, decided(asked, cluster)
    assert found.chosen.recomputes
    assert [g.nodes for g in found.chosen.groups] == [1] < [g.nodes for g in plain.groups]
    assert (found.chosen.prediction.cost_usd or 0) < 0.95 * (plain.prediction.cost_usd or 0)
    assert "less cost than the best plan without it" in (found.recomputation_reason or "")


def test_auto_with_a_reason_against_it_or_without_blocks() -> None:
    told = decided(replace(MINI, recomputation="Auto", no_recomputation_reason="because"), THREE)
    assert (told.chosen.recomputes, told.recomputation_reason) == (False, "because")
    none = decided(replace(DIGITS, recomputation="Auto"), THREE)
    assert not none.chosen.recomputes and "does not know blocks" in (none.recomputation_reason or "")
    wrong = rejected(replace(DIGITS, recomputation="Always"), THREE)
    assert (wrong.reason, wrong.field) == ("BadWorkload", "spec.activationCheckpointing")


def test_model_parallelism_keeps_activations() -> None:
    asked = replace(MINI, strategy="Auto", recomputation="Always")
    found = decided(asked, gpus(T4, 1))
    assert any(r.summary == "Pipeline" and "activationCheckpointing" in r.reason for r in found.refusals)
    assert all(choice.recomputes and not choice.splits_model for choice in found.candidates)
    either = decided(replace(asked, recomputation="Auto", fixed=(FixedChoice(T4, 1, 2),)), gpus(T4, 1))
    assert not any(choice.splits_model and choice.recomputes for choice in either.candidates)


def test_measurements_count_with_or_without_it() -> None:
    """A measurement without it predicts plans with it by the ratio of the catalogue, and vice versa; none is mixed."""
    points = (LearnedPoint(16, 100.0, 50), LearnedPoint(64, 400.0, 50))
    device = catalogue.gpu(A100)
    assert device is not None
    plain = reference("GPT-2", "AdamW")
    ratio = roofline(recomputing(plain), device).seconds(16) / roofline(plain, device).seconds(16)
    asked = replace(XL, like="GPT-2", recomputation="Always")
    step = StepPoint(Place(1, 2), 16, 150.0)
    for key, expected in (("x", 100.0 * ratio), ("x.checkpointed", 100.0)):
        known = with_estimates(asked, plain, {(key, A100): Learned(points, steps=(step,))})["x.checkpointed", A100]
        assert known.points[0].compute_s == pytest.approx(expected)
        assert known.steps[0].step_s == pytest.approx(150.0 + expected - 100.0)
    measured = {("x", A100): Learned(points), ("x.checkpointed", A100): Learned((LearnedPoint(16, 7.0, 50),))}
    assert with_estimates(asked, plain, measured) == measured
    back = with_estimates(asked, plain, {("x.checkpointed", A100): Learned(points)})["x", A100]
    assert back.points[0].compute_s == pytest.approx(100.0 / ratio)
    assert with_estimates(replace(asked, recomputation="Never"), plain, {("x", A100): Learned(points)}).keys() == {
        ("x", A100)
    }


def test_estimates_keep_warnings_with_the_profile_that_they_are_about() -> None:
    plain, asked = reference("GPT-2", "AdamW"), replace(XL, like="GPT-2", recomputation="Always")
    points, noise = (LearnedPoint(16, 100.0, 50), LearnedPoint(64, 400.0, 50)), NoiseOf("data", 100.0, 50)
    measured, left_out = Learned(points, doubts=("found a",)), Learned(noise=noise, doubts=("found b",))
    for first, second in (("x", "x.checkpointed"), ("x.checkpointed", "x")):
        found = with_estimates(asked, plain, {(first, A100): measured, (second, A100): left_out})
        assert found[first, A100] == measured
        assert found[second, A100].points and found[second, A100].noise == noise
        assert found[second, A100].doubts == ("found b",)
        assert with_estimates(asked, plain, {(first, A100): measured})[second, A100].doubts == ()


@pytest.mark.parametrize("lie", ["gpt-mini", "gpt-mini.checkpointed"])
def test_plans_name_an_implausible_profile_beside_an_estimate_of_the_same_variant(lie: str) -> None:
    asked, sheet = replace(MINI, recomputation="Auto"), catalogue.gpu(T4)
    assert sheet is not None
    curve = roofline(builtin("gpt-mini", None), sheet)
    honest = Learned(tuple(LearnedPoint(b, curve.seconds(b), 50) for b in (8, 16, 32)))
    wrong = Learned(tuple(LearnedPoint(b, 100 * curve.seconds(b), 50) for b in (8, 16, 32)))
    learned = {(key, T4): wrong if key == lie else honest for key in ("gpt-mini", "gpt-mini.checkpointed")}
    warning = decided(asked, gpus(T4, 1), learned).warning or ""
    assert warning.count("profile of ") == 1 and f"profile of {lie} on" in warning
    mixed = Learned((*honest.points, LearnedPoint(64, 1000.0, 50)))
    warning = decided(asked, gpus(T4, 1), {(lie, T4): mixed}).warning or ""
    assert warning.count("profile of ") == 1 and f"profile of {lie} on" in warning


def test_a_slow_measurement_does_not_make_recomputing_look_fast() -> None:
    """Steps were measured to be far slower than the data sheet says: plans with and without it share this error."""
    points = tuple(LearnedPoint(batch, 10.0 * batch, 50) for batch in (4, 8, 16))
    found = decided(replace(XL, like="GPT-2", global_batch=64), gpus(), {("x", A100): Learned(points)})
    assert not found.chosen.recomputes and found.chosen.prediction.basis == "profile"
