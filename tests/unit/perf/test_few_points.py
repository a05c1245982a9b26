"""A curve from few measured batches: between overhead and chords, never falling, and through what was measured."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.perf.fit.few_points import knots_through, line, seconds_between, through

batches = st.lists(st.integers(1, 4096), min_size=3, max_size=6, unique=True).map(sorted)
times = st.floats(1e-3, 10.0)


@st.composite
def measured(draw: st.DrawFn) -> list[tuple[float, float]]:
    """Points of a device with overhead a and c a sample, each off by at most a tenth."""
    a, c = draw(st.floats(1e-3, 1.0)), draw(st.floats(1e-5, 1e-1))
    return [(float(b), (a + c * b) * draw(st.floats(0.9, 1.1))) for b in draw(batches)]


@given(st.lists(st.tuples(st.integers(1, 500), times), min_size=1, max_size=7))
def test_any_points_give_a_curve_that_never_falls(points: list[tuple[int, float]]) -> None:
    curve = through([(float(b), t) for b, t in points])
    at = curve.seconds_array(np.linspace(0, 2000, 300))
    assert np.all(np.diff(at) >= 0)
    assert at[0] > 0


@given(measured())
def test_is_near_what_was_measured(points: list[tuple[float, float]]) -> None:
    curve = through(points)
    for batch, seconds in points:
        assert curve.seconds(batch) == pytest.approx(seconds, rel=0.25)


@given(batches, st.floats(0, 1.0), st.floats(1e-5, 1e-1))
def test_a_line_is_found_again(xs: list[int], a: float, c: float) -> None:
    points = [(float(b), a + c * b) for b in xs]
    asked = np.linspace(xs[0], xs[-1], 20)
    assert seconds_between(points, asked) == pytest.approx(a + c * asked, rel=1e-3)
    assert line(*map(np.array, zip(*points, strict=True))) == pytest.approx((a, c), rel=1e-3, abs=1e-6)


@given(measured())
def test_lies_under_the_chords(points: list[tuple[float, float]]) -> None:
    rising = list(zip([b for b, _ in points], np.maximum.accumulate([t for _, t in points]).tolist(), strict=True))
    asked = np.linspace(points[0][0], points[-1][0], 20)
    chords = np.interp(asked, *zip(*rising, strict=True))
    assert np.all(seconds_between(rising, asked) <= chords * (1 + 1e-9))


@given(measured(), st.floats(0.01, 100.0))
def test_does_not_depend_on_the_unit_of_time(points: list[tuple[float, float]], factor: float) -> None:
    asked = np.linspace(points[0][0], points[-1][0], 7)
    scaled = through([(b, factor * t) for b, t in points]).seconds_array(asked)
    assert scaled == pytest.approx(factor * through(points).seconds_array(asked), rel=1e-6)


def test_a_device_that_fills_up_is_better_told_than_by_chords() -> None:
    """The p-norm of overhead and work, as of a device whose utilisation grows with the batch."""
    asked = np.geomspace(8, 512, 30)
    true = np.sqrt(0.05**2 + (0.001 * asked) ** 2)
    given = [(b, float(np.hypot(0.05, 0.001 * b))) for b in (8.0, 64.0, 512.0)]
    error, chords = (
        float(np.mean(np.abs(found / true - 1)))
        for found in (through(given).seconds_array(asked), np.interp(asked, *zip(*given, strict=True)))
    )
    assert error < 0.6 * chords


@given(st.dictionaries(st.integers(1, 200), times, min_size=1, max_size=12))
def test_knots_go_through_points_that_never_fall(points: dict[int, float]) -> None:
    xs, ts = sorted(points), sorted(points.values())
    knots = knots_through(xs, ts)
    assert set(zip(map(float, xs), ts, strict=True)) <= set(knots)
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(knots))


@pytest.mark.parametrize("factor", [1e-3, 1e3])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_absurd_point_of_three_is_left_out(which: int, factor: float) -> None:
    points = [(b, 0.02 + 0.001 * b) for b in (8.0, 64.0, 512.0)]
    bad = [(b, t * (factor if i == which else 1.0)) for i, (b, t) in enumerate(points)]
    asked = np.array([8.0, 30.0, 64.0, 200.0, 512.0])
    assert through(bad).seconds_array(asked) == pytest.approx(through(points).seconds_array(asked), rel=0.7)


@pytest.mark.parametrize(
    "batch, seconds", [(0.0, 1.0), (8.0, 0.0), (8.0, float("nan")), (8.0, -1.0), (float("inf"), 1.0)]
)
def test_what_cannot_be_a_measurement_is_named(batch: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="expected a finite batch and time above 0"):
        through([(4.0, 1.0), (batch, seconds)])


def test_no_points_are_named() -> None:
    with pytest.raises(ValueError, match="at least one"):
        through([])
