"""First predictions in 16 bits against published times of GPUs."""

import pytest
from benchmarks.perfmodel.published_precision import GPT_STEP_S, PUBLISHED, ratio, spread, workload

from dljob.perf.step.step import SPREAD


def test_predictions_in_16_bits_are_within_the_assumed_spread() -> None:
    """The efficiencies of 16-bit units, two of which are assumptions, cost no more than those of float32."""
    ratios = {name: [ratio(row) for row in PUBLISHED if row.precision == name] for name in ("FP32", "FP16")}
    assert all(0.5 < each < 2 for each in ratios["FP16"]), ratios
    assert spread(ratios["FP16"]) < spread(ratios["FP32"]) < SPREAD["catalogue"]


def test_published_operations_are_those_of_the_layer_table() -> None:
    """Three quarters of Narayanan's operations, whose last quarter recomputes activations."""
    assert 16 * workload("GPT 1.7B").flops_per_sample == pytest.approx(0.75 * GPT_STEP_S * 137e12, rel=0.03)
