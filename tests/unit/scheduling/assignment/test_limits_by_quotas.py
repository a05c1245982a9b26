"""All jobs of an owner together get no more devices than its quotas allow."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.scheduling.assignment import Candidate, Held, Option, assign_all, share
from dljob.scheduling.forecasting.joint_simulation import Costs, JointJob, simulate_joint
from support.joint_jobs import FREE, JOBS

SCALES = tuple(Option("t4", 1, count, 1200 / count) for count in (1, 2, 4, 8))
"""Plans of a job that takes 1,200, 600, 300 or 150 s."""


@given(JOBS, JOBS, FREE, st.integers(0, 12), st.integers(0, 7))
def test_no_owner_gets_more_than_its_quotas_allow(
    mine: list[tuple[Option, ...]], others: list[tuple[Option, ...]], free: dict[str, int], allowed: int, urgent: int
) -> None:
    limited = [Candidate(int(i < urgent), options, "a", allowed=allowed) for i, options in enumerate(mine)]
    jobs = sorted([*limited, *(Candidate(0, options, "b") for options in others)], key=lambda job: -job.priority)
    parts = share(jobs, free)
    left, given = Counter(free), 0
    for job, part in zip(jobs, parts, strict=True):
        if part is not None:
            left[part.device] -= part.devices
            given += part.devices if job.owner == "a" else 0
    assert given <= allowed and all(count >= 0 for count in left.values())
    for job, part in zip(jobs, parts, strict=True):  # Nothing is left over that a job may use.
        may = min((each.devices for each in job.options if each.devices <= left[each.device]), default=99)
        assert part is not None or may > (allowed - given if job.owner == "a" else 12)


@pytest.mark.parametrize(("allowed", "expected"), [(None, [1, 1, 1, 1, 4]), (2, [1, 1, 0, 0, 4]), (0, [0, 0, 0, 0, 8])])
def test_what_quotas_do_not_allow_to_an_owner_goes_to_others(allowed: int | None, expected: list[int]) -> None:
    short = Candidate(0, (Option("t4", 1, 1, 100.0),), "a", allowed=allowed)
    jobs = [short, short, short, short, Candidate(0, SCALES, "b")]
    parts = share(jobs, {"t4": 8})
    assert [part.devices if part is not None else 0 for part in parts] == expected


def test_running_jobs_keep_what_they_hold_above_a_quota() -> None:
    """The quota was lowered. Their devices are not those of others."""
    runs = Candidate(0, SCALES, "a", allowed=1)
    jobs = [runs, runs, Candidate(0, SCALES, "b")]
    held = [Held({"t4": 2}, 600.0), Held({"t4": 2}, 600.0), Held({})]
    found = assign_all(jobs, held, {"t4": 8}, 45.0)
    assert [part and part.devices for part in found.parts] == [2, 2, 4] and not any(found.moves)


def test_forecast_of_jobs_that_a_quota_admits_one_after_another() -> None:
    """Two devices are free, and each job takes 1,000 s after a start of 45 s."""
    one = (Option("t4", 1, 1, 1000.0),)
    jobs = [JointJob(("a", name), 0, one, allowed=1) for name in ("first", "second")]
    found = simulate_joint(jobs, [1.0, 1.0], {"t4": 2}, Costs(45.0, 45.0, 600.0))
    assert sorted(start_s for start_s, _ in found.values()) == [0.0, pytest.approx(1045.0)]
