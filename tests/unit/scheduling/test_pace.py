"""Tests of moves of running jobs that have a deadline, or that minimize energy or cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dljob.scheduling import Move, Rest, move_reason, pace_changed, pace_deadline_s, rest_after_move, rest_with_measured

STAY = Rest(1000, 1100, 1e6)
SECONDS = st.floats(1, 1e6)


@pytest.mark.parametrize(
    ("other", "available_s", "expected"),
    [
        (Rest(500, 600, 5e6), 1050, Move.LATE),
        (Rest(800, 1090, 5e6), 1050, Move.LATE),
        (Rest(950, 1060, 1e5), 1050, None),
        (Rest(500, 600, 5e6), 1101, None),
        (Rest(900, 1100, 8e5), 1200, Move.LESS_EXPENSIVE),
        (Rest(900, 1100, 9.1e5), 1200, None),
        (Rest(900, 1190, 1e5), 1200, None),
        (Rest(9000, 9000, 8e5), None, Move.LESS_EXPENSIVE),
        (Rest(500, 500, 1e6), None, None),
    ],
    ids=[
        "late, and the other plan meets it", "late both ways, but notably sooner", "late both ways, hardly sooner",
        "in time: no faster plan for more", "less expensive", "saves too little", "would leave no reserve",
        "no deadline: slower but less expensive", "no deadline: faster for the same expense",
    ],
)  # fmt: skip
def test_reason(other: Rest, available_s: float | None, expected: Move | None) -> None:
    assert move_reason(STAY, other, available_s) is expected


def test_short_rest_moves_only_to_meet_the_deadline() -> None:
    stay = Rest(200, 220, 1e6)
    assert move_reason(stay, Rest(100, 120, 1e3), 300) is None
    assert move_reason(stay, Rest(100, 120, 1e7), 210) is Move.LATE
    assert move_reason(stay, Rest(100, 180, 1e7), 150) is None


@given(SECONDS, SECONDS, SECONDS, st.one_of(st.none(), SECONDS))
def test_job_never_moves_back_and_forth(step_s: float, other_s: float, restart_s: float, available_s: float) -> None:
    """With unchanged predictions, the move back repays nothing, because every move costs a restart."""
    left, here_W, there_W = 1000, 100.0, 150.0
    stay = rest_with_measured(left, step_s, 1.0, here_W)
    other = rest_after_move(left, 0, other_s, other_s, restart_s, there_W)
    if move_reason(stay, other, available_s) is None:
        return
    moved = rest_with_measured(left, other_s, 1.0, there_W)
    back = rest_after_move(left, 0, step_s, step_s, restart_s, here_W)
    rest_s = None if available_s is None else available_s - restart_s
    assert move_reason(moved, back, rest_s) is None


@given(st.integers(1, 10**6), st.floats(0.01, 1), SECONDS, st.floats(0, 100), st.floats(1, 10))
def test_plan_that_meets_the_pace_meets_the_deadline(
    total: int, part: float, available_s: float, restart_s: float, slower: float
) -> None:
    left = max(1, int(total * part))
    found_s = pace_deadline_s(total, left, available_s, restart_s, slower=slower)
    if found_s > 1:
        step_s = found_s / total
        assert restart_s + left * step_s * slower <= available_s * (1 + 1e-9)
        assert not pace_changed(found_s, found_s)


@given(st.integers(1, 999))
def test_pace_of_a_job_on_schedule_does_not_change(done: int) -> None:
    """A job that is on schedule is not planned again, however much time passes."""
    left = 1000 - done
    assert not pace_changed(pace_deadline_s(1000, 1000, 5000.0), pace_deadline_s(1000, left, 5.0 * left))


def test_pace_of_a_job_that_slows_down_changes() -> None:
    before_s = pace_deadline_s(1000, 1000, 5000.0)
    assert pace_changed(before_s, pace_deadline_s(1000, 500, 2500.0, slower=1.5))
    assert pace_changed(before_s, pace_deadline_s(1000, 200, 2500.0)), "it is early"
    assert pace_changed(None, before_s) and not pace_changed(before_s, None)
    assert pace_deadline_s(1000, 500, -10.0) == 1.0
