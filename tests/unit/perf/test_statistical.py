"""What a batch is worth, and what runs teach of it."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.calibrate.noise import MAX_RUNS, MIN_STEPS, NoiseOf, after, known
from dljob.perf.fit.statistical import efficiency, step_progress, steps

batches, noises = st.integers(1, 10**6), st.floats(1e-3, 1e12)


@given(base=batches, batch=batches, more=batches, noise=noises)
def test_a_larger_batch_makes_each_sample_worth_less_and_each_step_more(
    base: int, batch: int, more: int, noise: float
) -> None:
    small, large = sorted((batch, batch + more))
    assert efficiency(large, base, noise) <= efficiency(small, base, noise)
    assert step_progress(large, noise) >= step_progress(small, noise)
    assert 0 < efficiency(base + more, base, noise) <= 1 == efficiency(base, base, noise)


@given(base=batches, batch=batches, count=st.integers(1, 10**6), noise=noises)
def test_steps_are_those_of_the_efficiency(base: int, batch: int, count: int, noise: float) -> None:
    """As many samples as the base needs, over the efficiency; rounded up to a step."""
    found = steps(count, base, batch, noise)
    exact = count * base / efficiency(batch, base, noise) / batch
    assert exact * (1 - 1e-6) - 1e-6 <= found <= max(1.0, exact * (1 + 1e-6) + 1)
    assert steps(count, base, base, noise) == count


@pytest.mark.parametrize(
    ("batch", "noise", "found"),
    [(128, 0.0, 1000), (32, 0.0, 1000), (128, 1e15, 500), (128, 64.0, 750), (640, 64.0, 550), (32, 64.0, 1500)],
)
def test_steps_between_two_limits(batch: int, noise: float, found: int) -> None:
    """1000 steps of 64 samples. Without noise as many steps, with mere noise as many samples."""
    assert steps(1000, 64, batch, noise) == found


def test_partial_batches_are_counted_as_what_they_are() -> None:
    """1000 steps of 64 are 40 epochs of 25 steps. Of 1024 an epoch has one full step and one of 576 samples."""
    assert steps(1000, 64, 1024, 1e15, samples=1600) == 80
    assert step_progress(1024, 1000.0, samples=1600) == pytest.approx((1024 / 2024 + 576 / 1576) / 2)
    assert step_progress(64, 1000.0, samples=1600) == pytest.approx(64 / 1064)
    assert step_progress(100, 100.0, samples=50) == pytest.approx(50 / 150), "more than there are"


RUN = NoiseOf("digits", 1000.0, 400)


def test_runs_are_averaged_in_the_logarithm_and_forgotten_in_time() -> None:
    told = after(RUN, NoiseOf("digits", 4000.0, 100))
    assert told is not None
    assert (told.samples, told.steps, told.runs) == (pytest.approx(2000), 500, 2)
    for _ in range(30):
        told = after(told, NoiseOf("digits", 50.0, 400))
    assert told is not None and told.runs == MAX_RUNS
    assert told.samples == pytest.approx(50, rel=0.01)


@pytest.mark.parametrize("samples", [nan, inf, -1.0])
def test_a_bad_measurement_teaches_nothing(samples: float) -> None:
    assert after(RUN, NoiseOf("digits", samples, 400)) == RUN
    assert after(None, NoiseOf("digits", samples, 400)) is None


def test_few_steps_teach_nothing_and_other_data_starts_afresh() -> None:
    assert after(None, NoiseOf("digits", 10.0, MIN_STEPS - 1)) is None
    other = NoiseOf("iris", 10.0, 400)
    assert after(RUN, other) == other
    assert after(None, NoiseOf("digits", 0.0, 400)) is not None, "no noise at all can be measured"


def test_of_several_devices_what_most_runs_told() -> None:
    often = NoiseOf("digits", 9.0, 10, runs=3)
    assert known({"cpu": RUN, "t4": often, "a100": None, "v100": NoiseOf("iris", 1.0, 9, runs=5)}, "digits") == often
    assert known({"cpu": RUN}, "iris") is None
