"""Tests of the predicted time of evaluations."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from dljob.cluster import catalogue
from dljob.perf.step.compute import LOOP_S, catalogue_curve
from dljob.perf.workload.workload import builtin
from dljob.planner import Request
from dljob.planner.candidates.cost.evaluations import split_evaluations_s
from support.planner_questions import DIGITS, decided, view

ONE = view({"cpu": 1, "memory": "4Gi"})
TWO = view({"count": 2, "cpu": 1, "memory": "4Gi"})


def test_each_epoch_has_a_forward_pass_of_the_held_out_samples() -> None:
    """digits has 1437 + 360 samples: 15 steps of 96 samples in an epoch, and four batches in an evaluation."""
    curve = catalogue_curve(builtin("digits-cnn", "digits"), catalogue.cpu("cpu", 1.0))
    once_s = sum(curve.seconds(batch) + LOOP_S for batch in (96, 96, 96, 72)) / 3
    for steps, evaluations in ((15, 1), (16, 2), (375, 25)):
        found = decided(replace(DIGITS, total_steps=steps), ONE).chosen.prediction
        assert found.evaluations_s == pytest.approx(evaluations * once_s, rel=1e-3)
        assert found.total_s >= steps * found.step_s + found.evaluations_s


def test_ranks_divide_the_samples() -> None:
    one, two = (
        decided(replace(DIGITS, nodes_min=n, nodes_max=n), cluster).chosen.prediction.evaluations_s
        for n, cluster in ((1, ONE), (2, TWO))
    )
    assert one / 2 < two < 0.6 * one


def test_generated_samples_count() -> None:
    images = Request(job="j", global_batch=64, total_steps=100, model="lenet", dataset="synthetic-images")
    found = decided(images, ONE).chosen.prediction
    assert found.evaluations_s > 1000 * builtin("lenet", "synthetic-images").making_s


def test_ranks_that_split_the_model_generate_samples_too() -> None:
    """Fixed bug: plans that split a model were compared with others as if their held-out samples cost nothing."""
    request = Request(job="j", global_batch=64, total_steps=157, model="resnet18", dataset="synthetic-images")
    made, stored = (replace(builtin("resnet18", "synthetic-images"), making_s=making_s) for making_s in (0.01, 0.0))
    for cores, factor in ((1.0, 1), (0.5, 2), (4.0, 1)):
        whole_s, forward_s = (split_evaluations_s(request, each, 0.6, 16, cores) for each in (made, stored))
        assert forward_s == pytest.approx(0.2 * 1000 / 64)
        assert whole_s - forward_s == pytest.approx(factor * 0.01 * 1000 * 16 / 64)


@pytest.mark.parametrize("strategy", ["Pipeline", "Tensor"])
def test_ranks_that_split_the_model_evaluate_it_too(strategy: Literal["Pipeline", "Tensor"]) -> None:
    """Otherwise, totals would favour these strategies. The stages of a pipeline pass a batch on one after another."""
    request = Request(job="j", global_batch=32, total_steps=100, model="gpt-mini", dataset="python-source", nodes_min=2)
    data, parts = (
        decided(replace(request, strategy=each, nodes_max=2), TWO).chosen.prediction for each in ("Data", strategy)
    )
    least = 1.0 if strategy == "Pipeline" else 0.4
    assert least * data.evaluations_s < parts.evaluations_s < 4 * data.evaluations_s
    assert parts.total_s >= 100 * parts.step_s + parts.evaluations_s


@pytest.mark.parametrize(
    "given",
    [{"dataset": None}, {"model": None, "dataset": None, "parameters": 1000, "flops_per_sample": 1e6}],
)
def test_nothing_is_assumed_about_other_data(given: dict[str, Any]) -> None:
    request = replace(DIGITS, activation_nbytes_per_sample=1e3, **given)
    assert decided(request, ONE).chosen.prediction.evaluations_s == 0.0
