"""Tests of workloads whose samples take next to no time, which users can describe by hints."""

import pytest

from dljob.perf.fit.curve import MAX_WHOLE, Curve
from dljob.planner import Decision, Request, plan
from support.planner_questions import T4, view


@pytest.mark.parametrize("slope_s", [1e-300, 1e-20, 1e-16, 1e-13])
def test_number_of_samples_is_bounded(slope_s: float) -> None:
    found = Curve((0.0,), (1e-3,), slope_s).whole_samples(1.0)
    assert 1e9 < found <= MAX_WHOLE


@pytest.mark.parametrize("flops", [1e-300, 1e-20, 1e-14, 1e-3, 1.0])
def test_job_of_next_to_no_work_has_a_plan(flops: float) -> None:
    request = Request(job="j", global_batch=64, total_steps=10, parameters=10**6, flops_per_sample=flops, profile="p")
    found = plan(request, view({"count": 2, "device": T4, "devices": 1, "cpu": 4, "memory": "16Gi"}), {})
    assert isinstance(found, Decision) and found.chosen.prediction.step_s > 0
