"""Tests of statistical efficiency, and of the noise scale that runs contribute to a profile."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.calibrate.noise import MAX_RUNS, MIN_STEPS, NoiseOf, after, known
from dljob.perf.fit.statistical import efficiency, step_progress, steps

batches, noises = st.integers(1, 10**6), st.floats(1e-3, 1e12)


@given(base=batches, batch=batches, more=batches, noise=noises)
def test_larger_batch_lowers_efficiency_and_raises_progress_per_step(
    base: int, batch: int, more: int, noise: float
) -> None:
    small, large = sorted((batch, batch + more))
    assert efficiency(large, base, noise) <= efficiency(small, base, noise)
    assert step_progress(large, noise) >= step_progress(small, noise)
    assert 0 < efficiency(base + more, base, noise) <= 1 == efficiency(base, base, noise)


@given(base=batches, batch=batches, count=st.integers(1, 10**6), noise=noises)
def test_number_of_steps_follows_from_the_efficiency(base: int, batch: int, count: int, noise: float) -> None:
    """The samples are those of the base batch divided by the efficiency, rounded up to a step."""
    found = steps(count, base, batch, noise)
    exact = count * base / efficiency(batch, base, noise) / batch
    assert exact * (1 - 1e-6) - 1e-6 <= found <= max(1.0, exact * (1 + 1e-6) + 1)
    assert steps(count, base, base, noise) == count


@pytest.mark.parametrize(
    ("batch", "noise", "found"),
    [(128, 0.0, 1000), (32, 0.0, 1000), (128, 1e15, 500), (128, 64.0, 750), (640, 64.0, 550), (32, 64.0, 1500)],
)
def test_number_of_steps_is_between_its_limits(batch: int, noise: float, found: int) -> None:
    """1000 steps of 64 samples. Without noise the steps are equal, with pure noise the samples."""
    assert steps(1000, 64, batch, noise) == found


def test_partial_batches_count_with_their_size() -> None:
    """1000 steps of 64 are 40 epochs of 25 steps. With 1024, an epoch has a full step and one of 576 samples."""
    assert steps(1000, 64, 1024, 1e15, samples=1600) == 80
    assert step_progress(1024, 1000.0, samples=1600) == pytest.approx((1024 / 2024 + 576 / 1576) / 2)
    assert step_progress(64, 1000.0, samples=1600) == pytest.approx(64 / 1064)
    assert step_progress(100, 100.0, samples=50) == pytest.approx(50 / 150), "the batch is larger than the dataset"


RUN = NoiseOf("digits", 1000.0, 400)


def test_runs_are_averaged_geometrically_and_old_ones_fade() -> None:
    average = after(RUN, NoiseOf("digits", 4000.0, 100))
    assert average is not None
    assert (average.samples, average.steps, average.runs) == (pytest.approx(2000), 500, 2)
    for _ in range(30):
        average = after(average, NoiseOf("digits", 50.0, 400))
    assert average is not None and average.runs == MAX_RUNS
    assert average.samples == pytest.approx(50, rel=0.01)


@pytest.mark.parametrize("samples", [nan, inf, -1.0])
def test_invalid_noise_scale_is_ignored(samples: float) -> None:
    assert after(RUN, NoiseOf("digits", samples, 400)) == RUN
    assert after(None, NoiseOf("digits", samples, 400)) is None


def test_short_runs_are_ignored_and_another_dataset_replaces_the_average() -> None:
    assert after(None, NoiseOf("digits", 10.0, MIN_STEPS - 1)) is None
    other = NoiseOf("iris", 10.0, 400)
    assert after(RUN, other) == other
    assert after(None, NoiseOf("digits", 0.0, 400)) is not None, "a noise scale of zero is valid"


def test_device_with_most_runs_provides_the_noise_scale() -> None:
    most_runs = NoiseOf("digits", 9.0, 10, runs=3)
    assert (
        known({"cpu": RUN, "t4": most_runs, "a100": None, "v100": NoiseOf("iris", 1.0, 9, runs=5)}, "digits")
        == most_runs
    )
    assert known({"cpu": RUN}, "iris") is None
