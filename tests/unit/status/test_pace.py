"""Tests of the limit for writes of progress."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.status.pace import BURST, WAITING_BURST, WAITING_SHARE, ProgressPace, only_progress

RUNNING = {"type": "Running", "status": "True", "reason": "Running", "message": "step 1 of 9", "observedGeneration": 1}
STATUS: dict[str, Any] = {"phase": "Running", "conditions": [RUNNING], "progress": {"step": 1}, "restarts": 0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"progress": {"step": 2}, "eta": "2026-01-01T00:00:00Z"}, True),
        ({"conditions": [RUNNING | {"message": "step 2 of 9"}]}, True),
        ({"conditions": [RUNNING | {"reason": "Recovering"}]}, False),
        ({"conditions": [RUNNING | {"status": "False"}]}, False),
        ({"conditions": [RUNNING | {"observedGeneration": 2}]}, False),
        ({"conditions": [RUNNING, RUNNING | {"type": "Resizing"}]}, False),
        ({"progress": {"step": 2}, "phase": "Complete"}, False),
        ({"restarts": 1}, False),
        ({"ready": "1/2"}, False),
        ({"queue": {"position": 11, "jobs": 30}}, True),
        ({"queue": {"position": 10, "jobs": 30}}, False),
    ],
)
def test_only_what_changes_while_a_job_trains_is_progress(changes: dict[str, Any], expected: bool) -> None:
    assert only_progress(STATUS, STATUS | changes) is expected


@given(st.floats(0.1, 100), st.lists(st.tuples(st.floats(0, 5), st.integers(0, 99)), max_size=300))
def test_writes_never_exceed_the_rate_and_the_burst(rate: float, asked: list[tuple[float, int]]) -> None:
    now_s, written = 0.0, list[float]()
    pace = ProgressPace(rate, lambda: now_s)
    for after_s, job in asked:
        now_s += after_s
        if pace.wait_s(job) == 0:
            written.append(now_s)
    for i, first_s in enumerate(written):
        assert len(written) - i <= BURST + rate * (written[-1] - first_s) + 1


@given(st.floats(0.1, 100), st.integers(1, 200))
def test_each_job_writes_when_its_turn_comes_whatever_it_reports_meanwhile(rate: float, jobs: int) -> None:
    now_s = 0.0
    pace = ProgressPace(rate, lambda: now_s)
    waits_s = [pace.wait_s(job) for job in range(jobs)]
    assert waits_s[:BURST] == [0.0] * min(jobs, BURST)
    assert waits_s == sorted(waits_s) and waits_s[-1] <= max(0.0, (jobs - BURST + 1) / rate) + 1e-6
    for job, wait_s in enumerate(waits_s):
        if wait_s:
            assert pace.wait_s(job) == pytest.approx(wait_s - now_s)
            now_s = wait_s + 1e-9
            assert pace.wait_s(job) == 0.0


@given(st.integers(0, 300), st.integers(0, 300))
def test_jobs_that_wait_never_delay_those_that_run(waiting: int, running: int) -> None:
    """Fixed bug: each job that ended changed the places of all that wait, and reports were shown seconds later."""
    alone, both = ProgressPace(10.0, lambda: 0.0), ProgressPace(10.0, lambda: 0.0)
    waits_s = [both.wait_s(("waits", i), waits=True) for i in range(waiting)]
    assert [both.wait_s(i) for i in range(running)] == [alone.wait_s(i) for i in range(running)]
    assert waits_s[-1:] <= [max(0.0, (waiting - WAITING_BURST + 1) / (10.0 * WAITING_SHARE))]


def test_a_job_that_starts_gives_up_its_turn_among_those_that_wait() -> None:
    pace = ProgressPace(1.0, lambda: 0.0, burst=1)
    assert [pace.wait_s(job, waits=True) for job in ("first", "second")] == [0.0, 2.0]
    assert [pace.wait_s(job) for job in ("other", "second")] == [0.0, 1.0]
    assert pace.wait_s("second", waits=True) == 4.0


def test_a_job_that_wrote_something_else_meanwhile_gets_a_new_turn() -> None:
    pace = ProgressPace(1.0, lambda: 0.0)
    for job in range(BURST):
        assert pace.wait_s(job) == 0.0
    assert pace.wait_s("late") == pytest.approx(1.0)
    pace.forget("late")
    assert pace.wait_s("late") == pytest.approx(2.0)
