"""Choose the running job that is planned next to see if it can grow: one job at a time, and no job too often."""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from dljob.cluster import ClusterView
from dljob.job.defaults import prices_of
from dljob.job.observed import JobSeen
from dljob.job.plan.request import planner_request
from dljob.job.waiting import devices_waited_for
from dljob.kube import JobKey
from dljob.planner.candidates.pools import usable, wanted
from dljob.reconcile import ParsedJob

LOOK_AGAIN_S = 30.0
"""Minimum seconds between two searches for a better plan of one running job, however often capacity grows."""
LOOK_AGAIN_MISSING_S = 300.0
"""Minimum seconds between two searches for a better plan of a running job that lacks some of its pods.

This limit applies while no capacity grows.
"""
LOOKS_PER_S = 3.0
"""Maximum number of searches for better plans of running jobs per second.

With more than 90 running jobs, the time between two searches for the same job therefore exceeds ``LOOK_AGAIN_S``.
"""
WAITING_S = 1.0
"""Seconds between two checks whether capacity has grown for running jobs, and which jobs wait for capacity."""


class Turns:
    """Turns of the running jobs: one job at a time is planned again, in search of a better plan for it.

    All times are seconds of the caller's clock.
    """

    def __init__(self, jobs: Callable[[], Iterable[JobSeen]]) -> None:
        """``jobs``: returns all jobs."""
        self._jobs = jobs
        self.current: JobKey | None = None
        """The job that is planned now to see whether it can grow."""
        self._planned_at: dict[JobKey, int] = {}
        """What ``Growth.count`` returned for each job when it was last planned."""
        self._looked_s: dict[JobKey, float] = {}
        self._waiting: tuple[float, list[Sequence[str]]] = (-inf, [])
        """When the jobs that wait for capacity were listed, and ``spec.devices`` of each."""

    def rested(self, key: JobKey, now_s: float) -> bool:
        """Return True if the last turn of a job was long enough ago."""
        return self._since_s(key, now_s) >= max(LOOK_AGAIN_S, len(self._looked_s) / LOOKS_PER_S)

    def due(self, key: JobKey, growth: int, now_s: float, *, missing: bool) -> bool:
        """Return True if a turn of a job could lead to a better plan.

        ``growth``: how often capacity grew that the job could use. ``missing``: True if not all of the job's pods run.
        """
        grew = growth > self._planned_at.get(key, -1)
        return grew or (missing and self._since_s(key, now_s) >= LOOK_AGAIN_MISSING_S)

    def _since_s(self, key: JobKey, now_s: float) -> float:
        return now_s - self._looked_s.get(key, -inf)

    def list_waiting(self, now_s: float) -> bool:
        """List the jobs that wait for capacity, at most every ``WAITING_S``. Return True if they were listed now."""
        if now_s - self._waiting[0] < WAITING_S:
            return False
        found = [devices_waited_for(job) for job in self._jobs()]
        self._waiting = (now_s, [names for names in found if names is not None])
        return True

    def others_wait_for(self, devices: Iterable[str]) -> bool:
        """Return True if a job waits for one of these device types."""
        return any(not names or wanted(device, names) for device in devices for names in self._waiting[1])

    def planned(self, key: JobKey, growth: int, now_s: float) -> None:
        """Note that a job was planned, for whatever reason."""
        self._planned_at[key] = growth
        if self.current == key:
            self._looked_s[key] = now_s

    def end(self, key: JobKey) -> None:
        """End the turn of a job, if it has one."""
        if self.current == key:
            self.current = None

    def forget(self, key: JobKey) -> None:
        """Forget a job that no longer exists."""
        self.end(key)
        self._planned_at.pop(key, None)
        self._looked_s.pop(key, None)

    def clear(self) -> None:
        self.current = None
        self._planned_at.clear()
        self._looked_s.clear()


def matters_to(question: ParsedJob) -> Callable[[str], bool]:
    """Return a function that tells whether a job may use devices of a type."""
    names = question.spec.devices if question.spec is not None else ()
    fixed = question.spec.planning.groups if question.spec is not None else ()
    return lambda device: not names or bool(fixed) or wanted(device, names)


def usable_nodes(question: ParsedJob, view: ClusterView) -> ClusterView:
    """Return the nodes of ``view`` that a job may use. The question must have a spec."""
    assert question.spec is not None
    request = planner_request(question.observed.job.name, question.spec, None, prices_of(question.defaults))
    return ClusterView(tuple(usable(request, view.without(question.observed.left_out))))
