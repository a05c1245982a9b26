"""Choose the running job that is planned next to see if it can grow: one job at a time, and no job too often.

Jobs get their turns as they are reconciled. But a job that could grow leaves its turn for some time to a job of another
namespace that comes before it in the order of the queue, and that could use the same devices.

Jobs that wait for nodes of an autoscaler are planned again in the order of the queue, to see if they can start earlier.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import ceil, inf

from dljob.cluster import ClusterView
from dljob.controller.planning.amortized import Amortized
from dljob.controller.planning.answers import among, matters_to
from dljob.controller.planning.queueing import Queue
from dljob.controller.planning.reserving import FreeResources
from dljob.job.defaults import site_of
from dljob.job.observed import JobSeen
from dljob.job.plan.request import planner_request
from dljob.job.waiting import devices_waited_for
from dljob.kube import JobKey
from dljob.planner.candidates.pools import usable, wanted
from dljob.reconcile import ParsedJob, gang
from dljob.reconcile.planning.resize import may_grow
from dljob.scheduling import QueuedJob, pace_changed

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
YIELD_S = LOOK_AGAIN_S
"""Maximum seconds for which a job leaves its turn to others that come before it."""


@dataclass(frozen=True, slots=True)
class _Able:
    """A running job that can grow, as it was when it was last reconciled.

    ``devices``: its ``spec.devices`` (empty: any). ``missing``: True if not all of its pods run. ``pace_s``: the
    deadline for its next plan (``ParsedJob.pace_s``).
    """

    job: QueuedJob
    devices: tuple[str, ...]
    missing: bool
    pace_s: float | None


@dataclass(frozen=True, slots=True)
class _Due:
    """A job that is due for a turn. ``devices``: the types of free or used devices that it may use."""

    key: JobKey
    urgency: tuple[int, bool, float, float]
    devices: frozenset[str]


@dataclass(slots=True)
class _Awaiting:
    """A job that waits for nodes of an autoscaler. ``matters``: says which device types it may use (``matters_to``).

    ``planned_s``: when it was planned last, or first seen.
    """

    matters: Callable[[str], bool]
    planned_s: float


class Turns:
    """Turns of the running jobs. The job that has the turn is planned again, to see if a better plan is possible.

    Only one job has the turn at a time, and each job rests between two turns. All times are seconds of the caller's
    clock.
    """

    def __init__(
        self,
        jobs: Callable[[], Iterable[JobSeen]],
        queue: Queue,
        free: FreeResources,
        requeue: Callable[[JobKey], None],
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        """``jobs``: returns all jobs. ``queue``: says which job comes first. ``free``: says which capacity has grown.

        ``requeue``: called with the key of a job that must be reconciled.
        """
        self._jobs, self._queue, self._free, self._requeue, self._clock, self._now = (
            jobs, queue, free, requeue, clock, now,
        )  # fmt: skip
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
        self._able: dict[JobKey, _Able] = {}
        """The running jobs that can grow."""
        self._due, self._changes = Amortized(self._list_due, clock), 0
        self._yields_since_s: dict[JobKey, float] = {}
        """For each job that leaves its turn to others, the time since which it does."""
        self._awaiting: dict[JobKey, _Awaiting] = {}
        self._invited, self._invite_again_s = set[JobKey](), -inf
        """The jobs of ``_awaiting`` that are planned again, and when the next ones may be."""

    def awaits_nodes(self, key: JobKey) -> bool:
        """Return True if a job waits without pods for nodes of an autoscaler (``gang.awaits_nodes``)."""
        return key in self._awaiting

    def note_awaiting(self, key: JobKey, parsed: ParsedJob | None) -> None:
        """Note whether a job waits for nodes of an autoscaler. ``parsed``: None if it is planned for another reason."""
        if parsed is None or self._free.view is None or not gang.awaits_nodes(parsed):
            self._awaiting.pop(key, None)
            self._invited.discard(key)
        elif key not in self._awaiting:
            matters = matters_to(parsed)
            self._awaiting[key] = _Awaiting(matters, self._clock())
            self._planned_at.setdefault(key, self._free.growth.count(matters))

    def invite(self) -> list[JobKey]:
        """Return the jobs that wait for nodes of an autoscaler, and could perhaps start now on existing nodes.

        Capacity that they could use has grown since they were planned last. After ``LOOK_AGAIN_MISSING_S``, they are
        invited in any case: a job before which they must not start may have started meanwhile. They are planned in the
        order of the queue, so all of them are invited at the same time, at most every ``LOOK_AGAIN_S``.
        """
        now_s = self._clock()
        if now_s < self._invite_again_s:
            return []
        found = [
            key
            for key, each in self._awaiting.items()
            if self._free.growth.count(each.matters) > self._planned_at[key]
            or now_s - each.planned_s >= LOOK_AGAIN_MISSING_S
        ]
        if found:
            self._invited.update(found)
            self._invite_again_s = now_s + LOOK_AGAIN_S
        return found

    def is_invited(self, key: JobKey) -> bool:
        """Return True from the time when a job is invited (``invite``) until it has been planned."""
        return key in self._invited

    def note(self, key: JobKey, parsed: ParsedJob | None) -> None:
        """Note whether a job can grow. ``parsed``: None if it does not run, or grows only as an assignment says.

        A job on as many nodes as its spec allows may still move to better devices, but comes before no other job. So
        may one that keeps its number of ranks.
        """
        spec, accepted = (None, None) if parsed is None else (parsed.spec, parsed.accepted)
        if parsed is None or spec is None or accepted is None or not may_grow(parsed, self._now()):
            self._able.pop(key, None)
            return
        if parsed.bound_ranks is not None or accepted.nodes >= (1 if parsed.one_node_claim else spec.nodes.max):
            self._able.pop(key, None)
            return
        missing = len(parsed.observed.ready_pods) < accepted.nodes
        self._able[key] = _Able(self._queue.job(parsed), spec.devices, missing, parsed.pace_s)

    def yields(self, parsed: ParsedJob) -> bool:
        """Return True if a job that is due leaves its turn to another one, which is then queued.

        The other job is of another namespace, comes before this one in the order of the queue, may use the same types
        of devices, can grow, and is due too. After ``YIELD_S``, this job gets the turn nevertheless.
        """
        key, now_s, view = parsed.observed.job.key, self._clock(), self._free.view
        if view is None or now_s - self._yields_since_s.get(key, now_s) >= YIELD_S:
            return False
        mine, matters = self._queue.job(parsed).urgency, matters_to(parsed)
        devices = frozenset(filter(matters, view.device_types))
        found = [
            each
            for each in self._due.of((self._free.growth.count(lambda _: True), self._changes, int(now_s)))
            if each.key[0] != key[0] and each.urgency < mine and not devices.isdisjoint(each.devices)
        ]
        if not found:
            return False
        self._yields_since_s.setdefault(key, now_s)
        self._requeue(min(found, key=lambda each: each.urgency).key)
        return True

    def _list_due(self) -> list[_Due]:
        """Return the jobs that can grow, are due, and may have a turn within ``YIELD_S``.

        Of the jobs of a namespace that may use the same types of devices, return only the first one.
        """
        view, now_s = self._free.view, self._clock()
        first: dict[tuple[str, frozenset[str]], _Due] = {}
        known: dict[tuple[str, ...], tuple[int, frozenset[str]]] = {}
        shares: dict[str, float] = {}
        for key, each in self._able.items():
            if each.devices not in known:
                of_job = among(each.devices)
                types = frozenset(filter(of_job, view.device_types if view is not None else ()))
                known[each.devices] = self._free.growth.count(of_job), types
            growth, types = known[each.devices]
            rested_in_s = self._rest_s() - self._since_s(key, now_s)
            if rested_in_s <= YIELD_S and self.due(key, growth, now_s, missing=each.missing, pace_s=each.pace_s):
                if key[0] not in shares:
                    shares[key[0]] = self._queue.share(key[0])
                due = _Due(key, replace(each.job, share=shares[key[0]]).urgency, types)
                before = first.get((key[0], types))
                if before is None or due.urgency < before.urgency:
                    first[key[0], types] = due
        return list(first.values())

    def rested(self, key: JobKey, now_s: float) -> bool:
        """Return True if the last turn of a job was so long ago that it may have the next one, or if it had none."""
        return self._since_s(key, now_s) >= self._rest_s()

    def _rest_s(self) -> float:
        return max(LOOK_AGAIN_S, len(self._looked_s) / LOOKS_PER_S)

    def due(self, key: JobKey, growth: int, now_s: float, *, missing: bool, pace_s: float | None = None) -> bool:
        """Return True if a turn of a job could lead to a better plan.

        This is the case if capacity that the job could use has grown since the job was last planned, or if its
        remaining steps now need another pace to meet its deadline. ``growth``: how often it has grown so far.
        ``pace_s``: the deadline for the job's next plan (``ParsedJob.pace_s``). ``missing``: True if not all of the
        job's pods run. Such a job is also due ``LOOK_AGAIN_MISSING_S`` after its last turn.
        """
        grew = growth > self._planned_at.get(key, -1) or pace_changed(self._paces_s.get(key), pace_s)
        found = grew or (missing and self._since_s(key, now_s) >= LOOK_AGAIN_MISSING_S)
        if not found:
            self._yields_since_s.pop(key, None)
        return found

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
        self._changes += 1
        self._yields_since_s.pop(key, None)
        if self.current == key:
            self._looked_s[key] = now_s
        if key in self._awaiting:
            self._awaiting[key].planned_s = now_s
        self._invited.discard(key)

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
        self._able.pop(key, None)
        self._awaiting.pop(key, None)
        self._invited.discard(key)
        self._yields_since_s.pop(key, None)

    def clear(self) -> None:
        self.current = None
        self._able.clear()
        self._awaiting.clear()
        self._invited.clear()
        self._yields_since_s.clear()
        self._due.forget()
        self._planned_at.clear()
        self._paces_s.clear()
        self._looked_s.clear()


def usable_nodes(question: ParsedJob, view: ClusterView) -> ClusterView:
    """Return the nodes of ``view`` that a job may use according to its spec and volumes, and not left out for faults.

    The question (the job to plan) must have a spec.
    """
    assert question.spec is not None
    request = planner_request(
        question.observed.job.name, question.spec, None, site_of(question.defaults), volumes=question.volumes
    )
    return ClusterView(tuple(usable(request, view.without(question.observed.left_out))))
