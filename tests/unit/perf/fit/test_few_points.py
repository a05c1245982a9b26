"""Tests of compute-time curves from few measured batch sizes: monotonic, close to the points, below their chords."""

from itertools import pairwise

import numpy as np
import pytest
from benchmarks.perfmodel.models.few_points import through
from hypothesis import example, given
from hypothesis import strategies as st

from dljob.perf.fit.few_points import knots_through, line, seconds_between

batches = st.lists(st.integers(1, 4096), min_size=3, max_size=6, unique=True).map(sorted)
times = st.floats(1e-3, 10.0)


@st.composite
def measured(draw: st.DrawFn) -> list[tuple[float, float]]:
    """Return points of a device with overhead a and c per sample, each with an error of at most 10 %."""
    a, c = draw(st.floats(1e-3, 1.0)), draw(st.floats(1e-5, 1e-1))
    return [(float(b), (a + c * b) * draw(st.floats(0.9, 1.1))) for b in draw(batches)]


@given(st.lists(st.tuples(st.integers(1, 500), times), min_size=1, max_size=7))
def test_curve_is_nondecreasing_for_any_points(points: list[tuple[int, float]]) -> None:
    curve = through([(float(b), t) for b, t in points])
    at = curve.seconds_array(np.linspace(0, 2000, 300))
    assert np.all(np.diff(at) >= 0)
    assert at[0] > 0


@given(measured())
@example([(1.0, 1.001953125), (49.0, 0.9887008666992188), (66.0, 1.2347412109375)])
def test_curve_is_close_to_the_points(points: list[tuple[float, float]]) -> None:
    curve = through(points)
    for batch, seconds in points:
        assert curve.seconds(batch) == pytest.approx(seconds, rel=0.25)


@given(batches, st.floats(0, 1.0), st.floats(1e-5, 1e-1))
def test_curve_recovers_a_line(xs: list[int], a: float, c: float) -> None:
    points = [(float(b), a + c * b) for b in xs]
    batches_at = np.linspace(xs[0], xs[-1], 20)
    assert seconds_between(points, batches_at) == pytest.approx(a + c * batches_at, rel=1e-3)
    assert line(*map(np.array, zip(*points, strict=True))) == pytest.approx((a, c), rel=1e-3, abs=1e-6)


@given(measured())
def test_curve_lies_below_the_chords(points: list[tuple[float, float]]) -> None:
    rising = list(zip([b for b, _ in points], np.maximum.accumulate([t for _, t in points]).tolist(), strict=True))
    batches_at = np.linspace(points[0][0], points[-1][0], 20)
    chords = np.interp(batches_at, *zip(*rising, strict=True))
    assert np.all(seconds_between(rising, batches_at) <= chords * (1 + 1e-9))


@given(measured(), st.floats(0.01, 100.0))
def test_curve_scales_with_the_unit_of_time(points: list[tuple[float, float]], factor: float) -> None:
    batches_at = np.linspace(points[0][0], points[-1][0], 7)
    scaled = through([(b, factor * t) for b, t in points]).seconds_array(batches_at)
    assert scaled == pytest.approx(factor * through(points).seconds_array(batches_at), rel=1e-6)


def test_curve_fits_growing_utilization_better_than_chords() -> None:
    """The time is the p-norm of overhead and work, as on a device whose utilization grows with the batch."""
    batches_at = np.geomspace(8, 512, 30)
    true = np.sqrt(0.05**2 + (0.001 * batches_at) ** 2)
    given = [(b, float(np.hypot(0.05, 0.001 * b))) for b in (8.0, 64.0, 512.0)]
    error, chords = (
        float(np.mean(np.abs(found / true - 1)))
        for found in (through(given).seconds_array(batches_at), np.interp(batches_at, *zip(*given, strict=True)))
    )
    assert error < 0.6 * chords


@given(st.dictionaries(st.integers(1, 200), times, min_size=1, max_size=12))
def test_knots_include_all_nondecreasing_points(points: dict[int, float]) -> None:
    xs, ts = sorted(points), sorted(points.values())
    knots = knots_through(xs, ts)
    assert set(zip(map(float, xs), ts, strict=True)) <= set(knots)
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(knots))


@pytest.mark.parametrize("factor", [1e-3, 1e3])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_outlier_of_three_points_has_little_effect(which: int, factor: float) -> None:
    points = [(b, 0.02 + 0.001 * b) for b in (8.0, 64.0, 512.0)]
    bad = [(b, t * (factor if i == which else 1.0)) for i, (b, t) in enumerate(points)]
    batches_at = np.array([8.0, 30.0, 64.0, 200.0, 512.0])
    assert through(bad).seconds_array(batches_at) == pytest.approx(through(points).seconds_array(batches_at), rel=0.7)


@pytest.mark.parametrize(
    "batch, seconds", [(0.0, 1.0), (8.0, 0.0), (8.0, float("nan")), (8.0, -1.0), (float("inf"), 1.0)]
)
def test_invalid_measurement_is_rejected(batch: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="expected a finite batch and time above 0"):
        through([(4.0, 1.0), (batch, seconds)])


def test_empty_list_of_points_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one"):
        through([])
