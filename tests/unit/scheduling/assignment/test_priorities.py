"""Jobs of several priorities are assigned devices together: running jobs of a lower one make room."""

from dataclasses import replace

import pytest
from hypothesis import given

from dljob.scheduling.assignment import Candidate, Held, Jobs, Option, assign_all, share
from support.joint_jobs import FREE, JOBS, equal

LONG = tuple(Option("t4", 1, n, 100_000.0 / n**0.9) for n in (1, 2, 4))
BRIEF = tuple(Option("t4", 1, n, 1000.0 / n**0.9) for n in (1, 2, 4))


@pytest.mark.parametrize(("number", "start", "kept"), [(1, 1, 2), (3, 3, 1), (4, 3, 1), (9, 3, 1)])
def test_a_long_job_makes_room_for_any_number_of_jobs_of_a_higher_priority(number: int, start: int, kept: int) -> None:
    """Fixed bug: they could use all devices, so that nothing was left for the long job, and they waited for its end."""
    held = [*[Held({})] * number, Held({"t4": 4}, LONG[-1].seconds, movable=True)]
    high, long = Candidate(9, BRIEF), Candidate(0, LONG)
    found = assign_all([*[high] * number, long], held, {"t4": 4}, 60.0)
    assert found.moves[-1] and found.parts[-1] is not None and found.parts[-1].devices == kept
    assert sum(part is not None for part in found.parts[:-1]) == start
    assert share([*[replace(high, preempts=True)] * number, long], {"t4": 4}, [number])[-1] is None


@pytest.mark.parametrize(("running", "kept", "starts"), [(4, 4, False), (3, 2, True), (2, 2, True)])
def test_a_job_that_needs_many_devices_is_not_passed_over_by_one_of_a_lower_priority(
    running: int, kept: int, starts: bool
) -> None:
    """It waits for two of four devices. Running jobs hold one each, and another job would start on a free one."""
    one, two = (Option("t4", 1, 1, 1000.0),), (Option("t4", 2, 1, 1000.0),)
    held = [Held({}), *[Held({"t4": 1}, 900.0, movable=True)] * running, Held({})]
    found = assign_all([Candidate(9, two), *equal([one] * (running + 1))], held, {"t4": 4}, 60.0)
    assert [part is not None for part in found.parts[1:-1]] == [True] * kept + [False] * (running - kept)
    assert (found.parts[0] is not None) is starts and found.parts[-1] is None and not any(found.moves)


def test_a_part_that_a_deadline_needs_does_not_keep_another_job_from_making_room_for_a_higher_priority() -> None:
    """Of six devices, two are needed for a deadline. Four jobs hold one each, and one holds two."""
    due = Candidate(0, LONG, due_s=LONG[1].seconds)
    held = [Held({}), *(Held({"t4": n}, LONG[n - 1].seconds, movable=True) for n in (1, 1, 1, 1, 2))]
    found = assign_all([Candidate(9, BRIEF), due, *[Candidate(0, LONG)] * 4], held, {"t4": 6}, 60.0)
    assert found.moves == (False,) * 5 + (True,) and found.parts[0] == BRIEF[0] and found.parts[-1] == LONG[0]


@given(JOBS, JOBS, JOBS, FREE)
def test_for_running_jobs_no_job_loses_its_part_to_a_waiting_one_of_a_lower_priority(
    high: Jobs, running: Jobs, waiting: Jobs, free: dict[str, int]
) -> None:
    jobs = [*(Candidate(9, each) for each in high), *equal([*running, *waiting])]
    without, found = share(jobs, free), share(jobs, free, range(len(high), len(high) + len(running)))
    given_away = {part.device for part in found[len(high) + len(running) :] if part is not None}
    for options, before, part in zip(high, without, found, strict=False):
        assert before is None or part is not None or not given_away & {option.device for option in options}
    for device, count in free.items():
        assert sum(each.devices for each in found if each is not None and each.device == device) <= count
