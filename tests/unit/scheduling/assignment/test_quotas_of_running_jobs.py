"""A running job gives up quota for other jobs of its owner by the rules by which it gives up devices."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.scheduling.assignment import (
    Candidate,
    Held,
    Option,
    QuotaAmounts,
    Resources,
    assign_all,
    idle_option,
    in_order,
    movers,
    share,
    sum_of,
)
from support.joint_jobs import FREE, JOBS

RESTART_S = 60.0
LONG = tuple(Option("t4", 1, n, 100_000.0 / n**0.9, (n,)) for n in (1, 2, 4))
BRIEF = tuple(Option("t4", 1, n, 1000.0 / n**0.9, (n,)) for n in (1, 2, 4))
WAITS = Held({})


def job(options: tuple[Option, ...], owner: str = "a", allowed: QuotaAmounts = (4,), priority: int = 0) -> Candidate:
    return Candidate(priority, options, owner, allowed=allowed)


def runs(option: Option, *, movable: bool = True) -> Held:
    return Held({option.device: option.devices}, option.seconds, movable, option.needs)


def devices(parts: Sequence[Option | None]) -> list[int]:
    return [0 if part is None else part.devices for part in parts]


def test_a_job_moves_for_one_that_lacks_only_quota() -> None:
    """Fixed bug: of eight devices, four are free. The first job uses up the quota, and the second one waited for it."""
    jobs, held, parts = [job(LONG), job(BRIEF)], [runs(LONG[2]), WAITS], (LONG[1], BRIEF[1])
    assert movers(held, parts, Resources.of(jobs, held, parts, {"t4": 8}), RESTART_S) == (True, False)
    without = [replace(each, allowed=()) for each in jobs]
    assert movers(held, parts, Resources.of(without, held, parts, {"t4": 8}), RESTART_S) == (False, False)


@pytest.mark.parametrize(
    ("options", "moves"), [(BRIEF, True), (LONG, False)], ids=["gains more", "gains less than two restarts"]
)
def test_a_job_gives_up_quota_if_others_gain_more_than_it_loses(options: tuple[Option, ...], moves: bool) -> None:
    found = assign_all([job(LONG), job(options)], [runs(LONG[2]), WAITS], {"t4": 8}, RESTART_S)
    assert devices(found.parts) == ([2, 2] if moves else [4, 0])
    assert found.moves == (moves, False) and found.helped == (((1,) if moves else ()), ())


@pytest.mark.parametrize("number", [1, 3, 4, 9])
def test_a_job_keeps_some_quota_however_many_others_wait_for_it(number: int) -> None:
    held = [runs(LONG[2]), *[WAITS] * number]
    found = assign_all([job(LONG), *[job(BRIEF)] * number], held, {"t4": 16}, RESTART_S)
    assert found.moves[0] and devices(found.parts)[0] >= 1
    assert sum(part is not None for part in found.parts[1:]) == min(3, number) and sum(devices(found.parts)) <= 4


def test_nothing_is_assigned_that_a_job_uses_that_must_not_move_now() -> None:
    """It rests, for example. The second job has no part, so that no other one restarts for it in vain."""
    found = assign_all([job(LONG), job(BRIEF)], [runs(LONG[2], movable=False), WAITS], {"t4": 8}, RESTART_S)
    assert devices(found.parts) == [4, 0] and not any(found.moves)
    jobs = [job(LONG), job(LONG), job(BRIEF[1:2])]
    for movable in (False, True):
        held = [runs(LONG[1], movable=movable), runs(LONG[1]), WAITS]
        found = assign_all(jobs, held, {"t4": 8}, RESTART_S)
        assert found.moves == ((True, True, False) if movable else (False, False, False))


def test_priorities_decide_who_gives_up_quota() -> None:
    high, low = job(BRIEF, priority=9), job(LONG)
    found = assign_all([high, low], [WAITS, runs(LONG[2])], {"t4": 8}, RESTART_S)
    assert devices(found.parts) == [2, 2] and found.moves == (False, True)
    high, low = job(LONG, priority=9), job(BRIEF)
    found = assign_all([high, low], [runs(LONG[2]), WAITS], {"t4": 8}, RESTART_S)
    assert devices(found.parts) == [4, 0] and not any(found.moves)


def test_for_the_quota_of_a_running_job_no_job_loses_its_part_to_one_of_a_lower_priority() -> None:
    """The quota allows two devices. The first job needs both. The others use another type, but the same quota."""
    two, one = (Option("t4", 2, 1, 1000.0, (2,)),), (Option("a100", 1, 1, 900.0, (1,)),)
    jobs = [job(two, allowed=(2,), priority=9), job(one, allowed=(2,)), job(one, allowed=(2,))]
    assert devices(share(jobs, {"t4": 4, "a100": 4}, [1])) == [2, 0, 0]


def test_no_job_gives_up_quota_for_jobs_of_another_owner() -> None:
    jobs = [job(LONG), job(BRIEF, "b", (2,)), job(BRIEF, "b", (2,))]
    found = assign_all(jobs, [runs(LONG[2]), runs(BRIEF[1]), WAITS], {"t4": 8}, RESTART_S)
    assert devices(found.parts)[0] == 4 and not found.moves[0]


def test_a_job_that_starts_in_any_case_does_not_speak_for_a_move() -> None:
    """Enough devices are free for the third job. The second one is as long as the first, and gains too little."""
    jobs, held = [job(LONG), job(LONG), job(BRIEF, "b", ())], [runs(LONG[2]), WAITS, WAITS]
    found = assign_all(jobs, held, {"t4": 16}, RESTART_S)
    assert devices(found.parts) == [4, 0, 4] and not any(found.moves)


def test_no_devices_are_kept_for_a_job_that_lacks_quota_because_no_other_gives_it_up() -> None:
    """A pod of the first job can have one device, and one of the second job four. The quota allows two pods."""
    first = tuple(Option("t4", n, 1, 1000.0 / n, (n,)) for n in (1, 2))
    longer, other = (Option("a100", 1, 4, 10_000.0, (1,)),), (Option("a100", 1, 4, 20_000.0),)
    jobs = [job(first, allowed=(2,)), job(longer, allowed=(2,)), job(other, "b", ())]
    found = assign_all(jobs, [runs(first[1]), WAITS, WAITS], {"t4": 2, "a100": 4}, RESTART_S)
    assert devices(found.parts) == [2, 0, 4] and not any(found.moves)


def test_a_job_that_rests_would_not_end_sooner_with_quota_that_another_one_uses() -> None:
    jobs, held = [job(LONG), job(LONG)], [runs(LONG[1], movable=False), runs(LONG[1])]
    parts = (LONG[1], LONG[1])
    assert idle_option(0, jobs, held, Resources.of(jobs, held, parts, {"t4": 8}), RESTART_S) is None
    jobs = [replace(each, allowed=(6,)) for each in jobs]
    assert idle_option(0, jobs, held, Resources.of(jobs, held, parts, {"t4": 8}), RESTART_S) == LONG[2]


ALLOWED = st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(0, 3))


@given(JOBS, JOBS, FREE, ALLOWED, st.lists(st.booleans(), min_size=7, max_size=7))
def test_moves_and_starts_fit_the_quotas(
    running: list[tuple[Option, ...]],
    waiting: list[tuple[Option, ...]],
    free: dict[str, int],
    allowed: QuotaAmounts,
    movable: list[bool],
) -> None:
    """A quota may be lower than what jobs use already. Then they use no more of it than before."""
    running, waiting = (
        [tuple(o.with_needs((o.devices, o.nodes, int(o.nodes > 1))) for o in each) for each in jobs]
        for jobs in (running, waiting)
    )
    started = in_order(running, free)
    held = [WAITS if each is None else runs(each, movable=may) for each, may in zip(started, movable, strict=False)]
    held += [WAITS] * len(waiting)
    jobs = [job(options, allowed=allowed) for options in [*running, *waiting]]
    found = assign_all(jobs, held, free, RESTART_S)
    before = sum_of(mine.uses for mine in held)
    after = sum_of(
        part.needs if part is not None and (moves or not mine.devices) else mine.uses
        for mine, part, moves in zip(held, found.parts, found.moves, strict=True)
    )
    assert all(now <= max(most, was) for now, most, was in zip(after, allowed, before, strict=False))
