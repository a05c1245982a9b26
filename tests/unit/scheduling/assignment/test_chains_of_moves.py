"""Moves that help a job only through the moves of others, and moves by which a job meets its deadline."""

import pytest

from dljob.scheduling.assignment import Candidate, Held, Option, assign_all
from dljob.scheduling.assignment.moves import Moves

RESTART_S = 60.0


@pytest.mark.parametrize(
    ("wait_s", "due_s", "waits_due_s", "moves"),
    [
        (100.0, None, None, True),
        (5000.0, None, None, False),  # Both other jobs would make room for longer than that is worth.
        (100.0, 3000.0, None, False),  # The first job would miss its deadline.
        (100.0, 3000.0, 200.0, True),  # It does so for another one that meets its own.
    ],
)
def test_a_job_makes_room_for_one_that_makes_room_itself(
    wait_s: float, due_s: float | None, waits_due_s: float | None, moves: bool
) -> None:
    """Fixed bug: the second job loses by its move, so the first one kept its devices, and the third one waited."""
    first = tuple(Option("a100", 1, count, seconds) for count, seconds in ((1, 7000.0), (2, 3600.0), (4, 2000.0)))
    second = (Option("t4", 1, 4, 1000.0), Option("a100", 1, 2, 1500.0))
    third = (Option("t4", 1, 4, wait_s),)
    jobs = [Candidate(0, first, due_s=due_s), Candidate(0, second), Candidate(0, third, due_s=waits_due_s)]
    held = [Held({"a100": 4}, 2000.0, movable=True), Held({"t4": 4}, 1000.0, movable=True), Held({})]
    found = assign_all(jobs, held, {"a100": 4, "t4": 4}, RESTART_S)
    assert found.moves == (moves, moves, False)
    assert found.helped == (((1,), (2,), ()) if moves else ((), (), ()))


@pytest.mark.parametrize(
    ("due_s", "others_due_s", "moves"),
    [
        (320.0, None, True),
        (None, None, False),  # It gains less than the other one loses.
        (300.0, None, False),  # With the restart, it ends after 310 s.
        (320.0, 12_000.0, False),  # The other one would miss its deadline.
        (320.0, 5000.0, True),  # The other one misses its deadline in any case.
    ],
)
def test_a_job_makes_room_for_one_that_meets_its_deadline_by_that(
    due_s: float | None, others_due_s: float | None, moves: bool
) -> None:
    """Fixed bug: only seconds counted, so a late job did not grow while a longer job held devices that it needed."""
    long = tuple(Option("t4", 1, count, seconds) for count, seconds in ((1, 36_000.0), (2, 19_000.0), (4, 10_000.0)))
    short = tuple(Option("t4", 1, count, 1000.0 / count) for count in (1, 2, 4))
    jobs = [Candidate(0, long, due_s=others_due_s), Candidate(0, short, due_s=due_s)]
    held = [Held({"t4": 4}, 10_000.0, movable=True), Held({"t4": 2}, 500.0, movable=True)]
    assert assign_all(jobs, held, {"t4": 6}, RESTART_S).moves == (moves, moves)


@pytest.mark.parametrize(("restart_s", "worthwhile"), [(10.0, True), (300.0, False)])
def test_a_chain_may_have_any_number_of_links(restart_s: float, worthwhile: bool) -> None:
    """Fixed bug: chains of a thousand jobs ended with a RecursionError."""
    links, hours_s = 2000, 1e6
    jobs = [Candidate(0, (Option("t4", 1, 1, hours_s + 1.0),))] * links + [Candidate(0, (Option("t4", 1, 1, 1.0),))]
    held = [Held({"t4": 2}, hours_s, movable=True)] * links + [Held({})]
    helped = [(i + 1,) for i in range(links)] + [()]
    moves = Moves(jobs, held, tuple(job.options[0] for job in jobs), helped, restart_s)
    assert moves.are_worthwhile(0) is worthwhile  # The links lose 40,000 or 1,200,000 s, and the last job gains 10^6 s.
