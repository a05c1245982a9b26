"""The predicted remaining time of a job, and what a preemption loses of its time."""

from dljob.api import DLJobStatus, Predicted

RESTART_S = 60.0
"""Seconds of a restart that was not measured: pods stop with a checkpoint and start again, and the ranks resume."""


def run_p90_s(predicted: Predicted) -> float | None:
    """Return the 90th percentile of the time of a whole training in seconds; None if it is unknown."""
    if predicted.total_seconds <= 0 or predicted.step_seconds <= 0:
        return None
    return predicted.total_seconds * _spread(predicted)


def remaining_p90_s(status: DLJobStatus) -> float | None:
    """Return the 90th percentile of the remaining seconds of a job with this status; None if it is unknown.

    The measured step time replaces the predicted one. Its relative uncertainty is that of the prediction.
    """
    if status.plan is None:
        return None
    predicted, done = status.plan.predicted, status.progress
    if done is None:
        return run_p90_s(predicted)
    step_s = status.measured.step_seconds if status.measured else predicted.step_seconds
    return (done.steps - done.step) * step_s * _spread(predicted) if step_s > 0 else None


def lost_s(status: DLJobStatus) -> float:
    """Return the training time in seconds since the last checkpoint, which a job loses if it writes no other one."""
    if status.progress is None or status.plan is None:
        return 0.0
    saved = status.last_checkpoint.step if status.last_checkpoint is not None else 0
    step_s = status.measured.step_seconds if status.measured else status.plan.predicted.step_seconds
    return max(0, status.progress.step - saved) * step_s


def restart_s(status: DLJobStatus) -> float:
    """Return the seconds from the admission of a job to its next step, as long as its start took; at least a minute."""
    startup = status.startup
    if startup is None or startup.total_seconds is None:
        return RESTART_S
    return max(RESTART_S, startup.total_seconds - (startup.admission_seconds or 0.0))


def _spread(predicted: Predicted) -> float:
    """Return the ratio of the 90th percentile to the median, which is at least 1."""
    return max(1.0, predicted.step_seconds_p90 / predicted.step_seconds) if predicted.step_seconds > 0 else 1.0
