"""Tests of the ratios of measured step times of one device to its nondecreasing curve."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.perf.fit.curve import Curve
from dljob.perf.fit.measured_ratio import ON_CURVE, measured_ratio
from dljob.perf.step.compute import calibrated

CATALOGUE = Curve((0.0, 1.0), (0.01, 0.02), 0.01)
measured = st.lists(
    st.tuples(st.integers(1, 512), st.floats(1e-3, 10.0)), min_size=1, max_size=8, unique_by=lambda point: point[0]
)


@given(measured)
def test_curve_times_ratio_is_the_measured_time(points: list[tuple[int, float]]) -> None:
    curve = calibrated(CATALOGUE, points)
    ratio = measured_ratio(curve, points)
    for batch, seconds in points:
        assert curve.seconds(batch) * ratio.at(batch) == pytest.approx(seconds)


@given(measured, st.floats(0.5, 1024.0))
def test_ratio_between_measured_batches_is_between_theirs(points: list[tuple[int, float]], batch: float) -> None:
    ratio = measured_ratio(calibrated(CATALOGUE, points), points)
    near = [
        next((b for b in sorted((b for b, _ in points), reverse=True) if b <= batch), min(b for b, _ in points)),
        next((b for b in sorted(b for b, _ in points) if b >= batch), max(b for b, _ in points)),
    ]
    least, most = sorted(ratio.at(b) for b in near)
    assert least * (1 - 1e-9) <= ratio.at(batch) <= most * (1 + 1e-9)


@given(measured)
def test_rising_times_are_on_the_curve(points: list[tuple[int, float]]) -> None:
    rising = list(zip(sorted(b for b, _ in points), sorted(s for _, s in points), strict=True))
    assert measured_ratio(calibrated(CATALOGUE, rising), rising) == ON_CURVE


def test_ratio_without_measurements_is_one() -> None:
    assert ON_CURVE.at_all(np.array([1.0, 64.0])).tolist() == [1.0, 1.0]
    assert measured_ratio(CATALOGUE, []) == ON_CURVE


def test_slow_batch_has_a_ratio_above_one() -> None:
    points = [(8, 0.1), (16, 0.204), (32, 0.127), (64, 0.3)]
    ratio = measured_ratio(calibrated(CATALOGUE, points), points)
    assert ratio.at(16) > 1.2 and ratio.at(32) < 0.8
    assert ratio.at(8) == ratio.at(64) == pytest.approx(1.0)
