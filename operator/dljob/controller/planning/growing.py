"""Choose the running job that is planned next to see if it can grow: one job at a time, and no job too often."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, inf

from dljob.cluster import ClusterView
from dljob.job.defaults import site_of
from dljob.job.observed import JobSeen
from dljob.job.plan.request import planner_request
from dljob.job.waiting import devices_waited_for
from dljob.kube import JobKey
from dljob.planner.candidates.pools import usable, wanted
from dljob.reconcile import ParsedJob
from dljob.scheduling import pace_changed

LOOK_AGAIN_S = 30.0
"""Minimum seconds between two searches for a better plan of one running job, however often capacity grows."""
LOOK_AGAIN_MISSING_S = 300.0
"""Minimum seconds between two searches for a better plan of a running job that lacks some of its pods.

This limit applies while no capacity grows.
"""
LOOKS_PER_S = 3.0
"""Maximum number of searches for better plans per second, over all running jobs.

With more than 90 running jobs, the time between two searches for the same job therefore exceeds ``LOOK_AGAIN_S``.
"""
WAITING_S = 1.0
"""Minimum seconds between two checks whether capacity has grown for running jobs, and which jobs wait for capacity, for
each ``LISTED`` jobs or part of these: a check looks at all jobs."""
LISTED = 1000


class Turns:
    """Turns of the running jobs. The job that has the turn is planned again, to see if a better plan is possible.

    Only one job has the turn at a time, and each job rests between two turns. All times are seconds of the caller's
    clock.
    """

    def __init__(self, jobs: Callable[[], Iterable[JobSeen]]) -> None:
        """``jobs``: returns all jobs."""
        self._jobs = jobs
        self.current: JobKey | None = None
        """The job that has the turn: it is planned again now to see whether it can grow. None: no job has it."""
        self._planned_at: dict[JobKey, int] = {}
        """For each job, how often capacity that it could use had grown (``Growth.count``) when it was last planned."""
        self._paces_s: dict[JobKey, float | None] = {}
        """For each job, the deadline with which it was last planned (``ParsedJob.pace_s``)."""
        self._looked_s: dict[JobKey, float] = {}
        self._waiting: list[Sequence[str]] = []
        """``spec.devices`` of each job that waited for capacity when they were listed last (empty: any device)."""
        self._list_again_s = -inf

    def rested(self, key: JobKey, now_s: float) -> bool:
        """Return True if the last turn of a job was so long ago that it may have the next one, or if it had none."""
        return self._since_s(key, now_s) >= max(LOOK_AGAIN_S, len(self._looked_s) / LOOKS_PER_S)

    def due(self, key: JobKey, growth: int, now_s: float, *, missing: bool, pace_s: float | None = None) -> bool:
        """Return True if a turn of a job could lead to a better plan.

        This is the case if capacity that the job could use has grown since the job was last planned, or if its
        remaining steps now need another pace to meet its deadline. ``growth``: how often it has grown so far.
        ``pace_s``: the deadline for the job's next plan (``ParsedJob.pace_s``). ``missing``: True if not all of the
        job's pods run. Such a job is also due ``LOOK_AGAIN_MISSING_S`` after its last turn.
        """
        grew = growth > self._planned_at.get(key, -1) or pace_changed(self._paces_s.get(key), pace_s)
        return grew or (missing and self._since_s(key, now_s) >= LOOK_AGAIN_MISSING_S)

    def _since_s(self, key: JobKey, now_s: float) -> float:
        return now_s - self._looked_s.get(key, -inf)

    def list_waiting(self, now_s: float) -> bool:
        """Update the list of jobs that wait for capacity, unless it is too young (``WAITING_S``).

        Return True if it was updated. ``others_wait_for`` uses this list.
        """
        if now_s < self._list_again_s:
            return False
        found = [devices_waited_for(job) for job in self._jobs()]
        self._waiting = [names for names in found if names is not None]
        self._list_again_s = now_s + WAITING_S * max(1, ceil(len(found) / LISTED))
        return True

    def others_wait_for(self, devices: Iterable[str]) -> bool:
        """Return True if a job waits that could use one of these device types, according to the last list."""
        return any(not names or wanted(device, names) for device in devices for names in self._waiting)

    def planned(self, key: JobKey, growth: int, now_s: float, pace_s: float | None = None) -> None:
        """Note that a job was planned now, in its turn or for another reason.

        ``growth``: how often capacity that the job could use has grown so far. ``pace_s``: the deadline of its plan.
        """
        self._planned_at[key], self._paces_s[key] = growth, pace_s
        if self.current == key:
            self._looked_s[key] = now_s

    def end(self, key: JobKey) -> None:
        """End the turn of a job, so that another job may have it. Do nothing if the job does not have the turn."""
        if self.current == key:
            self.current = None

    def forget(self, key: JobKey) -> None:
        """Forget a job that no longer exists."""
        self.end(key)
        self._planned_at.pop(key, None)
        self._paces_s.pop(key, None)
        self._looked_s.pop(key, None)

    def clear(self) -> None:
        self.current = None
        self._planned_at.clear()
        self._paces_s.clear()
        self._looked_s.clear()


def matters_to(question: ParsedJob) -> Callable[[str], bool]:
    """Return a function that returns True for the names of device types that a job may use.

    If the user has fixed the groups of the plan, it returns True for all types.
    """
    names = question.spec.devices if question.spec is not None else ()
    fixed = question.spec.planning.groups if question.spec is not None else ()
    return lambda device: not names or bool(fixed) or wanted(device, names)


def usable_nodes(question: ParsedJob, view: ClusterView) -> ClusterView:
    """Return the nodes of ``view`` that a job may use according to its spec and volumes, and not left out for faults.

    The question (the job to plan) must have a spec.
    """
    assert question.spec is not None
    request = planner_request(
        question.observed.job.name, question.spec, None, site_of(question.defaults), volumes=question.volumes
    )
    return ClusterView(tuple(usable(request, view.without(question.observed.left_out))))
