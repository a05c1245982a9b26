"""Heterogeneous devices are assigned to several jobs together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dljob.cluster import ClusterView, Node
from dljob.scheduling.assignment import (
    Assignment,
    Candidate,
    Held,
    Option,
    Resources,
    assign,
    assign_all,
    idle_option,
    in_order,
    movers,
    share,
    together,
    total_s,
)
from dljob.scheduling.assignment.moves import helped_by
from dljob.scheduling.parts import free_devices, left_for, part_of, sizes
from support.joint_jobs import FREE, JOBS, equal
from support.planner_questions import DIGITS, T4, rejected


def moved(held: Sequence[Held], parts: Sequence[Option], free: dict[str, int]) -> tuple[bool, ...]:
    """Return the movers among jobs that no quota limits."""
    jobs = equal([(part,) for part in parts])
    return movers(held, tuple(parts), Resources.of(jobs, held, tuple(parts), free), 45.0)


def fit(found: Assignment, held: list[Held], free: dict[str, int]) -> bool:
    """Return True if the parts of the jobs that move fit beside what the others hold."""
    used = Counter[str]()
    for mine, part, moves in zip(held, found.parts, found.moves, strict=True):
        used.update({part.device: part.devices} if moves and part is not None else mine.devices)
    return all(count <= free[device] for device, count in used.items())


@given(JOBS, FREE)
def test_the_sum_of_completion_times_is_never_larger_than_one_by_one_in_order(
    jobs: list[tuple[Option, ...]], free: dict[str, int]
) -> None:
    found = assign(equal(jobs), free)
    assert total_s(jobs, found, free) <= total_s(jobs, in_order(jobs, free), free)


@given(JOBS, FREE)
def test_assigned_devices_are_free_and_options_are_the_jobs_own(
    jobs: list[tuple[Option, ...]], free: dict[str, int]
) -> None:
    for found in (assign(equal(jobs), free), together(equal(jobs), free), in_order(jobs, free)):
        for device, count in free.items():
            assert sum(each.devices for each in found if each is not None and each.device == device) <= count
        assert all(each is None or each in options for each, options in zip(found, jobs, strict=True))


@given(JOBS, FREE)
def test_no_job_waits_while_one_of_its_options_fits(jobs: list[tuple[Option, ...]], free: dict[str, int]) -> None:
    found = assign(equal(jobs), free)
    left = {
        device: count - sum(each.devices for each in found if each is not None and each.device == device)
        for device, count in free.items()
    }
    for options, each in zip(jobs, found, strict=True):
        assert each is not None or all(option.devices > left[option.device] for option in options)


@given(JOBS, JOBS, FREE)
def test_jobs_of_a_lower_priority_change_nothing_for_those_of_a_higher_one(
    high: list[tuple[Option, ...]], low: list[tuple[Option, ...]], free: dict[str, int]
) -> None:
    alone = assign([Candidate(9, options) for options in high], free)
    both = assign([*(Candidate(9, options) for options in high), *equal(low)], free)
    assert both[: len(high)] == alone


def test_the_fast_devices_go_to_the_job_that_gains_most_from_them() -> None:
    gains_little = (Option("a100", 1, 8, 90.0), Option("t4", 1, 8, 100.0))
    gains_much = (Option("a100", 1, 8, 100.0), Option("t4", 1, 8, 800.0))
    free = {"a100": 8, "t4": 8}
    assert assign(equal([gains_little, gains_much]), free) == (gains_little[1], gains_much[0])
    assert in_order([gains_little, gains_much], free) == (gains_little[0], gains_much[1])


def test_one_job_does_not_get_all_devices_while_others_wait() -> None:
    sizes = tuple(Option("t4", 1, n, 1000.0 / n**0.4) for n in (1, 2, 4, 8))
    assert [each and each.devices for each in assign(equal([sizes] * 4), {"t4": 8})] == [2, 2, 2, 2]
    assert [each and each.devices for each in assign(equal([sizes]), {"t4": 8})] == [8]


SCALES = tuple(Option("t4", 1, n, 1000.0 / n**0.9) for n in range(1, 13))
"""A job that becomes faster with each of up to 12 devices."""


@given(st.integers(1, 12), st.integers(12, 24), st.sampled_from([1.0, 2.0, 3.0]))
def test_jobs_start_within_the_entitlement_of_their_owner_however_many_jobs_another_has(
    few: int, many: int, weight: float
) -> None:
    """Fixed bug: the many short jobs of an owner kept the jobs of another one from starting."""
    short = tuple(replace(option, seconds=option.seconds / 100) for option in SCALES)
    jobs = [Candidate(0, SCALES, "a", weight)] * few + [Candidate(0, short, "b")] * many
    given = Counter[str]()
    for job, part in zip(jobs, share(jobs, {"t4": 12}), strict=True):
        given[job.owner] += part.devices if part is not None else 0
    assert given["a"] == min(few, round(12 * weight / (weight + 1))) and given["a"] + given["b"] == 12


HALVING = tuple(Option("t4", 1, count, 1200 / count) for count in (1, 2, 4, 8))
"""Plans of a job that takes 1,200, 600, 300 or 150 s."""


@pytest.mark.parametrize(
    ("free", "due_s", "expected"),
    [
        (6, (None, None), (4, 2)),
        (6, (700.0, None), (2, 4)),  # Two devices are enough for it, and more are of more use to the other one.
        (6, (100.0, None), (2, 4)),  # It misses its deadline in any case.
        (6, (None, 400.0), (2, 4)),
        (8, (200.0, None), (8, None)),  # Only all devices are enough. The other one starts when it ends.
        (4, (None, 400.0), (None, 4)),
        (2, (700.0, None), (2, None)),
        (2, (100.0, None), (1, 1)),
        (8, (None, 700.0), (4, 4)),  # Nothing is left over.
    ],
)
def test_deadlines_decide_who_gets_devices(
    free: int, due_s: tuple[float | None, float | None], expected: tuple[int, int]
) -> None:
    found = together([Candidate(0, HALVING, due_s=each) for each in due_s], {"t4": free})
    assert tuple(None if each is None else each.devices for each in found) == expected


ONE_T4 = Option("t4", 1, 1, 1.0)


@given(JOBS, st.lists(st.none() | st.floats(-10.0, 1e5), min_size=7, max_size=7), FREE)
@example(  # An exchange released five devices, and the first job got none of them.
    [
        (ONE_T4,),
        (Option("a100", 1, 1, 2.0), ONE_T4),
        (Option("a100", 1, 1, 3.0), Option("t4", 3, 2, 2.0)),
    ],
    [None, None, 2.0],
    {"a100": 1, "t4": 6},
)
def test_deadlines_change_neither_the_limits_nor_that_nothing_is_left_over(
    jobs: list[tuple[Option, ...]], due_s: list[float | None], free: dict[str, int]
) -> None:
    found = together([Candidate(0, each, due_s=due) for each, due in zip(jobs, due_s, strict=False)], free)
    left = Counter(free)
    left.subtract({device: sum(each.devices for each in found if each and each.device == device) for device in free})
    assert all(count >= 0 for count in left.values())
    for options, part in zip(jobs, found, strict=True):
        assert part is not None or all(each.devices > left[each.device] for each in options)


@given(JOBS, FREE)
def test_jobs_of_one_owner_have_no_limit(jobs: list[tuple[Option, ...]], free: dict[str, int]) -> None:
    mine = [Candidate(0, options, "a", 0.5) for options in jobs]
    assert share(mine, free) == share(equal(jobs), free)


def test_an_owner_uses_what_the_others_leave() -> None:
    one = (SCALES[0],)
    found = share([Candidate(0, SCALES, "a"), Candidate(0, one, "b"), Candidate(0, one, "c")], {"t4": 12})
    assert [part and part.devices for part in found] == [10, 1, 1]


@given(JOBS, JOBS, FREE, st.lists(st.booleans(), min_size=7, max_size=7))
def test_only_movable_running_jobs_move_and_they_fit_beside_the_others(
    running: list[tuple[Option, ...]], waiting: list[tuple[Option, ...]], free: dict[str, int], movable: list[bool]
) -> None:
    """The jobs run where they were started one by one in order."""
    held = [
        Held({} if each is None else {each.device: each.devices}, each.seconds if each else 0.0, movable=may)
        for each, may in zip(in_order(running, free), movable, strict=False)
    ]
    held += [Held({}) for _ in waiting]
    jobs = equal([*running, *waiting])
    parts = share(jobs, free)
    moving = movers(held, parts, Resources.of(jobs, held, parts, free), 45.0)
    used = Counter[str]()
    for mine, part, moves in zip(held, parts, moving, strict=True):
        assert not moves or (mine.movable and mine.devices and part is not None)
        used.update({part.device: part.devices} if moves and part is not None else mine.devices)
    assert all(count <= free[device] for device, count in used.items())


def test_a_job_that_cannot_move_keeps_its_devices_and_others_do_not_restart_for_nothing() -> None:
    one, two = Option("t4", 1, 4, 1000.0), Option("t4", 1, 8, 600.0)
    fixed, other = Held({"t4": 8}, 600.0), Held({"t4": 4}, 1000.0, movable=True)
    assert moved([fixed, other], (one, two), {"t4": 12}) == (False, False)


def test_a_running_job_gives_devices_to_others_but_does_not_move_for_nothing() -> None:
    sizes = tuple(Option("t4", 1, n, 1000.0 / n**0.8) for n in (1, 2, 4, 8))
    whole = Held({"t4": 8}, sizes[-1].seconds, movable=True)
    assert share(equal([sizes, sizes]), {"t4": 8}) == (sizes[2], sizes[2])
    assert moved([whole, Held({})], (sizes[2], sizes[2]), {"t4": 8}) == (True, False)
    little = Held({"t4": 4}, 1.05 * sizes[3].seconds, movable=True)
    assert moved([little], (sizes[3],), {"t4": 8}) == (False,)


def test_a_job_leaves_what_is_assigned_to_others() -> None:
    view = ClusterView(tuple(Node(f"n{i}", "t4", 4, 4, is_gpu=True) for i in range(3)))
    assert free_devices(left_for(view, [Option("t4", 2, 4, 1.0), None])) == {"t4": 4}


@given(JOBS, JOBS, FREE, st.lists(st.integers(0, 1), min_size=14, max_size=14))
def test_a_job_restarts_only_if_it_gains_or_if_jobs_of_no_lower_priority_gain(
    running: list[tuple[Option, ...]], waiting: list[tuple[Option, ...]], free: dict[str, int], priorities: list[int]
) -> None:
    held = [
        Held({} if each is None else {each.device: each.devices}, each.seconds if each else 0.0, movable=True)
        for each in in_order(running, free)
    ] + [Held({}) for _ in waiting]
    jobs = [Candidate(p, options) for p, options in zip(priorities, [*running, *waiting], strict=False)]
    order = sorted(range(len(jobs)), key=lambda i: -jobs[i].priority)
    jobs, held = [jobs[i] for i in order], [held[i] for i in order]
    found = assign_all(jobs, held, free, 45.0)
    for i, (moves, helped) in enumerate(zip(found.moves, found.helped, strict=True)):
        part = found.parts[i]
        assert moves or not helped
        assert all(jobs[j].priority >= jobs[i].priority and j != i for j in helped)
        assert not moves or helped or (part is not None and held[i].left_s - part.seconds - 45.0 >= 60.0)
    assert fit(found, held, free)


def test_a_job_does_not_move_to_devices_of_a_job_that_stays() -> None:
    """The first job would lose more on the T4 than the second one gains on the A100, so both stay."""
    first = (Option("t4", 1, 2, 230.0), Option("a100", 1, 2, 115.0))
    second = (Option("t4", 1, 2, 230.0), Option("a100", 1, 2, 57.0))
    held = [Held({"a100": 2}, 115.0, movable=True), Held({"t4": 2}, 230.0, movable=True)]
    found = assign_all(equal([first, second]), held, {"t4": 2, "a100": 2}, 45.0)
    assert [part and part.device for part in found.parts] == ["t4", "a100"]
    assert found.moves == (False, False) and found.helped == ((), ())


def test_a_long_job_makes_room_for_a_short_one_but_not_for_one_that_is_as_long() -> None:
    long = tuple(Option("t4", 1, n, 100_000.0 / n**0.9) for n in (1, 2, 4))
    short = tuple(Option("t4", 1, n, 1000.0 / n**0.9) for n in (1, 2, 4))
    whole, waits = Held({"t4": 4}, long[-1].seconds, movable=True), Held({})
    found = assign_all(equal([long, short]), [whole, waits], {"t4": 4}, 60.0)
    assert found.moves == (True, False) and found.helped == ((1,), ())
    assert assign_all(equal([long, long]), [whole, waits], {"t4": 4}, 60.0).moves == (False, False)


LONG = tuple(Option("t4", 1, n, 100_000.0 / n**0.9) for n in (1, 2, 4))
BRIEF = tuple(Option("t4", 1, n, 1000.0 / n**0.9) for n in (1, 2, 4))


@pytest.mark.parametrize("number", [1, 3, 4, 9])
def test_a_long_job_makes_room_for_any_number_of_short_ones(number: int) -> None:
    """Fixed bug: with four of them, nothing was left for the long job, which therefore kept all devices."""
    held = [Held({"t4": 4}, LONG[-1].seconds, movable=True), *[Held({})] * number]
    found = assign_all(equal([LONG, *[BRIEF] * number]), held, {"t4": 4}, 60.0)
    assert found.moves[0] and found.parts[0] is not None
    assert sum(part is not None for part in found.parts[1:]) == min(3, number)


@pytest.mark.parametrize("due_s", [None, 100.0, BRIEF[2].seconds, BRIEF[1].seconds, BRIEF[0].seconds])
def test_a_deadline_never_keeps_a_job_from_starting(due_s: float | None) -> None:
    """Fixed bug: a job that needed all devices for its deadline got none, because the long one could not give up all."""
    held = [Held({"t4": 4}, LONG[-1].seconds, movable=True), Held({})]
    found = assign_all([Candidate(0, LONG), Candidate(0, BRIEF, due_s=due_s)], held, {"t4": 4}, 60.0)
    assert found.moves == (True, False) and fit(found, held, {"t4": 4})
    assert found.parts[1] is not None and found.parts[1].devices == 2


def test_a_job_that_holds_devices_keeps_what_its_deadline_needs() -> None:
    """Nine short jobs would take all devices."""
    long = Candidate(0, LONG, due_s=LONG[1].seconds + 60.0)
    held = [Held({"t4": 4}, LONG[-1].seconds, movable=True), *[Held({})] * 9]
    found = assign_all([long, *equal([BRIEF] * 9)], held, {"t4": 4}, 60.0)
    assert found.moves[0] and found.parts[0] == LONG[1]
    assert sum(part is not None for part in found.parts[1:]) == 2


@given(JOBS, JOBS, FREE)
def test_jobs_that_hold_devices_keep_some_if_their_options_fit_together(
    running: list[tuple[Option, ...]], waiting: list[tuple[Option, ...]], free: dict[str, int]
) -> None:
    """Devices are of one type here, so that jobs that hold some of it can always hold fewer."""
    running, waiting = ([tuple(replace(o, device="t4") for o in each) for each in jobs] for jobs in (running, waiting))
    held = [
        Held({} if each is None else {each.device: each.devices}, each.seconds if each else 0.0, movable=True)
        for each in in_order(running, free)
    ] + [Held({}) for _ in waiting]
    running = [(*options, Option("t4", 1, 1, 2e5)) if mine.devices else options
               for options, mine in zip(running, held, strict=False)]  # fmt: skip
    found = assign_all(equal([*running, *waiting]), held, free, 45.0)
    assert all(part is not None for part, mine in zip(found.parts, held, strict=True) if mine.devices)


def test_a_job_does_not_miss_its_deadline_for_another_one_unless_that_meets_its_own() -> None:
    """A long job makes room for a short one, but then takes 2,000 instead of 1,000 s."""
    long = tuple(Option("t4", 1, count, 2000 / count) for count in (1, 2))
    short = (Option("t4", 1, 1, 100.0),)
    held = [Held({"t4": 2}, 1000.0, movable=True), Held({})]
    for due_s, other_due_s, moves in (
        (None, None, True),
        (3000.0, None, True),
        (1500.0, None, False),
        (1500.0, 50.0, False),
        (1500.0, 200.0, True),
        (500.0, None, True),  # It misses its deadline in any case.
    ):
        jobs = [Candidate(0, long, due_s=due_s), Candidate(0, short, due_s=other_due_s)]
        assert assign_all(jobs, held, {"t4": 2}, 10.0).moves[0] == moves, (due_s, other_due_s)


def test_a_job_counts_that_it_gets_devices_back_only_after_a_rest() -> None:
    """It would be 225 s slower while another job takes 300 s, but it stays on few devices for ten minutes: 450 s."""
    short = Candidate(0, (Option("t4", 1, 1, 300.0),))
    for left_s, moves in ((500.0, False), (5000.0, True)):
        long = Candidate(0, (Option("t4", 1, 1, 4 * left_s), Option("t4", 1, 4, left_s)))
        held = [Held({"t4": 4}, left_s, movable=True), Held({})]
        assert assign_all([long, short], held, {"t4": 4}, 20.0).moves[0] == moves


@pytest.mark.parametrize(
    ("others", "waits", "left_s", "expected"),
    [
        ({}, None, 6000.0, 4),  # The other job has ended.
        ({"t4": 3}, None, 6000.0, None),  # Nothing is free.
        ({"t4": 1}, None, 6000.0, 2),
        ({}, 2, 6000.0, 2),  # A waiting job starts on the rest.
        ({}, None, 300.0, None),  # It gains less than a minute.
    ],
)
def test_devices_that_stay_free_although_a_resting_job_could_use_them(
    others: dict[str, int], waits: int | None, left_s: float, expected: int | None
) -> None:
    options = tuple(Option("t4", 1, count, left_s / count**0.3) for count in (1, 2, 4))
    jobs = [Candidate(0, options)] * 3
    held = [Held({"t4": 1}, left_s), Held(others, 1000.0), Held({})]
    parts = (None, None, None if waits is None else Option("t4", 1, waits, 1000.0))
    found = idle_option(0, jobs, held, Resources.of(jobs, held, parts, {"t4": 4}), 45.0)
    assert (found and found.devices) == expected


def test_jobs_that_give_up_devices_too_are_not_helped() -> None:
    long = Candidate(0, tuple(Option("t4", 1, count, 8000.0 / count) for count in (1, 2, 4)))
    jobs = [long, long, Candidate(0, (Option("t4", 1, 2, 100.0),))]
    held = [Held({"t4": 4}, 2000.0, movable=True), Held({"t4": 4}, 2000.0, movable=True), Held({})]
    parts = (Option("t4", 1, 2, 4000.0), Option("t4", 1, 2, 4000.0), Option("t4", 1, 2, 100.0))
    assert helped_by(0, jobs, Resources.of(jobs, held, parts, {"t4": 8}), (True, True, False)) == (2,)


def test_sizes_are_those_of_one_node_and_then_whole_nodes() -> None:
    assert sizes(3, 4) == [(1, 1), (1, 2), (1, 4), (2, 4), (3, 4)]
    assert sizes(1, 1) == [(1, 1)] and sizes(0, 4) == []


@given(st.lists(st.integers(0, 8), max_size=6), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]))
def test_a_part_has_as_many_devices_as_are_assigned_or_as_are_free(free: list[int], nodes: int, per_node: int) -> None:
    view = ClusterView(tuple(Node(f"n{i}", "t4", 8, count, is_gpu=True) for i, count in enumerate(free)))
    found = part_of(view, Option("t4", nodes, per_node, 1.0))
    assert sum(node.free_devices for node in found.nodes) == min(nodes * per_node, sum(free))
    assert all(0 < node.free_devices <= free[int(node.name[1:])] for node in found.nodes) or not any(free)
    if sum(count >= per_node for count in free) >= nodes:
        assert [node.free_devices for node in found.nodes] == [per_node] * nodes


def test_a_part_without_free_devices_is_busy_and_not_of_an_unknown_type() -> None:
    """Fixed bug: a job whose part still belonged to another one waited for a device type "which no node has"."""
    t4, a100 = Node("n0", T4, 8, 0, 2**36, is_gpu=True), Node("n1", "a100", 8, 4, 2**36, is_gpu=True)
    found = part_of(ClusterView((a100,)), Option(T4, 1, 2, 1.0), ClusterView((t4, a100)))
    assert found == ClusterView((t4,))
    assert rejected(replace(DIGITS, devices=(T4,)), found).reason == "DeviceBusy"
