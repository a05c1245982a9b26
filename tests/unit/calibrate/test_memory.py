"""Tests of the measured memory of scripts: what is stored after a run, and what the next pods need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.api.profiles.script import MAX_MEMORY
from dljob.calibrate.memory import (
    MAX_POINTS,
    ROOM_NBYTES,
    MemoryPoint,
    Split,
    amounts_nbytes,
    complete_run_nbytes,
    remembered,
)
from dljob.perf.resources.memory import AGENT_NBYTES

GIB = 2**30
PROCESS = GIB // 4


def after(*runs: MemoryPoint) -> MemoryPoint:
    points: tuple[MemoryPoint, ...] = ()
    for run in runs:
        points = remembered(points, run)
    [found] = points
    return found


def amounts(points: list[MemoryPoint], ranks: int, batch: int | None, strategy: str = "Data") -> tuple[int, ...]:
    return amounts_nbytes(points, ranks, batch, strategy, PROCESS)


def test_a_pod_needs_the_peak_with_a_margin() -> None:
    assert MemoryPoint(1, peak_nbytes=2 * GIB).needed_nbytes == int(1.15 * 2 * GIB) + ROOM_NBYTES
    assert MemoryPoint(1).needed_nbytes == 0


def test_without_its_margin_a_pod_needs_no_more_than_what_was_enough() -> None:
    """Regression: the margin was lost whenever a run had been complete with less."""
    tight = MemoryPoint(1, 32, "Data", peak_nbytes=2 * GIB, sufficient_nbytes=int(2.1 * GIB))
    assert tight.needed_nbytes == int(1.15 * 2 * GIB) + ROOM_NBYTES
    assert tight.without_margin.needed_nbytes == int(2.1 * GIB) and tight.without_margin.place == tight.place
    for other in (
        MemoryPoint(1, peak_nbytes=2 * GIB),
        MemoryPoint(1, peak_nbytes=100, sufficient_nbytes=16 * GIB),
        MemoryPoint(1, sufficient_nbytes=2728),
        MemoryPoint(1, peak_nbytes=GIB, insufficient_nbytes=GIB),
    ):
        assert other.without_margin == other
    assert MemoryPoint(1, peak_nbytes=100, sufficient_nbytes=16 * GIB).needed_nbytes < GIB


def test_what_was_enough_counts_if_no_peak_was_measured() -> None:
    assert MemoryPoint(1, sufficient_nbytes=2728).needed_nbytes == 2728, "an older agent measured no peak"
    assert MemoryPoint(1, peak_nbytes=2728, sufficient_nbytes=2728).needed_nbytes == 2728, "the agent missed the peak"


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        ([(500, None, None)], (500, None, None)),
        ([(500, None, None), (700, None, None)], (700, None, None)),
        ([(700, None, None), (500, None, None)], (700, None, None)),
        ([(700, 800, None), (500, 800, None)], (630, 800, None)),
        ([(700, 800, None), (690, 800, None)], (690, 800, None)),
        ([(700, 800, None), (900, 1000, None)], (900, 1000, None)),
        ([(700, 800, None), (700, 1600, None)], (700, 800, None)),
        ([(600, None, 682)], (600, None, 682)),
        ([(600, None, 682), (600, None, 500)], (600, None, 682)),
        ([(600, None, 682), (1000, 1364, None)], (1000, 1364, None)),
        ([(700, 800, None), (900, None, 1000)], (900, None, 1000)),
        ([(900, None, 1000), (500, 600, None)], (810, None, None)),
        ([(None, 800, None), (None, None, 600)], (None, 800, 600)),
    ],
)
def test_next_run_is_remembered(
    runs: list[tuple[int | None, ...]], found: tuple[int | None, int | None, int | None]
) -> None:
    last = after(*(MemoryPoint(1, 32, "Data", *run) for run in runs))
    assert (last.peak_nbytes, last.sufficient_nbytes, last.insufficient_nbytes) == found


def test_few_points_are_stored_and_the_most_recent_ones() -> None:
    points: tuple[MemoryPoint, ...] = ()
    for batch in range(1, 20):
        points = remembered(points, MemoryPoint(1, batch, peak_nbytes=100))
        points = remembered(points, MemoryPoint(1, 1, peak_nbytes=100))
    assert len(points) == MAX_POINTS and points[-1].batch == 1 and points[0].batch == 13


def test_smaller_runs_need_no_more_than_a_larger_one() -> None:
    point = MemoryPoint(2, 64, peak_nbytes=2 * GIB)
    for ranks, batch in ((2, 64), (1, 64), (2, 32), (1, None)):
        assert amounts([point], ranks, batch)[0] == point.needed_nbytes
    closer = MemoryPoint(1, 32, peak_nbytes=GIB)
    assert amounts([point, closer], 1, 16)[0] == closer.needed_nbytes
    assert amounts([point, closer], 2, 48)[0] == point.needed_nbytes


def test_smaller_runs_get_less_than_a_larger_one_if_no_node_has_as_much() -> None:
    """Regression: jobs with a small batch waited for ever for the memory that a large batch had needed."""
    point = MemoryPoint(2, 64, peak_nbytes=2 * GIB)
    need = point.needed_nbytes
    assert amounts([point], 2, 64) == (need,), "as in the measured run"
    assert amounts([point], 1, 64) == (need, need // 2)
    assert amounts([point], 2, 16) == (need, 2 * PROCESS + (need - 2 * PROCESS) // 4)
    smaller = MemoryPoint(1, 8, peak_nbytes=int(1.5 * GIB))
    assert amounts([point, smaller], 2, 16) == (need, smaller.needed_nbytes), "but not less than a smaller one"


def test_own_measurement_counts_more_than_that_of_a_larger_run() -> None:
    own, larger = MemoryPoint(1, 32, peak_nbytes=3 * GIB), MemoryPoint(2, 64, peak_nbytes=2 * GIB)
    assert amounts([own, larger], 1, 32) == (own.needed_nbytes,)


def test_more_ranks_need_more_and_larger_batches_are_tried_with_more() -> None:
    point = MemoryPoint(2, 32, peak_nbytes=2 * GIB)
    need = point.needed_nbytes
    assert amounts([point], 4, 32) == (2 * need, need)
    assert amounts([point], 2, 64) == (2 * PROCESS + 2 * (need - 2 * PROCESS), need), "but not less than measured"
    assert amounts([point], 4, 64) == (2 * (2 * PROCESS + 2 * (need - 2 * PROCESS)), 2 * need, need)
    assert amounts([MemoryPoint(2, None, peak_nbytes=2 * GIB)], 2, 64) == (need,), "the script decides its batch"


def test_measurements_of_another_strategy_do_not_count() -> None:
    assert amounts([MemoryPoint(1, 32, "Sharded", peak_nbytes=GIB)], 1, 32) == ()
    assert amounts([MemoryPoint(1, 32, "Sharded", peak_nbytes=GIB)], 1, 32, "Sharded")
    assert amounts([], 1, 32) == ()


def test_after_too_little_memory_there_is_more() -> None:
    failed = MemoryPoint(1, 32, peak_nbytes=GIB, insufficient_nbytes=2 * GIB)
    assert amounts([failed], 1, 32) == (4 * GIB, 3 * GIB, 5 * GIB // 2)
    assert amounts([failed], 2, 64)[-1] > 2 * GIB, "more ranks and samples do not need less"
    assert amounts([failed], 1, 16)[0] == failed.needed_nbytes, "a smaller batch may need less"


def test_too_little_memory_of_another_run_does_not_lower_what_more_ranks_need() -> None:
    """Regression: a failure with a smaller batch, long ago, replaced what follows from the measured peak."""
    failed, measured = MemoryPoint(1, 8, insufficient_nbytes=GIB), MemoryPoint(1, 16, peak_nbytes=3 * GIB)
    assert amounts([failed, measured], 4, 16) == amounts([measured], 4, 16)


def test_more_ranks_begin_with_more_than_what_was_too_little_for_as_many() -> None:
    """Regression: four ranks began with what had been too little for two, for each of them."""
    failed = MemoryPoint(2, 32, insufficient_nbytes=2 * GIB)
    assert amounts([failed], 4, 32) == (8 * GIB, 6 * GIB, 5 * GIB // 2), "the last one if no node has more"


FOUR = Split(parts=4, micro_batches=8)
STAGES = MemoryPoint(
    1, 4, "Pipeline", peak_nbytes=900, sufficient_nbytes=2000, split=FOUR, parts_nbytes=(500, 300, 200, 700)
)


@pytest.mark.parametrize(
    ("ranks", "parts_nbytes"),
    [(2, 900), (3, 500 + 700 + 300), (4, 1700), (6, 1700 + 900), (8, 2 * 1700)],
)
def test_memory_of_other_pods_follows_from_that_of_each_stage(ranks: int, parts_nbytes: int) -> None:
    """Pods have consecutive ranks, and the largest pod counts. Three ranks: stages 0 to 2, 3 0 1, 2 3 0, 1 to 3."""
    found = STAGES.with_ranks(ranks)
    assert found.place == (ranks, 4, "Pipeline", FOUR) and found.peak_nbytes == AGENT_NBYTES + parts_nbytes
    assert STAGES.with_ranks(1) == STAGES
    assert MemoryPoint(1, 4, "Pipeline", peak_nbytes=900, split=FOUR).with_ranks(ranks).ranks == 1


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=9), st.integers(2, 40))
def test_no_pod_of_a_split_model_has_more_than_what_follows(parts: list[int], ranks: int) -> None:
    point = MemoryPoint(1, 1, "Tensor", max(parts), split=Split(len(parts)), parts_nbytes=tuple(parts))
    pods = [sum(parts[(pod * ranks + i) % len(parts)] for i in range(ranks)) for pod in range(50)]
    assert (point.with_ranks(ranks).peak_nbytes or 0) - AGENT_NBYTES == max(pods)


def test_measurements_of_another_split_do_not_count() -> None:
    """More stages, more micro-batches or checkpoints change the memory of each part, in either direction."""
    assert amounts_nbytes([STAGES], 1, 4, "Pipeline", PROCESS, FOUR) == (STAGES.needed_nbytes,)
    assert complete_run_nbytes([STAGES], 1, 4, "Pipeline", FOUR) == STAGES.needed_nbytes
    for other in (Split(2, micro_batches=8), Split(4, 2, 8), Split(4, 1, 4), Split(4, 1, 8, checkpoints=False)):
        assert amounts_nbytes([STAGES], 1, 4, "Pipeline", PROCESS, other) == ()
        assert complete_run_nbytes([STAGES], 1, 4, "Pipeline", other) is None
    assert amounts_nbytes([STAGES], 1, 4, "Pipeline", PROCESS) == ()
    assert complete_run_nbytes([STAGES], 1, 8, "Pipeline", FOUR) is None, "a larger batch"


@pytest.mark.parametrize(
    "point",
    [
        MemoryPoint(1, 4, "Pipeline", 900, split=FOUR),
        MemoryPoint(1, 4, "Pipeline", None, 2000, split=FOUR),
        MemoryPoint(1, 4, "Pipeline", 900, 2000, 2100, split=FOUR),
    ],
    ids=["not complete", "not measured", "failed since"],
)
def test_only_a_complete_run_shows_what_is_enough(point: MemoryPoint) -> None:
    assert complete_run_nbytes([point], 1, 4, "Pipeline", FOUR) is None


def test_a_complete_run_shows_what_is_enough_for_pods_with_more_of_its_ranks() -> None:
    assert complete_run_nbytes([STAGES], 2, 4, "Pipeline", FOUR) == STAGES.with_ranks(2).needed_nbytes
    own = MemoryPoint(2, 4, "Pipeline", 10**9, 2 * 10**9, split=FOUR)
    assert complete_run_nbytes([STAGES, own], 2, 4, "Pipeline", FOUR) == own.needed_nbytes, "the own measurement counts"
    assert amounts_nbytes([STAGES, own], 2, 4, "Pipeline", PROCESS, FOUR) == (own.needed_nbytes,)


def test_memory_of_each_part_is_remembered_like_that_of_a_pod() -> None:
    def run(*parts_nbytes: int, complete: bool = True) -> MemoryPoint:
        return MemoryPoint(1, 4, "Tensor", 900, 2000 if complete else None, split=Split(2), parts_nbytes=parts_nbytes)

    assert after(run(700, 500), run(100, 600)).parts_nbytes == (630, 600)
    assert after(run(700, 500), run(100, 600, complete=False)).parts_nbytes == (700, 600)
    assert after(run(700, 500), run()).parts_nbytes == (700, 500), "an agent of an earlier release"
    assert after(run(), run(700, 500)).parts_nbytes == (700, 500)


def test_profiles_have_room_for_all_points() -> None:
    """The API server would refuse a status with more."""
    assert MAX_POINTS <= MAX_MEMORY
