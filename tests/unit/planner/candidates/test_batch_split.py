"""Tests of the split of a batch over devices: the exhaustive optimum in whole samples for any curves."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dljob.perf.fit.curve import Curve
from dljob.planner.candidates.batch_split import Kind, even_split, split


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    steps = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    times = [1.0 + sum(steps[: i + 1]) for i in range(len(steps))]  # whole numbers, so that ties occur
    batches = sorted(draw(st.sets(st.integers(0, 12), min_size=len(times), max_size=len(times))))
    curve = Curve(tuple(map(float, batches)), tuple(times), float(draw(st.integers(1, 4))))
    return Kind(curve, draw(st.integers(1, 2)), draw(st.integers(1, 14)))


def slowest(parts: Sequence[Kind], shares: list[list[int]]) -> float:
    return max(k.curve.seconds(b) for k, part in zip(parts, shares, strict=True) for b in part)


class TestSplit:
    @settings(max_examples=300)
    @given(st.lists(kinds(), min_size=1, max_size=3), st.integers(1, 16))
    def test_split_is_the_exhaustive_optimum(self, parts: list[Kind], batch: int) -> None:
        limits = [k.largest_batch for k in parts for _ in range(k.ranks)]
        assume(len(limits) <= 4)
        all_splits = [
            pick
            for pick in product(*(range(1, min(m, batch) + 1) for m in limits[:-1]))
            if 1 <= batch - sum(pick) <= limits[-1]
        ]
        found = split(parts, batch)
        if not all_splits:
            assert found is None
            return
        assert found is not None
        curves = [k.curve for k in parts for _ in range(k.ranks)]
        best = min(
            max(c.seconds(b) for c, b in zip(curves, (*pick, batch - sum(pick)), strict=True)) for pick in all_splits
        )
        assert slowest(parts, found) == best

    @given(st.lists(kinds(), min_size=1, max_size=5), st.integers(1, 200))
    def test_split_adds_up_to_the_batch_within_limits(self, parts: list[Kind], batch: int) -> None:
        for found in (split(parts, batch), even_split(parts, batch)):
            if found is not None:
                assert sum(map(sum, found)) == batch
                for kind, part in zip(parts, found, strict=True):
                    assert len(part) == kind.ranks
                    assert all(1 <= b <= kind.largest_batch for b in part)

    @given(st.lists(kinds(), min_size=1, max_size=5), st.integers(1, 200))
    def test_uneven_split_is_never_slower_than_even(self, parts: list[Kind], batch: int) -> None:
        even, uneven = even_split(parts, batch), split(parts, batch)
        if even is not None:
            assert uneven is not None
            assert slowest(parts, uneven) <= slowest(parts, even)

    @given(st.lists(kinds(), min_size=1, max_size=4), st.integers(1, 60), st.sampled_from([0.25, 2.0, 8.0]))
    def test_split_does_not_depend_on_the_unit_of_time(self, parts: list[Kind], batch: int, factor: float) -> None:
        scaled = [replace(k, curve=k.curve.scaled(factor)) for k in parts]
        assert split(scaled, batch) == split(parts, batch)

    def test_shares_follow_speed(self) -> None:
        def kind(per_sample_s: float) -> Kind:
            return Kind(Curve((0.0,), (1e-9,), per_sample_s), 1, 10**6)

        assert split([kind(1.0), kind(2.0), kind(4.0)], 700) == [[400], [200], [100]]

    def test_shares_of_host_bound_devices_follow_their_capacity(self) -> None:
        def host_bound(reach: float) -> Kind:
            return Kind(Curve((0.0, reach), (1.0, 1.0), 1.0), 1, 10**6)

        found = split([host_bound(600.0), host_bound(200.0)], 400)
        assert found is not None
        assert found[0][0] == pytest.approx(300, abs=2)

    def test_large_batch_is_split(self) -> None:
        kind = Kind(Curve((0.0,), (1e-3,), 1e-6), 1000, 2**31)
        found = split([kind, kind], 2**31 - 1)
        assert found is not None
        assert sum(map(sum, found)) == 2**31 - 1
