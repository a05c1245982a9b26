"""Decide whether a running job moves to another plan to meet its deadline, or to use less energy or money.

A plan of a job that has begun concerns its remaining steps and the time to its deadline. The planner, however, predicts
whole trainings. ``pace_deadline_s`` therefore returns the deadline of a whole training at the same pace.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import exp, floor, isinf, log

from dljob.scheduling.gain import MIN_GAIN, MIN_GAIN_S, MIN_LEFT_S

MEASURED_P90 = 1.1
"""Ratio of the 90th percentile to the median of the remaining time, if the step time was measured in this run.

A measured step time changes during a run because of checkpoints, which are written meanwhile, and other load. This is
less uncertain than a prediction. A larger ratio moves jobs that would have ended in time; a smaller one moves late jobs
too late."""
RESERVE = 0.05
"""Part of the time to the deadline that a less expensive plan must leave, so that it is not late at once."""
MIN_SAVING = MIN_GAIN
"""Smallest worthwhile saving, as a fraction of the energy or cost of the remaining training."""
PACE_STEP = 1.05
"""Ratio of two neighbouring values of ``pace_deadline_s``.

Rounding keeps the question to the planner equal while time passes, so that a job is not planned again each second."""


class Move(StrEnum):
    """The reason why a job moves to another plan."""

    LATE = "Late"
    LESS_EXPENSIVE = "LessExpensive"


@dataclass(frozen=True)
class Rest:
    """The rest of a training with one plan.

    ``p50_s``, ``p90_s``: median and 90th percentile of the seconds until its end, including a restart. ``expense``:
    what the job minimizes, over this time (J, US dollars or g CO2).
    """

    p50_s: float
    p90_s: float
    expense: float


def rest_with_measured(left: int, step_s: float, predicted_spread: float, per_s: float) -> Rest:
    """Return the rest of a training that stays with its plan.

    ``left``: number of remaining steps. ``step_s``: measured step time in seconds, with its part of evaluations,
    checkpoints and expected interruptions. ``predicted_spread``: p90 divided by median of the predicted step time.
    ``per_s``: expense of the plan per second.
    """
    p50_s = left * step_s
    return Rest(p50_s, p50_s * min(MEASURED_P90, max(1.0, predicted_spread)), p50_s * per_s)


def rest_after_move(
    left: int, lost_steps: int, step_s: float, step_p90_s: float, restart_s: float, per_s: float, slower: float = 1.0
) -> Rest:
    """Return the rest of a training that moves to another plan.

    ``left``: number of remaining steps. ``lost_steps``: steps since the last checkpoint, which may have to be repeated.
    ``step_s``, ``step_p90_s``: predicted median and 90th percentile of the step time, with its part of evaluations,
    checkpoints and expected interruptions. ``restart_s``: duration of the restart. ``per_s``: expense of the plan per
    second. ``slower``: measured step time divided by the predicted one, if the same deviation is expected of the other
    plan. All times are in seconds.
    """
    steps = (left + lost_steps) * slower
    p50_s = restart_s + steps * step_s
    return Rest(p50_s, restart_s + steps * max(step_s, step_p90_s), p50_s * per_s)


def move_reason(stay: Rest, other: Rest, available_s: float | None) -> Move | None:
    """Return why a job should move from the plan of ``stay`` to that of ``other``; None if it should stay.

    ``available_s``: seconds to the deadline; None without one. A late job moves if it then meets the deadline, or else
    if it ends notably sooner. Any other job moves if this saves the fraction ``MIN_SAVING`` of the remaining expense,
    restart included, and if it still meets the deadline with ``RESERVE``.
    """
    if available_s is not None and stay.p90_s > available_s:
        if other.p90_s <= available_s:
            return Move.LATE
        enough_s = max(MIN_GAIN_S, MIN_GAIN * stay.p50_s)
        sooner = stay.p50_s - other.p50_s >= enough_s and other.p90_s < stay.p90_s
        return Move.LATE if sooner and stay.p50_s >= MIN_LEFT_S else None
    if stay.p50_s < MIN_LEFT_S or stay.expense - other.expense < MIN_SAVING * stay.expense or stay.expense <= 0:
        return None
    in_time = available_s is None or other.p90_s <= (1 - RESERVE) * available_s
    return Move.LESS_EXPENSIVE if in_time else None


def pace_deadline_s(
    total: int, left: int, available_s: float, restart_s: float = 0.0, lost_steps: int = 0, slower: float = 1.0
) -> float:
    """Return the seconds that a whole training may take by prediction if the job is to meet its deadline.

    The job has ``left`` of ``total`` steps left and ``available_s`` seconds to the deadline. In this time, it must also
    restart for ``restart_s`` seconds and repeat ``lost_steps`` steps. ``slower``: factor by which steps take longer
    than predicted. The result is at least 1, and rounded down to a power of ``PACE_STEP``.
    """
    exact_s = max(0.0, available_s - restart_s) * total / max(1, left + lost_steps) / slower
    return 1.0 if exact_s <= 1 else exp(floor(log(exact_s) / log(PACE_STEP) + 1e-9) * log(PACE_STEP))


def pace_changed(before_s: float | None, now_s: float | None) -> bool:
    """Return True if two values of ``pace_deadline_s`` differ so much that another plan may be better.

    Neighbouring values do not differ enough, because rounding alone may cause their difference. None: no deadline.
    Infinite: it has passed.
    """
    if now_s is None or before_s is None:
        return now_s is not None
    if isinf(now_s) or isinf(before_s):
        return now_s != before_s
    return abs(log(now_s / before_s)) > 1.5 * log(PACE_STEP)
