"""Decide whether a running job gains by a move to another plan, including the cost of its restart."""

from dataclasses import dataclass

MIN_GAIN = 0.1
"""Smallest worthwhile gain, as a fraction of the remaining time. Predictions are often wrong by this fraction."""
MIN_GAIN_S = 60.0
"""Smallest worthwhile gain in seconds. A restart takes 20 s to 60 s, and sometimes twice as long as the one before."""
MIN_LEFT_S = 300.0
"""A job with less than this remaining time does not move: its result is near, and each restart can fail."""


@dataclass(frozen=True)
class Gain:
    """Predicted seconds until the end of a training: with its current plan, and with another one after a restart."""

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
    """Return what a job with ``left`` remaining steps gains by a move to another plan.

    ``step_s``: measured step time. ``predicted_s``, ``other_s``: predicted step times of the current and of the other
    plan. If the job is slower than predicted, the other plan is assumed to be slower by the same factor. A job that is
    faster than predicted is not assumed to be faster with the other plan. ``lost_steps``: steps since the last
    checkpoint, which may have to be repeated.
    """
    slower = max(1.0, step_s / predicted_s) if predicted_s > 0 else 1.0
    return Gain(left * step_s, restart_s + (left + lost_steps) * other_s * slower)
