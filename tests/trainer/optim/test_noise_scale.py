"""Tests of the estimate of the gradient noise scale of a run."""

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.calibrate.noise import MIN_STEPS as CALIBRATION_MIN_STEPS
from dltrain.optim.noise_scale import MAX_STRIDE, MIN_MEASUREMENTS, MIN_STEPS, NoiseScale, stride
from support.trainer.ranks import BODIES, run_ranks


def observed(batch: int, signals: list[float], noise: float = 100.0, ranks: int = 2) -> NoiseScale:
    """Return an estimate from gradients whose squared norms equal their expectations."""
    made = NoiseScale(batch)
    for signal in signals:
        made.observe(signal + noise * ranks / batch, signal + noise / batch, ranks)
    return made


@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("noise_scale", [0.5, 100.0, 1e5])
def test_constant_noise_scale_is_estimated(noise_scale: float, ranks: int) -> None:
    assert observed(64, [100.0 / noise_scale] * 50, ranks=ranks).samples == pytest.approx(noise_scale)


def test_mean_of_growing_noise_scale_predicts_steps_at_another_batch_size() -> None:
    """The training has sixteen phases with noise scales φ from 10 to 10⁴. With batch size B, a step makes B / (φ + B)
    of a phase's progress. A run at 256 changes phases at other steps than a run at 64, but the mean is the same."""
    scales = np.geomspace(10, 1e4, 16)
    progress_steps = {b: 32 * (scales / b + 1) / (scales / 64 + 1) for b in (64, 256)}
    total = {b: float(sum(steps)) for b, steps in progress_steps.items()}
    found = observed(64, [100.0 / s for s in scales for _ in range(32)]).samples
    assert found is not None
    assert total[256] / total[64] == pytest.approx((found / 256 + 1) / (found / 64 + 1), rel=1e-9)
    assert found < np.median(scales), "the noise of the last steps does not represent the whole training"


@given(st.lists(st.floats(1e-6, 1e6), min_size=MIN_STEPS, max_size=3 * MIN_STEPS))
def test_resumed_run_has_the_same_estimate(signals: list[float]) -> None:
    whole, half = observed(32, signals), observed(32, signals[: len(signals) // 2])
    resumed = NoiseScale(32)
    resumed.load(half.state())
    for signal in signals[len(signals) // 2 :]:
        resumed.observe(signal + 200 / 32, signal + 100 / 32, 2)
    assert (resumed.samples, resumed.steps) == (whole.samples, whole.steps)
    assert whole.samples is None or 0 <= whole.samples < inf


def test_gradient_below_the_noise_gives_a_lower_bound() -> None:
    """The estimate of the squared true gradient is a difference, which is negative as often as positive."""
    draw, made = np.random.default_rng(1), NoiseScale(64)
    for _ in range(1000):
        square = 100 / 64 * draw.chisquare(20) / 20
        made.observe(square + 100 / 64, square, 2)
    assert made.samples is not None and made.samples > 1000


def test_noise_scale_is_unknown_without_usable_measurements() -> None:
    made = observed(64, [1.0] * (MIN_STEPS - 1))
    assert made.samples is None and made.steps == MIN_STEPS - 1
    for within, together, ranks in ((nan, 1.0, 2), (1.0, inf, 2), (2.0, 1.0, 1)):
        made.observe(within, together, ranks)
    assert made.steps == MIN_STEPS - 1, "gradients of one rank and those that are not finite are ignored"
    nothing = NoiseScale(8)
    for _ in range(50):
        nothing.observe(0.0, 0.0, 2)
    assert nothing.samples is None, "the gradient is zero"
    assert observed(2**31 - 1, [1e-20] * 50, noise=1e9).samples is None, "larger than the limit of a report"
    wild = NoiseScale(8)
    for square in (1e-3, 1.0) * MIN_STEPS:
        wild.observe(square + 1.0, square, 2)
    assert wild.samples is None, "the relative error of the signal is larger than 1"


@given(st.integers(MIN_MEASUREMENTS, 10**6))
def test_all_but_short_trainings_measure_enough_steps_for_a_profile(steps: int) -> None:
    assert len(range(0, steps, stride(steps))) >= CALIBRATION_MIN_STEPS
    assert stride(steps) <= MAX_STRIDE and stride(1) == 1


def test_ranks_measure_the_known_noise_scale_of_a_problem() -> None:
    """Local batch sizes differ; ranks measure every step or every tenth, within the statistical error."""
    assert "noise scale" in run_ranks(3, BODIES / "training/noise_scale.py", "3").output
