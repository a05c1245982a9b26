"""A job that waits for very long starts before other waiting jobs of its priority."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node
from dljob.scheduling.assignment import Candidate, Held, Option, assign_all, is_overdue, share, together
from dljob.scheduling.parts import could_start, free_devices, left_for
from support.joint_jobs import FREE, JOBS

LONG = tuple(Option("t4", 1, count, 9000.0 / count) for count in (1, 2, 4))
WIDE = (Option("t4", 2, 1, 4500.0),)
BRIEF = (Option("t4", 1, 1, 60.0),)


def devices(found: tuple[Option | None, ...]) -> list[int]:
    return [0 if part is None else part.devices for part in found]


@pytest.mark.parametrize(
    ("waited_s", "seconds", "expected"),
    [
        (1799.0, (900.0, 1200.0), False),
        (1800.0, (900.0, 1200.0), True),
        (899.0, (1.0,), False),
        (900.0, (1.0,), True),
        (900.0, (), True),
    ],
)
def test_a_job_is_overdue_after_twice_its_shortest_time(
    waited_s: float, seconds: tuple[float, ...], expected: bool
) -> None:
    assert is_overdue(waited_s, [Option("t4", 1, i + 1, each) for i, each in enumerate(seconds)]) is expected


@pytest.mark.parametrize(
    ("overdue", "expected"), [(False, [0, 1, 1, 1, 1]), (True, [1, 1, 1, 1, 0])], ids=["not overdue", "overdue"]
)
def test_an_overdue_job_starts_before_shorter_ones_with_as_few_devices_as_possible(
    overdue: bool, expected: list[int]
) -> None:
    jobs = [Candidate(0, LONG, overdue=overdue), *[Candidate(0, BRIEF)] * 4]
    assert devices(together(jobs, {"t4": 4})) == expected


def test_of_overdue_jobs_the_first_in_line_start() -> None:
    jobs = [Candidate(0, LONG, overdue=True), *[Candidate(0, WIDE, overdue=True)] * 2, Candidate(0, BRIEF)]
    assert devices(together(jobs, {"t4": 4})) == [1, 2, 0, 1]


def test_an_overdue_job_does_not_take_what_a_running_job_needs_to_move_to() -> None:
    jobs = [Candidate(0, LONG), *[Candidate(0, LONG, overdue=True)] * 4, Candidate(0, BRIEF)]
    assert devices(share(jobs, {"t4": 4}, [0])) == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("first", [LONG, BRIEF])
def test_priority_and_running_jobs_come_before_overdue_jobs(first: tuple[Option, ...]) -> None:
    jobs = [Candidate(1, first), Candidate(0, LONG, overdue=True), Candidate(0, (Option("t4", 1, 3, 600.0),))]
    held = [Held({}), Held({}), Held({"t4": 3}, 600.0, movable=False)]
    assert devices(assign_all(jobs, held, {"t4": 4}, 60.0).parts) == [1, 0, 3]


@pytest.mark.parametrize(("mine", "theirs"), [(1, 3), (6, 3)])
def test_overdue_jobs_stay_within_the_entitlement_of_their_owner(mine: int, theirs: int) -> None:
    """An owner with very many jobs, most of them overdue, does not keep others from starting."""
    jobs = [Candidate(0, BRIEF, "a", overdue=True)] * 9 + [Candidate(0, BRIEF, "b")] * mine
    found = devices(together(jobs, {"t4": 6}))
    assert sum(found[9:]) == min(mine, theirs) and sum(found) == 6


@given(JOBS, st.lists(st.booleans(), min_size=7, max_size=7), FREE)
def test_overdue_jobs_change_neither_the_limits_nor_that_nothing_is_left_over(
    jobs: list[tuple[Option, ...]], overdue: list[bool], free: dict[str, int]
) -> None:
    waiting = [Candidate(0, each, overdue=late) for each, late in zip(jobs, overdue, strict=False)]
    found = together(waiting, free)
    left = {
        device: count - sum(part.devices for part in found if part is not None and part.device == device)
        for device, count in free.items()
    }
    assert all(count >= 0 for count in left.values())
    for options, part in zip(jobs, found, strict=True):
        assert part is not None or all(each.devices > left[each.device] for each in options)


@pytest.mark.parametrize(("parts", "expected"), [([], 3), ([1], 2), ([4], 3), ([4, 1], 2), ([2, 1], 0), ([1, 3, 1], 1)])
def test_a_part_that_is_not_free_as_a_whole_takes_nothing(parts: list[int], expected: int) -> None:
    view = ClusterView(tuple(Node(f"n{i}", "t4", 2, count, is_gpu=True) for i, count in enumerate((2, 1))))
    options = [Option("t4", count, 1, 1.0) if count > 2 else Option("t4", 1, count, 1.0) for count in parts]
    left = left_for(view, [options[i] for i in could_start(view, options)])
    assert free_devices(left).get("t4", 0) == expected
