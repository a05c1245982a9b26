"""Tests of curves of the step time over the batch: knots that differ only by rounding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.perf.fit.curve import Curve


def test_knots_that_differ_by_rounding_are_one() -> None:
    """Fixed bug: knots of two curves that were computed in different ways were equal once multiplied."""
    batch = 0.1 + 0.2
    found = Curve((0.0, 0.3, batch, 1.0), (1.0, 2.0, 2.0, 3.0), 1.0)
    assert (found.batches, found.times_s) == ((0.0, 0.3, 1.0), (1.0, 2.0, 3.0))
    assert Curve((8.0, 8.0), (1.0, 1.0), 1.0) == Curve((8.0,), (1.0,), 1.0)


def test_falling_batches_are_an_error() -> None:
    with pytest.raises(AssertionError, match="batches rise"):
        Curve((2.0, 1.0), (1.0, 2.0), 1.0)


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=9), st.integers(1, 4096), st.data())
def test_union_of_the_knots_of_two_curves_can_be_multiplied(
    batches: list[float], factor: int, data: st.DataObject
) -> None:
    near = [float(np.nextafter(batch, data.draw(st.sampled_from([0.0, np.inf])))) for batch in batches]
    union = tuple(sorted({*batches, *near}))
    found = Curve(union, tuple(union), 1.0)
    assert all(a * (1 + 1e-10) < b for a, b in zip(found.batches, found.batches[1:], strict=False))
    larger = Curve(tuple(factor * b for b in found.batches), found.times_s, 1.0)
    assert len(larger.batches) == len(found.batches)
    for batch in batches:
        assert found.seconds(batch) == pytest.approx(batch)
