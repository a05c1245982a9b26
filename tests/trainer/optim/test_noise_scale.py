"""The gradient noise scale of a run."""

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.calibrate.noise import MIN_STEPS as CALIBRATION_MIN_STEPS
from dltrain.optim.noise_scale import MAX_STRIDE, MIN_MEASUREMENTS, MIN_STEPS, NoiseScale, stride
from support.trainer.ranks import BODIES, run_ranks


def told(batch: int, signals: list[float], noise: float = 100.0, ranks: int = 2) -> NoiseScale:
    """A run in which gradients are as large as is expected of them."""
    made = NoiseScale(batch)
    for signal in signals:
        made.observe(signal + noise * ranks / batch, signal + noise / batch, ranks)
    return made


@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("noise_scale", [0.5, 100.0, 1e5])
def test_constant_noise(noise_scale: float, ranks: int) -> None:
    assert told(64, [100.0 / noise_scale] * 50, ranks=ranks).samples == pytest.approx(noise_scale)


def test_a_noise_scale_that_grows_says_how_many_steps_another_batch_takes() -> None:
    """Sixteen stretches of a training, with noise scales from 10 to 10⁴. A batch B makes B / (φ + B) of a stretch's
    progress a step; so the run at 256 has the stretches at other steps than that at 64, and yet the same mean."""
    scales = np.geomspace(10, 1e4, 16)
    progress_steps = {b: 32 * (scales / b + 1) / (scales / 64 + 1) for b in (64, 256)}
    total = {b: float(sum(steps)) for b, steps in progress_steps.items()}
    found = told(64, [100.0 / s for s in scales for _ in range(32)]).samples
    assert found is not None
    assert total[256] / total[64] == pytest.approx((found / 256 + 1) / (found / 64 + 1), rel=1e-9)
    assert found < np.median(scales), "the last steps' noise is not the training's"


@given(st.lists(st.floats(1e-6, 1e6), min_size=MIN_STEPS, max_size=3 * MIN_STEPS))
def test_a_run_that_goes_on_from_a_checkpoint_tells_the_same(signals: list[float]) -> None:
    whole, half = told(32, signals), told(32, signals[: len(signals) // 2])
    resumed = NoiseScale(32)
    resumed.load(half.state())
    for signal in signals[len(signals) // 2 :]:
        resumed.observe(signal + 200 / 32, signal + 100 / 32, 2)
    assert (resumed.samples, resumed.steps) == (whole.samples, whole.steps)
    assert whole.samples is None or 0 <= whole.samples < inf


def test_a_gradient_lost_in_noise_is_told_as_what_it_is_at_least() -> None:
    """The square of the true gradient is a difference, and below zero as often as above."""
    draw, made = np.random.default_rng(1), NoiseScale(64)
    for _ in range(1000):
        square = 100 / 64 * draw.chisquare(20) / 20
        made.observe(square + 100 / 64, square, 2)
    assert made.samples is not None and made.samples > 1000


def test_what_tells_nothing() -> None:
    made = told(64, [1.0] * (MIN_STEPS - 1))
    assert made.samples is None and made.steps == MIN_STEPS - 1
    for within, together, ranks in ((nan, 1.0, 2), (1.0, inf, 2), (2.0, 1.0, 1)):
        made.observe(within, together, ranks)
    assert made.steps == MIN_STEPS - 1, "nor do gradients of one rank, or those that are not finite"
    nothing = NoiseScale(8)
    for _ in range(50):
        nothing.observe(0.0, 0.0, 2)
    assert nothing.samples is None, "a gradient of zeros"
    assert told(2**31 - 1, [1e-20] * 50, noise=1e9).samples is None, "more than a report may say"
    wild = NoiseScale(8)
    for square in (1e-3, 1.0) * MIN_STEPS:
        wild.observe(square + 1.0, square, 2)
    assert wild.samples is None, "a share of the signal that is off by more than 1"


@given(st.integers(MIN_MEASUREMENTS, 10**6))
def test_every_training_but_the_shortest_measures_as_much_as_a_profile_asks_for(steps: int) -> None:
    assert len(range(0, steps, stride(steps))) >= CALIBRATION_MIN_STEPS
    assert stride(steps) <= MAX_STRIDE and stride(1) == 1


def test_ranks_measure_the_noise_of_a_problem_whose_noise_is_known() -> None:
    """With unlike shares, every step and every tenth; within its statistical error."""
    assert "noise scale" in run_ranks(3, BODIES / "noise_scale.py", "3").output
