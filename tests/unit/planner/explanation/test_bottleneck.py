"""Tests of the bottleneck and the efficiency of plans whose steps wait for input."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dljob.planner import FixedChoice, Request
from dljob.planner.types import Prediction
from support.planner_questions import A100, decided, view

IMAGENET = Request(
    job="j", global_batch=256, total_steps=1000, profile="program-1", parameters=25_600_000, flops_per_sample=24.6e9,
    activation_nbytes_per_sample=60_000_000, precision="BF16", dataset_samples=1_281_167,
    sample_nbytes=110_000,
)  # fmt: skip
"""ResNet-50 on ImageNet, in a script. A step reads 28 MB, which takes 56 ms at 500 MB/s, on one GPU or on eight."""
NODE = view({"device": A100, "devices": 8, "cpu": 96, "memory": "1024Gi", "bandwidth": "12.5G"})


def on_gpus(ranks: int, request: Request = IMAGENET) -> Prediction:
    return decided(replace(request, fixed=(FixedChoice(A100, 1, ranks),)), NODE).chosen.prediction


def test_a_step_that_takes_as_long_as_its_input_says_so_even_if_it_computes_for_most_of_this_time() -> None:
    """Regression: the text named computing, although more GPUs do not shorten the step."""
    found = on_gpus(1, replace(IMAGENET, flops_per_sample=20e9))
    assert found.compute_s > found.data_s > 0.1 * found.step_s
    assert found.bottleneck.startswith("computing ")
    assert "; input takes 56.3ms of the step, mostly reading from disk" in found.bottleneck


def test_a_step_that_does_not_wait_for_input_does_not_mention_it() -> None:
    assert "disk" not in on_gpus(8, replace(IMAGENET, sample_nbytes=None)).bottleneck
    in_cache = replace(IMAGENET, memory_per_pod_nbytes=400 * 2**30, total_steps=100_000)
    assert "disk" not in on_gpus(1, in_cache).bottleneck


@settings(max_examples=20)
@given(ranks=st.sampled_from([1, 2, 4, 8]), nbytes=st.sampled_from([None, 1000, 110_000, 1_000_000]))
def test_efficiency_is_the_throughput_divided_by_that_of_the_devices_alone(ranks: int, nbytes: int | None) -> None:
    """Regression: GPUs that share a disk counted as slow alone, so that eight of them at the speed of one had 99 %."""
    request = replace(IMAGENET, sample_nbytes=nbytes)
    found, alone = on_gpus(ranks, request), on_gpus(1, request)
    assert found.efficiency == pytest.approx(min(1.0, alone.step_s / found.step_s / ranks), rel=0.05)
