"""Tests of all-reduce curves from two message sizes."""

import numpy as np
import pytest
from benchmarks.perfmodel.models.pipelined import AllReduce, between, from_two_sizes
from hypothesis import given
from hypothesis import strategies as st

ranks = st.integers(2, 64)
curves = st.builds(AllReduce, ranks, st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-8))


@given(curves, st.floats(1e3, 1e8), st.floats(2.0, 1e3))
def test_two_sizes_recover_the_curve(curve: AllReduce, small: float, ratio: float) -> None:
    sizes = np.array([small, ratio * small])
    t0, t1 = curve.seconds(sizes).tolist()
    found = from_two_sizes(curve.ranks, (sizes[0], t0), (sizes[1], t1))
    assert found.seconds(sizes) == pytest.approx([t0, t1], rel=1e-6)
    # Rounding hides the fixed part if the bytes take a million times as long.
    if curve.fixed_s > 1e-4 * t0 and curve.per_byte_s * sizes[1] > 1e-4 * t1:
        sizes_between = np.geomspace(small / 2, 2 * sizes[1], 9)
        assert found.seconds(sizes_between) == pytest.approx(curve.seconds(sizes_between), rel=1e-3)


@given(ranks, st.floats(1e3, 1e8), st.floats(1.01, 1e3), st.floats(1e-6, 1.0), st.floats(1e-6, 1.0))
def test_curve_is_positive_and_nondecreasing_for_any_two_measurements(
    n: int, v: float, k: float, t0: float, t1: float
) -> None:
    found = from_two_sizes(n, (v, t0), (k * v, t1))
    at = found.seconds(np.geomspace(v / 10, 10 * k * v, 20))
    assert np.all(at > 0)
    assert np.all(np.diff(at) >= 0)


@given(curves, st.floats(1e-12, 1e-8), st.floats(1e-6, 1e-2), st.integers(2, 200))
def test_interpolation_is_exact_at_both_ends(few: AllReduce, per_byte_s: float, fixed_s: float, n: int) -> None:
    many = AllReduce(few.ranks + 6, fixed_s, per_byte_s)
    for known in (few, many):
        found = between(few, many, known.ranks)
        if known.bus_s > 0.1 * min(few.bus_s, many.bus_s):
            assert found.per_byte_s == pytest.approx(known.per_byte_s)
        assert found.fixed_s == pytest.approx(known.fixed_s, abs=1e-9)
    assert between(few, many, n).per_byte_s > 0


@given(st.floats(1e-12, 1e-9), st.integers(3, 7))
def test_ideal_ring_is_recovered_from_two_counts(bus_s: float, n: int) -> None:
    two, eight = (AllReduce(k, 1e-5, bus_s * 2 * (k - 1) / k) for k in (2, 8))
    assert between(two, eight, n).per_byte_s == pytest.approx(bus_s * 2 * (n - 1) / n)


@pytest.mark.parametrize(
    "n, small, large",
    [
        (1, (1e6, 1e-3), (1e7, 1e-2)),
        (4, (1e7, 1e-3), (1e6, 1e-2)),
        (4, (1e6, 0.0), (1e7, 1.0)),
        (4, (1e6, 1.0), (1e7, np.nan)),
    ],
)
def test_invalid_input_is_rejected(n: int, small: tuple[float, float], large: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        from_two_sizes(n, small, large)


def test_counts_in_wrong_order_are_rejected() -> None:
    curve = AllReduce(8, 1e-5, 1e-10)
    with pytest.raises(ValueError, match="two rising counts"):
        between(curve, AllReduce(2, 1e-5, 1e-10), 4)
