"""Update profiles with the measurements of runs: once per report, and again if the API server fails."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from math import log as ln

from dljob.job.log_fields import log_fields
from dljob.job.observed import JobSeen
from dljob.kube import ApiError, JobKey, Kube
from dljob.reconcile import RunMeasurements, RunMemory

log = logging.getLogger("dljob")
GROWTH = 1.25
"""Factor by which the measured memory of a running script must have grown before its profile is written again. The
exact amount is written at the end of the run."""


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
        self._open_memory: dict[JobKey, RunMemory] = {}
        """For each job, the memory of its script that is not written yet."""
        self._memory_of: dict[JobKey, RunMemory] = {}
        """For each job, the memory that was written last (``_memory_lesson``)."""

    async def learn_all(
        self, job: JobSeen, measurements: RunMeasurements | None, memory: RunMemory | None
    ) -> list[ApiError | None]:
        """Write all that a run has measured. Return the errors of ``learn`` and ``learn_memory``."""
        return [await self.learn(job, measurements), await self.learn_memory(job, memory)]

    async def learn(self, job: JobSeen, measurements: RunMeasurements | None) -> ApiError | None:
        """Write new measurements of a job, or those that could not be written before; None: there are no new ones.

        Return the error if they must be written again later. If the API server refuses them, or if they cannot be used
        because of an error of the operator, this is only logged.
        """
        if measurements is not None and self._learned_from.get(job.key) != _lesson(measurements):
            self._open[job.key] = measurements
        if (found := self._open.get(job.key)) is None:
            return None
        shared = self._shared and found.structure is None  # What a script says about itself is its owner's.
        write = self._kube.update_profiles(found, None if shared else job.namespace, self._now())
        if (error := await self._written(job, write)) is not None:
            return error
        del self._open[job.key]
        self._learned_from[job.key] = _lesson(found)
        return None

    async def learn_memory(self, job: JobSeen, memory: RunMemory | None) -> ApiError | None:
        """Write what a run of a training script has shown about its memory, as ``learn`` does with measurements."""
        if memory is not None and self._memory_of.get(job.key) != _memory_lesson(memory):
            self._open_memory[job.key] = memory
        if (found := self._open_memory.get(job.key)) is None:
            return None
        if (error := await self._written(job, self._kube.update_memory(found, self._now()))) is not None:
            return error
        del self._open_memory[job.key]
        self._memory_of[job.key] = _memory_lesson(found)
        return None

    async def _written(self, job: JobSeen, write: Awaitable[None]) -> ApiError | None:
        """Wait for a write to profiles. Return the error if it must be repeated; log one that would come again."""
        try:
            await write
        except ApiError as error:
            if not error.rejected:
                return error
            about = log_fields(job.key, job)
            log.warning("the measurements of a run are lost, because no profile can be written: %s", error, extra=about)
        except Exception:  # An error in one report must not keep its job from ending.
            log.exception("the measurements of a run are lost, because of an error", extra=log_fields(job.key, job))
        return None

    def begin(self) -> None:
        """Begin to lead: forget what is not written yet, because the operator that led meanwhile may have written it.

        If it has not, the status of the job does not show the end of the run yet, and the next reconcile writes it.
        """
        self._open.clear()
        self._open_memory.clear()

    def forget(self, key: JobKey) -> None:
        """Forget a job that no longer exists."""
        self._open.pop(key, None)
        self._learned_from.pop(key, None)
        self._open_memory.pop(key, None)
        self._memory_of.pop(key, None)


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


def _memory_lesson(memory: RunMemory) -> RunMemory:
    """Return what identifies a measured memory that is written once: the peak only up to a factor ``GROWTH``."""
    peak = memory.point.peak_nbytes
    return replace(memory, point=replace(memory.point, peak_nbytes=peak and int(ln(peak) / ln(GROWTH))))
