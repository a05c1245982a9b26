"""Tests of the choice of the global batch size by the planner."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dljob.calibrate import Learned, NoiseOf
from dljob.planner import BatchDecision, Batches, Request, RunningBatch, batch, plan
from dljob.planner.batch import MAX_RUNGS, MIN_GAIN, ladder
from support.planner_questions import A100, DIGITS, RESNET, THREE, decided, rejected, view

SIXTEEN = view({"count": 16, "device": A100, "devices": 1, "cpu": 16, "memory": "64Gi", "bandwidth": "0.5G"})
"""A cluster whose slow network dominates the step time of a small batch."""
WIDE = Batches(low=512, high=8192, data="synthetic-images")
OPEN = replace(RESNET, nodes_min=16, batches=WIDE)


def with_noise(samples: float, request: Request = OPEN) -> dict[tuple[str, str], Learned]:
    assert request.model is not None and request.batches is not None
    return {(request.model, A100): Learned(noise=NoiseOf(request.batches.data, samples, 1000))}


def chosen(samples: float, request: Request = OPEN) -> BatchDecision:
    found = decided(request, SIXTEEN, with_noise(samples, request)).batch
    assert found is not None
    return found


@given(base=st.integers(1, 5000), down=st.floats(0, 1), up=st.floats(1, 1000))
def test_ladder_stays_within_its_range(base: int, down: float, up: float) -> None:
    low, high = max(1, int(base * down)), max(base, int(base * up))
    found = ladder(base, low, high)
    assert {low, base, high} <= set(found) and (found[0], found[-1]) == (low, high)
    assert found == sorted(set(found)) and len(found) <= MAX_RUNGS


def test_ladder_contains_multiples_of_the_requested_batch() -> None:
    assert ladder(120, 120, 960) == [120, 180, 240, 360, 480, 720, 960]
    assert ladder(64, 16, 64) == [16, 24, 32, 48, 64]


def test_batch_is_unchanged_without_a_noise_scale() -> None:
    plain = decided(replace(OPEN, batches=None), SIXTEEN)
    found = decided(OPEN, SIXTEEN)
    assert found.batch is not None and replace(found, batch=None) == plain
    assert (found.batch.chosen, found.batch.steps, found.batch.options) == (512, 1000, ())
    assert found.batch.text.startswith("stays 512, because no run has measured the gradient noise scale")
    elsewhere = {("resnet50", A100): Learned(noise=NoiseOf("other images", 1e6, 1000))}
    assert decided(OPEN, SIXTEEN, elsewhere).batch == found.batch, "the noise scale of another dataset is not used"


@settings(max_examples=12, deadline=None)
@given(noise=st.floats(1e-3, 1e9), high=st.integers(512, 20_000))
@example(noise=1e9, high=8192)
@example(noise=1e-3, high=8192)
@example(noise=98.0, high=772)
def test_chosen_batch_is_within_the_range_and_worthwhile(noise: float, high: int) -> None:
    found = chosen(noise, replace(OPEN, batches=replace(WIDE, high=high)))
    assert 512 <= found.chosen <= high
    times = {o.batch: o.prediction.total_s for o in found.options if o.prediction is not None}
    assert times[found.chosen] <= min(times.values()) * (1 + MIN_GAIN)
    if found.chosen != 512:
        assert times[found.chosen] * (1 + MIN_GAIN) < times[512] * (1 + 1e-9), "the batch only changes for a gain"


def test_pure_noise_maximizes_throughput_and_no_noise_keeps_the_smallest_batch() -> None:
    found = chosen(1e12)
    rates = {o.batch: o.prediction.samples_per_s for o in found.options if o.prediction is not None}
    assert found.chosen > 512 and rates[found.chosen] >= max(rates.values()) / (1 + MIN_GAIN)
    assert [o.efficiency for o in found.options] == pytest.approx([1.0] * len(found.options))
    quiet = chosen(1e-3)
    assert (quiet.chosen, {o.steps for o in quiet.options}) == (512, {1000})


def test_larger_batch_is_faster_with_noise_and_slower_without() -> None:
    for noise, falls in ((1e9, True), (1e-3, False)):
        options = [o for o in chosen(noise).options if o.batch in (512, 1024, 2048)]
        times = [o.prediction.total_s for o in options if o.prediction is not None]
        assert len(times) == 3 and times == sorted(times, reverse=falls)


def test_more_noise_never_gives_a_smaller_batch() -> None:
    found = [chosen(noise).chosen for noise in (1, 300, 1000, 3000, 10**4, 10**5, 10**7)]
    assert found == sorted(found) and len(set(found)) > 2


def test_low_noise_gives_a_smaller_batch_than_requested() -> None:
    request = replace(OPEN, global_batch=8192, batches=replace(WIDE, high=8192))
    assert chosen(10.0, request).chosen < 8192


def test_batches_that_do_not_fit_are_listed_with_a_reason() -> None:
    small = view({"count": 2, "device": "Tesla-T4", "devices": 1, "cpu": 8, "memory": "32Gi"})
    request = replace(RESNET, global_batch=64, batches=replace(WIDE, low=64, high=4096))
    found = decided(request, small, {("resnet50", "Tesla-T4"): Learned(noise=NoiseOf(WIDE.data, 1e9, 100))}).batch
    assert found is not None
    refusals = {o.batch: o.reason for o in found.options if o.prediction is None}
    assert 4096 in refusals and all(
        "fits into the memory of no allowed set of nodes" in reason for reason in refusals.values()
    )
    assert found.chosen not in refusals


@pytest.mark.parametrize("noise", [1.0, 300.0, 4000.0, 1e5, 1e9])
def test_search_of_a_long_ladder_finds_the_best_batch(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(OPEN, global_batch=1024, batches=replace(WIDE, low=128, high=20_000), nodes_min=1)
    quick = chosen(noise, request)
    monkeypatch.setattr(batch, "MAX_RUNGS_PLANNED_AT_ONCE", MAX_RUNGS)
    whole = chosen(noise, request)
    assert len(quick.options) < len(whole.options) == MAX_RUNGS
    assert (quick.chosen, quick.steps) == (whole.chosen, whole.steps)
    assert set(quick.options) < set(whole.options)


@pytest.mark.parametrize("stored", [{}, {"model": None, "like": "AlexNet", "dataset_samples": 10**6}])
def test_each_batch_is_planned_as_if_requested(stored: dict[str, Any]) -> None:
    """Values shared by all plans of a range must not depend on the batch. Disk reads do depend on it."""
    request = replace(OPEN, profile="p", sample_nbytes=100_000, **stored)
    known = {("p", A100): Learned(noise=NoiseOf(WIDE.data, 4000.0, 1000))}
    found = decided(request, SIXTEEN, known).batch
    assert found is not None
    fitting = [option for option in found.options if option.prediction is not None]
    assert len(fitting) > 3
    for option in fitting:
        single = replace(request, batches=None, global_batch=option.batch, total_steps=option.steps)
        assert decided(single, SIXTEEN, known).chosen.prediction == option.prediction


def test_deadline_selects_a_batch_that_meets_it() -> None:
    slow = next(o.prediction.total_p90_s for o in chosen(1e5).options if o.batch == 512 and o.prediction)
    request = replace(OPEN, minimize="Energy", deadline_s=20 + slow * 0.8)
    found = decided(request, SIXTEEN, with_noise(1e5))
    assert found.warning is None and found.batch is not None and found.batch.chosen > 512
    assert found.chosen.prediction.total_p90_s <= slow * 0.8
    hopeless = decided(replace(request, deadline_s=1.0), SIXTEEN, with_noise(1e5))
    assert hopeless.warning is not None and hopeless.batch is not None
    times = [o.prediction.total_p90_s for o in hopeless.batch.options if o.prediction]
    assert hopeless.chosen.prediction.total_p90_s <= min(times) * (1 + MIN_GAIN), "the plan with the smallest delay"


def test_running_job_keeps_its_batch() -> None:
    running = replace(OPEN, batches=replace(WIDE, running=RunningBatch(2048, 4000.0)))
    found = decided(running, SIXTEEN, with_noise(1e12)).batch
    assert found is not None
    assert (found.base, found.chosen, found.noise, found.options) == (512, 2048, 4000.0, ())
    assert found.steps == 336, "with the noise scale at its start: 1000 (4000/2048 + 1) / (4000/512 + 1)"
    assert "which the job began with" in found.text


def test_rejection_is_that_of_the_requested_batch() -> None:
    request = replace(DIGITS, nodes_min=4, batches=Batches(96, 960, "digits"))
    learned = {("digits-cnn", "cpu"): Learned(noise=NoiseOf("digits", 1e4, 1000))}
    assert rejected(request, THREE) == rejected(replace(request, batches=None), THREE)
    assert plan(request, THREE, learned) == rejected(replace(request, batches=None), THREE)
