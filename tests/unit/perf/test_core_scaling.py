"""Laws of the speed of a CPU rank over its cores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import catalogue
from dljob.perf.step.compute import catalogue_curve, update_s
from dljob.perf.step.core_scaling import CoreUse
from dljob.perf.workload.workload import builtin, reference

cores = st.floats(1, 128)
ranks = st.integers(1, 64)


@given(cores, ranks)
def test_one_core_has_speed_one_and_more_are_never_faster_than_their_number(c: float, r: int) -> None:
    assert CoreUse(1.0).arithmetic == CoreUse(1.0).traffic == 1.0 and CoreUse(1.0).fork_s == 0.0
    use = CoreUse(c, r, max(2.0, c * r))
    assert 1 <= use.arithmetic <= c and 0 < use.traffic <= c


@given(cores, cores)
def test_arithmetic_gets_faster_with_each_core_but_each_adds_less(a: float, b: float) -> None:
    less, more = sorted((a, b))
    assert CoreUse(less).arithmetic <= CoreUse(more).arithmetic
    assert CoreUse(less).arithmetic / less >= CoreUse(more).arithmetic / more - 1e-12


@given(st.floats(0.05, 1))
def test_a_part_of_a_core_is_slower_by_this_part(part: float) -> None:
    assert CoreUse(part).arithmetic == CoreUse(part).traffic == part
    assert CoreUse(part).fork_s == 0.0


@given(st.sampled_from([4, 16, 64]), st.integers(0, 6))
def test_ranks_of_a_full_node_share_half_of_its_cores_worth_of_memory(node: int, log2_ranks: int) -> None:
    r = min(node, 2**log2_ranks)
    use = CoreUse(node / r, r, node)
    assert r * use.traffic == pytest.approx(max(2, node / 2))


@pytest.mark.parametrize("name", ["ResNet-152", "BERT-base"])
def test_large_models_are_faster_with_each_doubling_of_cores(name: str) -> None:
    w = reference(name)
    times = [
        catalogue_curve(w, catalogue.cpu("cpu", c), use=CoreUse(c, 1, 64.0)).seconds(16) for c in (1.0, 2.0, 8.0, 32.0)
    ]
    assert times == sorted(times, reverse=True)
    assert 8 < times[0] / times[-1] < 32


def test_neighbours_slow_a_rank_down() -> None:
    w, device = builtin("resnet50", None), catalogue.cpu("cpu", 1.0)
    alone, crowded = (catalogue_curve(w, device, use=CoreUse(1.0, r, 16.0)).seconds(8) for r in (1, 16))
    assert alone < crowded < 2 * alone
    assert update_s(w, device, CoreUse(1.0, 16, 16.0)) == pytest.approx(2 * update_s(w, device, CoreUse(1.0, 1, 16.0)))
