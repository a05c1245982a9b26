"""The predicted remaining time of a job, for forecasts of when its devices become free."""

from dljob.api import DLJobStatus, Predicted


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


def _spread(predicted: Predicted) -> float:
    """Return the ratio of the 90th percentile to the median, which is at least 1."""
    return max(1.0, predicted.step_seconds_p90 / predicted.step_seconds) if predicted.step_seconds > 0 else 1.0
