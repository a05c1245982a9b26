"""The global batch, chosen by the planner."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dljob.calibrate import Learned, NoiseOf
from dljob.planner import BatchDecision, Batches, Request, RunningBatch, batch, plan
from dljob.planner.batch import MAX_RUNGS, MIN_GAIN, ladder
from support.planner_questions import A100, DIGITS, RESNET, THREE, decided, refused, view

SIXTEEN = view({"count": 16, "device": A100, "devices": 1, "cpu": 16, "memory": "64Gi", "bandwidth": "0.5G"})
"""A slow network: what a small batch waits for."""
WIDE = Batches(least=512, most=8192, data="synthetic-images")
OPEN = replace(RESNET, nodes_min=16, batches=WIDE)


def with_noise(samples: float, request: Request = OPEN) -> dict[tuple[str, str], Learned]:
    assert request.model is not None and request.batches is not None
    return {(request.model, A100): Learned(noise=NoiseOf(request.batches.data, samples, 1000))}


def chosen(samples: float, request: Request = OPEN) -> BatchDecision:
    found = decided(request, SIXTEEN, with_noise(samples, request)).batch
    assert found is not None
    return found


@given(base=st.integers(1, 5000), down=st.floats(0, 1), up=st.floats(1, 1000))
def test_the_ladder_stays_within_its_ends(base: int, down: float, up: float) -> None:
    low, high = max(1, int(base * down)), max(base, int(base * up))
    found = ladder(base, low, high)
    assert {low, base, high} <= set(found) and (found[0], found[-1]) == (low, high)
    assert found == sorted(set(found)) and len(found) <= MAX_RUNGS


def test_the_ladder_has_multiples_of_the_users_batch() -> None:
    assert ladder(120, 120, 960) == [120, 180, 240, 360, 480, 720, 960]
    assert ladder(64, 16, 64) == [16, 24, 32, 48, 64]


def test_without_a_noise_scale_the_batch_stays_and_the_plan_says_so() -> None:
    plain = decided(replace(OPEN, batches=None), SIXTEEN)
    found = decided(OPEN, SIXTEEN)
    assert found.batch is not None and replace(found, batch=None) == plain
    assert (found.batch.chosen, found.batch.steps, found.batch.options) == (512, 1000, ())
    assert found.batch.text.startswith("stays 512: no noise scale was measured")
    elsewhere = {("resnet50", A100): Learned(noise=NoiseOf("other images", 1e6, 1000))}
    assert decided(OPEN, SIXTEEN, elsewhere).batch == found.batch, "noise of other data is none of this"


@settings(max_examples=12, deadline=None)
@given(noise=st.floats(1e-3, 1e9), most=st.integers(512, 20_000))
@example(noise=1e9, most=8192)
@example(noise=1e-3, most=8192)
@example(noise=98.0, most=772)
def test_the_choice_is_within_the_range_and_worth_it(noise: float, most: int) -> None:
    found = chosen(noise, replace(OPEN, batches=replace(WIDE, most=most)))
    assert 512 <= found.chosen <= most
    times = {o.batch: o.prediction.total_s for o in found.options if o.prediction is not None}
    assert times[found.chosen] <= min(times.values()) * (1 + MIN_GAIN)
    if found.chosen != 512:
        assert times[found.chosen] * (1 + MIN_GAIN) < times[512] * (1 + 1e-9), "no change without a gain"


def test_mere_noise_takes_the_throughput_and_none_the_smallest() -> None:
    found = chosen(1e12)
    rates = {o.batch: o.prediction.samples_per_s for o in found.options if o.prediction is not None}
    assert found.chosen > 512 and rates[found.chosen] >= max(rates.values()) / (1 + MIN_GAIN)
    assert [o.efficiency for o in found.options] == pytest.approx([1.0] * len(found.options))
    quiet = chosen(1e-3)
    assert (quiet.chosen, {o.steps for o in quiet.options}) == (512, {1000})


def test_time_to_the_same_progress_falls_while_communication_bounds_it_and_rises_without_noise() -> None:
    for noise, falls in ((1e9, True), (1e-3, False)):
        options = [o for o in chosen(noise).options if o.batch in (512, 1024, 2048)]
        times = [o.prediction.total_s for o in options if o.prediction is not None]
        assert len(times) == 3 and times == sorted(times, reverse=falls)


def test_more_noise_never_asks_for_a_smaller_batch() -> None:
    found = [chosen(noise).chosen for noise in (1, 300, 1000, 3000, 10**4, 10**5, 10**7)]
    assert found == sorted(found) and len(set(found)) > 2


def test_a_smaller_batch_than_the_users_where_its_noise_is_small() -> None:
    asked = replace(OPEN, global_batch=8192, batches=replace(WIDE, most=8192))
    assert chosen(10.0, asked).chosen < 8192


def test_batches_that_do_not_fit_are_shown_with_their_reason() -> None:
    small = view({"count": 2, "device": "Tesla-T4", "devices": 1, "cpu": 8, "memory": "32Gi"})
    asked = replace(RESNET, global_batch=64, batches=replace(WIDE, least=64, most=4096))
    found = decided(asked, small, {("resnet50", "Tesla-T4"): Learned(noise=NoiseOf(WIDE.data, 1e9, 100))}).batch
    assert found is not None
    refusals = {o.batch: o.reason for o in found.options if o.prediction is None}
    assert 4096 in refusals and all("fits on no allowed set of nodes" in reason for reason in refusals.values())
    assert found.chosen not in refusals


@pytest.mark.parametrize("noise", [1.0, 300.0, 4000.0, 1e5, 1e9])
def test_of_a_long_ladder_as_good_a_batch_is_found_as_by_planning_all(
    noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(OPEN, global_batch=1024, batches=replace(WIDE, least=128, most=20_000), nodes_min=1)
    quick = chosen(noise, asked)
    monkeypatch.setattr(batch, "MAX_RUNGS_PLANNED_AT_ONCE", MAX_RUNGS)
    whole = chosen(noise, asked)
    assert len(quick.options) < len(whole.options) == MAX_RUNGS
    assert (quick.chosen, quick.steps) == (whole.chosen, whole.steps)
    assert set(quick.options) < set(whole.options)


@pytest.mark.parametrize("stored", [{}, {"model": None, "like": "AlexNet", "dataset_samples": 10**6}])
def test_every_batch_is_planned_as_if_it_had_been_asked_for(stored: dict[str, Any]) -> None:
    """What the plans of a range share must not depend on the batch; what a training reads from disk does."""
    asked = replace(OPEN, profile="p", sample_nbytes=100_000, **stored)
    known = {("p", A100): Learned(noise=NoiseOf(WIDE.data, 4000.0, 1000))}
    found = decided(asked, SIXTEEN, known).batch
    assert found is not None
    fitting = [option for option in found.options if option.prediction is not None]
    assert len(fitting) > 3
    for option in fitting:
        one = replace(asked, batches=None, global_batch=option.batch, total_steps=option.steps)
        assert decided(one, SIXTEEN, known).chosen.prediction == option.prediction


def test_a_deadline_is_met_by_the_batch_that_can() -> None:
    slow = next(o.prediction.total_p90_s for o in chosen(1e5).options if o.batch == 512 and o.prediction)
    asked = replace(OPEN, minimize="Energy", deadline_s=20 + slow * 0.8)
    found = decided(asked, SIXTEEN, with_noise(1e5))
    assert found.warning is None and found.batch is not None and found.batch.chosen > 512
    assert found.chosen.prediction.total_p90_s <= slow * 0.8
    hopeless = decided(replace(asked, deadline_s=1.0), SIXTEEN, with_noise(1e5))
    assert hopeless.warning is not None and hopeless.batch is not None
    times = [o.prediction.total_p90_s for o in hopeless.batch.options if o.prediction]
    assert hopeless.chosen.prediction.total_p90_s <= min(times) * (1 + MIN_GAIN), "the least late"


def test_a_job_keeps_the_batch_it_began_with() -> None:
    kept = replace(OPEN, batches=replace(WIDE, kept=RunningBatch(2048, 4000.0)))
    found = decided(kept, SIXTEEN, with_noise(1e12)).batch
    assert found is not None
    assert (found.base, found.chosen, found.noise, found.options) == (512, 2048, 4000.0, ())
    assert found.steps == 336, "by the noise scale of then: 1000 (4000/2048 + 1) / (4000/512 + 1)"
    assert "which the job began with" in found.text


def test_no_nodes_for_any_batch_is_the_answer_for_the_users_own() -> None:
    asked = replace(DIGITS, nodes_min=4, batches=Batches(96, 960, "digits"))
    learned = {("digits-cnn", "cpu"): Learned(noise=NoiseOf("digits", 1e4, 1000))}
    assert refused(asked, THREE) == refused(replace(asked, batches=None), THREE)
    assert plan(asked, THREE, learned) == refused(replace(asked, batches=None), THREE)
