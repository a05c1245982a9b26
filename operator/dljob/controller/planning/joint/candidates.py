"""What an assignment knows of one job: its options, what it holds, its deadline, and its wait."""

from collections.abc import Collection
from datetime import datetime

from dljob.controller.planning.joint.forecasting import planned_devices
from dljob.controller.planning.joint.options import Known, due_s
from dljob.controller.planning.joint.quotas import Quotas
from dljob.controller.planning.joint.state import PlanningState
from dljob.job.observed import JobSeen
from dljob.job.remaining import RESTART_S, remaining
from dljob.kube import JobKey
from dljob.reconcile import ParsedJob
from dljob.scheduling.assignment import Candidate, Held, Option, is_overdue
from dljob.status import FALSE, find, is_true, previous


class Candidates:
    """Makes the candidates of an assignment. Use it in one event loop only."""

    def __init__(self, state: PlanningState) -> None:
        self._cache, self._queue, self._plans, self._now = state.cache, state.queue, state.plans, state.now
        self.quotas = Quotas(state)
        self._resumed: dict[JobKey, datetime] = {}
        """When each waiting job whose status still says that it is suspended was first seen waiting."""

    def of(self, key: JobKey, question: ParsedJob, known: Known, *, running: bool) -> Candidate | None:
        """Return a job as a candidate; None if no option is left, or if it is gone. ``running``: it holds devices."""
        job = self._cache.job(key)
        options = self.options(key, known, running=running)
        if job is None or not options:
            return None
        return Candidate(
            self.priority(question),
            options,
            key[0],
            self._queue.policy.weight(key[0]),
            self.due_s(key, question, known, running=running),
            self._queue.preempts(question),
            not running and is_overdue(self.waited_s(job), options),
            self.quotas.allowed(key[0]),
        )

    def options(self, key: JobKey, known: Known, *, running: bool) -> tuple[Option, ...]:
        """Return the options of a job, for the rest of its training, for which its namespace has the quota."""
        held = planned_devices(self._plans.known(key)) if running else {}
        return self.quotas.options(key, known, held, running=running)

    def held(self, key: JobKey, *, movable: bool) -> Held:
        """Return what a running job holds. ``movable``: as of ``Held``."""
        job, devices = self._cache.job(key), planned_devices(self._plans.known(key))
        if not devices or job is None:
            return Held({})
        return Held(devices, remaining(previous(job)).p50, movable, self.quotas.uses(key))

    def waited_s(self, job: JobSeen) -> float:
        """Return the seconds for which a job without devices has waited since it was created, stopped or resumed.

        The status says that a job is suspended until its pods start again, and not when it was resumed. The operator
        therefore counts from when it has seen that, and again after a restart.
        """
        conditions, since = previous(job).conditions, job.created
        admitted = find(conditions, "Admitted")
        if admitted is not None and admitted.status is FALSE:
            since = max(since, admitted.last_transition_time)
        if is_true(conditions, "Suspended"):
            since = max(since, self._resumed.setdefault(job.key, self._now()))
        return max(0.0, (self._now() - since).total_seconds())

    def forget_others(self, waiting: Collection[JobKey]) -> None:
        """Forget the jobs that do not wait any more."""
        self._resumed = {key: since for key, since in self._resumed.items() if key in waiting}

    def due_s(self, key: JobKey, question: ParsedJob, known: Known, *, running: bool) -> float | None:
        """Return ``Candidate.due_s`` of a job."""
        job = self._cache.job(key)
        measured = running and job is not None and previous(job).measured is not None
        due_in_s = due_s(question, known.spread, self._now(), 0.0 if running else RESTART_S, measured=measured)
        return due_in_s if self._queue.policy.deadlines else None

    def priority(self, question: ParsedJob) -> int:
        return self._queue.job(question).priority

    def is_on_known_nodes(self, key: JobKey) -> bool:
        """Return True if the ledger has the nodes of all pods of a job.

        It leaves out nodes that take no pods, such as cordoned ones. Their devices are not there for other jobs.
        """
        return all(pod.node is None or self._cache.ledger.has_node(pod.node) for pod in self._cache.pods_of(key))
