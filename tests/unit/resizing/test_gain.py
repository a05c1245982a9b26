"""Laws of the gain of a move: it repays its cost, and more remaining work never speaks against it."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dljob.scheduling import MIN_LEFT_S, Gain, gain
from dljob.scheduling.gain import MIN_GAIN, MIN_GAIN_S

seconds = st.floats(1e-4, 100)
moves = st.fixed_dictionaries(
    {
        "left": st.integers(0, 10**6),
        "step_s": seconds,
        "predicted_s": seconds,
        "other_s": seconds,
        "restart_s": st.floats(0, 1000),
        "lost_steps": st.integers(0, 10**4),
    }
)


@given(moves)
def test_no_move_costs_more_than_it_gains(move: dict[str, Any]) -> None:
    found = gain(**move)
    left_s, cost_s = move["left"] * move["step_s"], move["restart_s"] + move["lost_steps"] * move["other_s"]
    if found.worthwhile:
        assert move["left"] * (move["step_s"] - move["other_s"]) >= cost_s
        assert found.seconds >= MIN_GAIN_S and found.seconds >= MIN_GAIN * left_s
        assert left_s >= MIN_LEFT_S


@given(moves, st.integers(0, 10**6))
def test_worthwhile_move_is_worthwhile_with_more_remaining_steps(move: dict[str, Any], more: int) -> None:
    if gain(**move).worthwhile:
        # The smallest gain is a float, so that a gain at the limit may round either way.
        later = gain(**{**move, "left": move["left"] + more})
        assert Gain(later.stay_s * (1 + 1e-9), later.move_s * (1 - 1e-9)).worthwhile


@given(moves, st.floats(0, 1000), st.integers(0, 10**4))
def test_costs_never_speak_for_a_move(move: dict[str, Any], restart_s: float, lost_steps: int) -> None:
    dearer = {**move, "restart_s": move["restart_s"] + restart_s, "lost_steps": move["lost_steps"] + lost_steps}
    assert gain(**move).worthwhile or not gain(**dearer).worthwhile


@given(moves)
def test_equal_plan_is_never_worthwhile(move: dict[str, Any]) -> None:
    assert not gain(**{**move, "other_s": move["predicted_s"]}).worthwhile


def test_job_that_is_slower_than_predicted_is_so_with_the_other_plan_too() -> None:
    assert gain(1000, 4.0, predicted_s=2.0, other_s=1.0, restart_s=20.0) == Gain(4000.0, 2020.0)
    assert gain(1000, 1.0, predicted_s=2.0, other_s=0.5, restart_s=20.0) == Gain(1000.0, 520.0)
    assert gain(1000, 1.0, predicted_s=0.0, other_s=0.5, restart_s=20.0) == Gain(1000.0, 520.0)
