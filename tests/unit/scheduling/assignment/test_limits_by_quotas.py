"""All jobs of an owner together use no more than its quotas allow."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.scheduling.assignment import Candidate, Held, Option, QuotaAmounts, assign_all, exceeds, share, sum_of
from dljob.scheduling.forecasting.joint_simulation import Costs, JointJob, simulate_joint
from support.joint_jobs import FREE, JOBS

SCALES = tuple(Option("t4", 1, count, 1200 / count, (count,)) for count in (1, 2, 4, 8))
"""Plans of a job that takes 1,200, 600, 300 or 150 s. A quota limits the number of devices."""
ALLOWED = st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(0, 3))


def limited(options: tuple[Option, ...]) -> tuple[Option, ...]:
    """Return options that need devices, pods and, if they have several pods, another object."""
    return tuple(each.with_needs((each.devices, each.nodes, int(each.nodes > 1))) for each in options)


@given(JOBS, JOBS, FREE, ALLOWED, st.integers(0, 7))
def test_no_owner_uses_more_than_its_quotas_allow(
    mine: list[tuple[Option, ...]],
    others: list[tuple[Option, ...]],
    free: dict[str, int],
    allowed: QuotaAmounts,
    urgent: int,
) -> None:
    own = [Candidate(int(i < urgent), limited(options), "a", allowed=allowed) for i, options in enumerate(mine)]
    jobs = sorted([*own, *(Candidate(0, options, "b") for options in others)], key=lambda job: -job.priority)
    parts = share(jobs, free)
    left, used = Counter(free), sum_of(part.needs for part in parts if part is not None)
    for part in parts:
        if part is not None:
            left[part.device] -= part.devices
    assert not exceeds(used, (), allowed) and all(count >= 0 for count in left.values())
    for job, part in zip(jobs, parts, strict=True):  # Nothing is left over that a job may use.
        fitting = [each for each in job.options if each.devices <= left[each.device]]
        assert part is not None or all(exceeds(each.needs, used, job.allowed) for each in fitting)


@pytest.mark.parametrize(
    ("allowed", "expected"), [((), [1, 1, 1, 1, 4]), ((2,), [1, 1, 0, 0, 4]), ((0,), [0, 0, 0, 0, 8])]
)
def test_what_quotas_do_not_allow_to_an_owner_goes_to_others(allowed: QuotaAmounts, expected: list[int]) -> None:
    short = Candidate(0, (Option("t4", 1, 1, 100.0, (1,)),), "a", allowed=allowed)
    jobs = [short, short, short, short, Candidate(0, SCALES, "b")]
    parts = share(jobs, {"t4": 8})
    assert [part.devices if part is not None else 0 for part in parts] == expected


def test_each_job_may_use_what_the_quotas_of_its_vendor_allow() -> None:
    """Two quotas, of one T4 and one MI300X."""
    either = Candidate(
        0, (Option("t4", 1, 1, 100.0, (1, 0)), Option("mi300x", 1, 1, 50.0, (0, 1))), "a", allowed=(1, 1)
    )
    parts = share([either] * 3, {"t4": 4, "mi300x": 4})
    assert sorted(part.device if part is not None else "" for part in parts) == ["", "mi300x", "t4"]


def test_jobs_do_not_exchange_devices_above_a_quota() -> None:
    """The first job gains from the T4, the second from the A100, but the quota allows no T4."""
    first = Candidate(0, (Option("a100", 1, 1, 100.0, (0,)), Option("t4", 1, 1, 50.0, (1,))), "a", allowed=(0,))
    second = Candidate(0, (Option("t4", 1, 1, 1000.0), Option("a100", 1, 1, 400.0)), "b")
    parts = share([first, second], {"t4": 1, "a100": 1})
    assert [part and part.device for part in parts] == ["a100", "t4"]


def test_running_jobs_keep_what_they_hold_above_a_quota() -> None:
    """The quota was lowered. Their devices are not those of others."""
    runs = Candidate(0, SCALES, "a", allowed=(1,))
    jobs = [runs, runs, Candidate(0, SCALES, "b")]
    held = [Held({"t4": 2}, 600.0, uses=(2,)), Held({"t4": 2}, 600.0, uses=(2,)), Held({})]
    found = assign_all(jobs, held, {"t4": 8}, 45.0)
    assert [part and part.devices for part in found.parts] == [2, 2, 4] and not any(found.moves)


def test_a_quota_below_its_usage_is_in_the_way_only_of_jobs_that_need_more_of_it() -> None:
    other = Candidate(0, (Option("t4", 1, 1, 100.0, (0, 1)),), "a", allowed=(1, 1))
    jobs = [Candidate(0, SCALES[:2], "a", allowed=(1, 1)), other]
    held = [Held({"t4": 2}, 600.0, uses=(2, 0)), Held({})]
    found = assign_all(jobs, held, {"t4": 8}, 45.0)
    assert [part and part.devices for part in found.parts] == [2, 1]


def test_forecast_of_jobs_that_a_quota_admits_one_after_another() -> None:
    """Two devices are free, and each job takes 1,000 s after a start of 45 s."""
    one = (Option("t4", 1, 1, 1000.0, (1,)),)
    jobs = [JointJob(("a", name), 0, one, allowed=(1,)) for name in ("first", "second")]
    found = simulate_joint(jobs, [1.0, 1.0], {"t4": 2}, Costs(45.0, 45.0, 600.0))
    assert sorted(start_s for start_s, _ in found.values()) == [0.0, pytest.approx(1045.0)]


def test_forecast_of_a_job_that_waits_for_the_quota_of_a_running_one() -> None:
    one = (Option("t4", 1, 1, 1000.0, (1,)),)
    runs = JointJob(("a", "runs"), 0, one, held=Held({"t4": 1}, 300.0, uses=(1,)), allowed=(1,))
    found = simulate_joint(
        [runs, JointJob(("a", "waits"), 0, one, allowed=(1,))], [1.0, 1.0], {"t4": 1}, Costs(45.0, 45.0, 600.0)
    )
    assert found["a", "waits"][0] == pytest.approx(300.0)
