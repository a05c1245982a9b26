"""Decide whether a running job gains by a move to another plan, including the cost of its restart."""

from dataclasses import dataclass

MIN_GAIN = 0.1
"""Smallest worthwhile gain, as a fraction of the remaining time. Predictions are often wrong by this fraction."""
MIN_GAIN_S = 60.0
"""Smallest worthwhile gain in seconds. A restart takes 20 s to 60 s, sometimes twice as long as the job's last one."""
MIN_BETWEEN_S = 600.0
"""Seconds between two moves of a job that trains. Restarts of up to a minute cost a tenth of that or less."""
MIN_LEFT_S = 300.0
"""A job with fewer remaining seconds does not move: its result is near, and each restart can fail."""


@dataclass(frozen=True)
class Gain:
    """Predicted seconds until a training ends.

    ``stay_s``: with its current plan. ``move_s``: with another plan, including the restart. ``worthwhile``: True if the
    job should move.
    """

    stay_s: float
    move_s: float

    @property
    def seconds(self) -> float:
        return self.stay_s - self.move_s

    @property
    def worthwhile(self) -> bool:
        return self.stay_s >= MIN_LEFT_S and self.seconds >= max(MIN_GAIN_S, MIN_GAIN * self.stay_s)


def gain(
    left: int, step_s: float, *, predicted_s: float, other_s: float, restart_s: float, lost_steps: int = 0
) -> Gain:
    """Predict the remaining time of a job if it stays with its plan, and if it moves to another plan.

    ``left``: number of remaining steps. ``step_s``: measured step time. ``predicted_s``, ``other_s``: predicted step
    times of the current and of the other plan. If the job is slower than predicted, the other plan is assumed to be
    slower by the same factor. A job that is faster than predicted is not assumed to be faster with the other plan.
    ``restart_s``: duration of the restart. ``lost_steps``: steps since the last checkpoint, which may have to be
    repeated. All times are in seconds.
    """
    slower = max(1.0, step_s / predicted_s) if predicted_s > 0 else 1.0
    return Gain(left * step_s, restart_s + (left + lost_steps) * other_s * slower)
