"""Predict the remaining time of a job, and the seconds that it loses if it is preempted and starts again.

The queue, preemption, forecasts and ``kubectl get dljobs`` (by ``status.build``) use the same formula, ``steps_time``.
"""

from datetime import datetime

from dljob.api import ConditionStatus, DLJobStatus, LastCheckpoint, Phase, Predicted
from dljob.scheduling import UNKNOWN, Interval, interval

OVER = Interval(0.0, 0.0, 0.0)

RESTART_S = 60.0
"""Smallest estimate for the seconds of a restart, and the estimate if the job's start was not measured.

In a restart, the pods write a checkpoint, stop and start again, and the ranks resume training."""


def run_p90_s(predicted: Predicted) -> float | None:
    """Return the 90th percentile of the seconds of a whole training; None if the prediction has no times."""
    if predicted.total_seconds <= 0 or predicted.step_seconds <= 0:
        return None
    return predicted.total_seconds * _spread(predicted)


def run_time(predicted: Predicted, status: DLJobStatus) -> Interval:
    """Return percentiles (10th, 50th, 90th) of the seconds that a waiting job will run after its start.

    ``predicted``: the prediction for its whole training. If it has no times, return UNKNOWN (infinite percentiles).
    ``status``: status of the job. If the job has run before, it continues from its last checkpoint, so the steps before
    that are not included. Its new pods fetch the data again.
    """
    if run_p90_s(predicted) is None:
        return UNKNOWN
    saved, done = status.last_checkpoint, status.progress
    left = 1.0 - min(1.0, saved_step(saved) / done.steps) if done is not None and done.steps else 1.0
    rest_s = predicted.total_seconds - predicted.fetch_seconds
    return interval(predicted.fetch_seconds + rest_s * left, _spread(predicted))


def left_part(status: DLJobStatus, *, running: bool) -> float:
    """Return the fraction (0 to 1) of the training's steps that is left; 1 if the job has reported no steps.

    ``running``: True: count from the job's current step. False: count from its last checkpoint, because the job stopped
    or must stop.
    """
    done, saved = status.progress, status.last_checkpoint
    if done is None or not done.steps:
        return 1.0
    return max(0.0, 1.0 - (done.step if running else saved_step(saved)) / done.steps)


def saved_step(saved: LastCheckpoint | None) -> int:
    """Return the step from which the training resumes; 0 without a checkpoint, and if its step is unknown."""
    return saved.step or 0 if saved is not None else 0


def steps_since(saved: LastCheckpoint | None, step: int, unix_s: float, step_s: float) -> float:
    """Return the number of steps since the last checkpoint ``saved``, which a job repeats if it stops now.

    ``step``: the present step, at the Unix time ``unix_s``. ``step_s``: seconds of a step. If the step of the
    checkpoint is unknown, count the steps since its time.
    """
    if saved is None or saved.step is not None or step_s <= 0:
        return max(0.0, step - saved_step(saved))
    return min(float(step), max(0.0, unix_s - saved.time.timestamp()) / step_s)


def slowdown(status: DLJobStatus) -> float:
    """Return the ratio of the measured to the predicted step time, at least 1; 1 if no step time was measured."""
    if status.measured is None or status.plan is None or status.plan.predicted.step_seconds <= 0:
        return 1.0
    return max(1.0, status.measured.step_seconds / status.plan.predicted.step_seconds)


def steps_time(steps: int, step_s: float, predicted_s: float, predicted_p90_s: float) -> Interval:
    """Return percentiles (10th, 50th, 90th) of the seconds of ``steps`` steps.

    ``step_s``: median seconds of a step, measured where possible, with its part of the evaluations, checkpoints and
    expected interruptions (``Predicted.per_step_s``).
    ``predicted_s``, ``predicted_p90_s``: median and 90th percentile of the predicted step time, whose ratio is the
    relative uncertainty; 0 if nothing is predicted.
    """
    return interval(steps * step_s, _ratio(predicted_s, predicted_p90_s))


def remaining(status: DLJobStatus) -> Interval:
    """Return percentiles of the seconds that a job with this status still needs to train, without any wait for devices.

    A job that has ended needs 0 s. If the number of steps is not known yet, return the time of the whole training.
    Return UNKNOWN (infinite) if there is no plan or no step time. A measured step time replaces the predicted
    one. The relative uncertainty is that of the prediction. Evaluations, checkpoints and, on spot nodes, the expected
    interruptions are included.
    """
    if status.phase in (Phase.COMPLETE, Phase.FAILED):
        return OVER
    if status.plan is None:
        return UNKNOWN
    predicted, done = status.plan.predicted, status.progress
    if done is None or done.steps is None:
        return UNKNOWN if run_p90_s(predicted) is None else interval(predicted.total_seconds, _spread(predicted))
    step_s = status.measured.step_seconds if status.measured else predicted.step_seconds
    if step_s <= 0:
        return UNKNOWN
    left = done.steps - done.step
    each_s = predicted.per_step_s(step_s, done.steps)
    return steps_time(left, each_s, predicted.step_seconds, predicted.step_seconds_p90)


def remaining_p90_s(status: DLJobStatus) -> float | None:
    """Return the 90th percentile of the remaining seconds of a job with this status; None if it is unknown."""
    found = remaining(status)
    return None if found is UNKNOWN else found.p90


def lost_s(status: DLJobStatus, now: datetime) -> float:
    """Return the seconds of training since the last checkpoint, which a job loses if it stops without a checkpoint.

    Return 0 for a job without a plan. If a job reports no steps, such as a script for torchrun, it may lose everything
    since it began to run, or since its last upload. Return the seconds since then, or 0 if it does not run.
    """
    if status.plan is None:
        return 0.0
    if status.progress is None:
        began = next((c for c in status.conditions if c.type == "Running" and c.status is ConditionStatus.TRUE), None)
        if began is None:
            return 0.0
        since = began.last_transition_time
        if status.last_checkpoint is not None:
            since = max(since, status.last_checkpoint.time)
        return max(0.0, (now - since).total_seconds())
    step_s = status.measured.step_seconds if status.measured else status.plan.predicted.step_seconds
    return steps_since(status.last_checkpoint, status.progress.step, now.timestamp(), step_s) * step_s


def start_s(status: DLJobStatus) -> float | None:
    """Return the measured seconds of the job's start without its wait for admission; None if it was not measured."""
    startup = status.startup
    if startup is None or startup.total_seconds is None:
        return None
    return max(0.0, startup.total_seconds - (startup.admission_seconds or 0.0))


def start_without_data_s(status: DLJobStatus) -> float | None:
    """Return ``start_s`` without the time in which the pods fetched the job's data, which is a part of its run time.

    Ranks fetch shards of the data themselves. Nobody measures that time, which the result therefore includes.
    """
    found = start_s(status)
    if found is None or status.startup is None:
        return None
    return max(0.0, found - (status.startup.fetch_seconds or 0.0))


def restart_s(status: DLJobStatus) -> float:
    """Estimate the seconds of a restart, which a job loses if it stops and later continues from its checkpoint.

    The estimate is the measured duration of the job's start without its wait for admission, and at least ``RESTART_S``.
    If the start was not measured, it is ``RESTART_S``.
    """
    return max(RESTART_S, start_s(status) or 0.0)


def _spread(predicted: Predicted) -> float:
    return _ratio(predicted.step_seconds, predicted.step_seconds_p90)


def _ratio(predicted_s: float, predicted_p90_s: float) -> float:
    """Return the 90th percentile of the predicted step time divided by its median; at least 1, and 1 if unknown."""
    return max(1.0, predicted_p90_s / predicted_s) if predicted_s > 0 else 1.0
