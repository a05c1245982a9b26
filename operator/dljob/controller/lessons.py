"""Update profiles with the measurements of runs: once per report, and again if the API server fails."""

import logging
from collections.abc import Callable
from datetime import datetime

from dljob.job.log_fields import log_fields
from dljob.job.observed import JobSeen
from dljob.kube import ApiError, JobKey, Kube
from dljob.reconcile import RunMeasurements

log = logging.getLogger("dljob")


class Lessons:
    """Writes measurements to profiles. If a write fails, it is repeated with the next reconcile of the job.

    A profile that cannot be written delays neither the status of a job nor its end. Use it in one event loop only.
    """

    def __init__(self, kube: Kube, now: Callable[[], datetime], *, shared: bool) -> None:
        """``shared``: True: plans use the measurements of all namespaces. False: only of their own namespace."""
        self._kube, self._now, self._shared = kube, now, shared
        self._open: dict[JobKey, RunMeasurements] = {}
        """For each job, the measurements that are not written yet."""
        self._learned_from: dict[JobKey, tuple[object, ...]] = {}
        """For each job, the fields that identify the last run report whose measurements were written to profiles."""

    async def learn(self, job: JobSeen, measurements: RunMeasurements | None) -> ApiError | None:
        """Write new measurements of a job, or those that could not be written before; None: there are no new ones.

        Return the error if they must be written again later. If the API server refuses them, or if they cannot be used
        because of an error of the operator, this is only logged.
        """
        if measurements is not None and self._learned_from.get(job.key) != _lesson(measurements):
            self._open[job.key] = measurements
        if (found := self._open.get(job.key)) is None:
            return None
        try:
            shared = self._shared and found.structure is None  # What a script says about itself is its owner's.
            await self._kube.update_profiles(found, None if shared else job.namespace, self._now())
        except ApiError as error:
            if not error.rejected:
                return error
            about = log_fields(job.key, job)
            log.warning("the measurements of a run are lost, because no profile can be written: %s", error, extra=about)
        except Exception:  # An error in one report must not keep its job from ending.
            log.exception("the measurements of a run are lost, because of an error", extra=log_fields(job.key, job))
        del self._open[job.key]
        self._learned_from[job.key] = _lesson(found)
        return None

    def forget(self, key: JobKey) -> None:
        """Forget a job that no longer exists."""
        self._open.pop(key, None)
        self._learned_from.pop(key, None)


def _lesson(measurements: RunMeasurements) -> tuple[object, ...]:
    """Return what identifies measurements that are written once.

    A running script shows its structure in every report. It is written when the script starts, when its first steps are
    timed, and when it ends, because each change of a profile makes the operator plan all waiting jobs again. Scripts
    with equal commands may differ, for example by their environment: their jobs would otherwise replace each other's
    structure all the time.
    """
    report, structure = measurements.report, measurements.structure
    if structure is not None:
        return report.uid, report.plan_number, report.phase, structure.step_seconds is not None
    return report.uid, report.plan_number, report.phase, report.step, measurements.data
