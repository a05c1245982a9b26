"""The jobs of recent assignments. Forecasts expect jobs like them to come again."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dljob.controller.planning.joint.candidates import Candidates
from dljob.controller.planning.joint.options import Known
from dljob.controller.planning.joint.state import PlanningState
from dljob.kube import JobKey
from dljob.reconcile import ParsedJob
from dljob.scheduling.assignment import Option
from dljob.scheduling.forecasting.forecast import WINDOW_S
from dljob.scheduling.forecasting.joint_forecast import RecentJoint
from dljob.scheduling.forecasting.joint_simulation import JointJob


@dataclass(frozen=True, slots=True)
class Seen:
    """A job in an assignment. ``preempts``: running jobs of a lower priority may stop for it."""

    known: Known
    priority: int
    preempts: bool


class RecentJobs:
    """Stores the jobs of recent assignments. Use it in one event loop only."""

    def __init__(self, state: PlanningState, candidates: Candidates) -> None:
        self._cache, self._queue, self._now, self._candidates = state.cache, state.queue, state.now, candidates
        self._seen: dict[JobKey, Seen] = {}

    def clear(self) -> None:
        self._seen.clear()

    def note(self, jobs: Iterable[tuple[JobKey, ParsedJob]], known: Mapping[JobKey, Known]) -> None:
        """Store the jobs of an assignment, as they are planned. ``known``: their options.

        A job that keeps its number of ranks stays as it was before: a new job may have any number.
        """
        for key, question in jobs:
            if question.bound_ranks is None or key not in self._seen:
                self._seen[key] = self._as_seen(question, known[key])

    def priority(self, key: JobKey) -> int | None:
        """Return the priority of a job; None if it took part in no recent assignment."""
        seen = self._seen.get(key)
        return None if seen is None else seen.priority

    def waiting(self, key: JobKey, question: ParsedJob, known: Known, options: tuple[Option, ...]) -> JointJob:
        """Return a job of an assignment for its simulation, as if it held nothing. ``options``: its options now."""
        return self._joint(key, self._as_seen(question, known), options)

    def expected(self) -> list[RecentJoint]:
        """Return the jobs that were created within the last ``WINDOW_S`` seconds, as they were then."""
        found, now = [], self._now()
        for key, seen in list(self._seen.items()):
            job = self._cache.job(key)
            age_s = (now - job.created).total_seconds() if job is not None else WINDOW_S
            if age_s >= WINDOW_S:
                del self._seen[key]
            elif age_s >= 0:
                options = self._candidates.quotas.new_options(key[0], seen.known)
                found.append(RecentJoint(age_s, self._joint(key, seen, options)))
        return found

    def _as_seen(self, question: ParsedJob, known: Known) -> Seen:
        return Seen(known, self._candidates.priority(question), self._queue.preempts(question))

    def _joint(self, key: JobKey, job: Seen, options: tuple[Option, ...]) -> JointJob:
        return JointJob(
            key,
            job.priority,
            options,
            job.known.spread,
            first_part=job.known.first_part,
            weight=self._queue.policy.weight(key[0]),
            preempts=job.preempts,
            allowed=self._candidates.quotas.allowed(key[0], moving=True),
        )
