"""The result of planning a job, and the state of the cluster for which the result is valid.

In this package, a *question* is a job to plan, reduced to what its plan depends on. An *answer* is the result.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf

from dljob.api import PlanningMode
from dljob.cluster import ClusterView
from dljob.job.plan.first_plans import AwaitsMeasurement
from dljob.job.plan.stored import StoredPlan
from dljob.job.waiting import QUOTA_EXCEEDED, devices_waited_for, lacks_quota
from dljob.kube import Cache, JobKey
from dljob.planner import Infeasible
from dljob.planner.candidates.pools import wanted
from dljob.reconcile import ParsedJob
from dljob.reconcile.planning import replan
from dljob.reconcile.planning.limits import REASONS as OF_NAMESPACE
from dljob.scheduling import NamespaceLimits, QueuePolicy, Shadow
from dljob.scheduling.limits.quotas import Shortage
from dljob.scheduling.line import Line
from dljob.status.build import human_duration

Decision = StoredPlan | Infeasible
FRESH_S = 10.0
"""Seconds for which a plan may still be used although nodes, pods or reservations have changed since it was made."""
REFRESH_S = 1800.0
"""Seconds after which a waiting job is planned again although no capacity grew, to bring its message up to date."""
QUEUED_S = 300.0
"""Seconds after which a job that waits behind the first in line is planned again: the forecasts change slowly."""
RECONCILE_S = 60.0
"""Seconds after which a waiting job is reconciled again.

It is not planned again unless its question (what its plan depends on) has changed."""
HEAR_S = 10.0
"""Seconds for which an operator that has started waits for the questions of the jobs that already waited.

A job that cannot be reconciled does not ask, and must not keep others from being planned."""
HEAR_AGAIN_S = 0.1
TURN_ANSWERS = 16
"""Number of jobs of one namespace that are planned before those of the same priority in other namespaces have a turn.

Otherwise, a namespace could delay all others with jobs that are first in the queue and cannot run.
"""
DEFAULT_POLICY = QueuePolicy()


class PlanningError(Exception):
    """Planning a job failed because of the operator, not the job: for example, the process that makes plans crashed."""


@dataclass(frozen=True)
class Answer:
    """The result of planning a job, and the versions of what it depended on.

    ``question``: the job, as it was planned. ``decision``: its plan, or why none is possible; None if planning failed,
    and then ``error`` says why. ``reserved``: True if the plan reserves resources. ``at_s``: time of the answer.
    ``growth``: how often capacity had grown that the job could use. ``limits``: what the quotas left for the job.
    """

    question: ParsedJob
    decision: Decision | None
    error: str
    reserved: bool
    at_s: float
    versions: tuple[int, int]
    """Versions of the ledger and of the reservations. While they are unchanged, the plan is certainly still valid."""
    profiles_version: int
    growth: int
    limits_version: int
    limits: NamespaceLimits
    behind: JobKey | None = None
    """The first job in line, if this job waits only because it would delay that job; otherwise None."""
    share: Hashable = None
    """The job's ``Share`` if devices were assigned to all jobs together; None: the job was planned by itself."""

    @property
    def waits_for_devices(self) -> bool:
        """Return True if the job has no plan because others use devices that it could use.

        Return False for a job that the quotas or limit ranges of its namespace do not admit, which waits for jobs or
        the administrator of its own namespace, for a job in a queue of Kueue, which waits for Kueue, and for a job that
        waits only until its devices are measured.
        """
        found = self.decision
        return (
            isinstance(found, Infeasible)
            and not isinstance(found, AwaitsMeasurement)
            and found.transient
            and found.reason not in OF_NAMESPACE
            and not self.question.queued
        )

    @property
    def waits_for_quota(self) -> bool:
        """Return True if the job has no plan because others use the quotas of its namespace.

        The quotas may also be too small for it. Return False for a plan that is only shown, and in a queue of Kueue.
        """
        found, question = self.decision, self.question
        return found is not None and exceeds_quota(found) and not question.queued and not plan_only(question)


def exceeds_quota(found: Decision) -> bool:
    """Return True if no plan is possible because of the quotas of the namespace."""
    return isinstance(found, Infeasible) and found.reason == QUOTA_EXCEEDED


def matters_to(question: ParsedJob) -> Callable[[str], bool]:
    """Return a function that returns True for the names of device types that a job may use.

    If the user has fixed the groups of the plan, it returns True for all types.
    """
    return among(_named_devices(question))


def among(names: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that returns True for the names of device types in ``names``; for all if it is empty."""
    return lambda device: not names or wanted(device, names)


def _named_devices(question: ParsedJob) -> tuple[str, ...]:
    """Return the names of the device types that a job may use; empty: it may use any."""
    spec = question.spec
    return () if spec is None or spec.planning.groups else spec.devices


class UsableDevices:
    """The device types of a cluster that jobs may use. ``view``: its nodes. It is made anew for each use."""

    def __init__(self, view: ClusterView) -> None:
        self._types, self._known = view.device_types, dict[tuple[str, ...], frozenset[str]]()

    def of(self, question: ParsedJob) -> frozenset[str]:
        """Return the device types of the cluster that a job may use."""
        names = _named_devices(question)
        if names not in self._known:
            self._known[names] = frozenset(filter(among(names), self._types))
        return self._known[names]


def wants_others(question: ParsedJob) -> bool:
    """Return True if a job with a plan is planned again because of its spec, or because of its measured step time."""
    accepted = question.accepted
    return accepted is not None and (accepted.spec_digest != question.digest or replan.undecided(question))


def starts(decision: Decision | None, error: str) -> bool:
    """Return True if a job that waits for new nodes need not wait on: it has a plan on existing nodes, or an error."""
    return bool(error) or (isinstance(decision, StoredPlan) and not decision.new_nodes)


def with_limits(question: ParsedJob, limits: NamespaceLimits) -> ParsedJob:
    return replace(question, observed=replace(question.observed, limits=limits))


def plan_only(question: ParsedJob) -> bool:
    """Return True if the plan of the job is only shown and never runs (``planning.mode: PlanOnly``)."""
    return question.spec is not None and question.spec.planning.mode is PlanningMode.PLAN_ONLY


@dataclass(frozen=True)
class First:
    """The first job in line, and its shadow reservation."""

    key: JobKey
    shadow: Shadow


def queued(first: First, now_s: float) -> Infeasible:
    """Return why a job waits although enough devices are free: it would delay the first in line.

    ``first``: the first in line, with its predicted start. ``now_s``: time on the same clock.
    """
    text = (
        "found enough free devices, but an earlier job in the queue needs these devices and is predicted to start "
        f"{_start_text(first, now_s)}; expected this job to end before that start, or to leave enough devices "
        "for the earlier job. Wait: this job is planned again when the earlier job has started. Or lower "
        "spec.nodes.max or the run time, or use a higher priority class"
    )
    return Infeasible("Queued", "spec.scheduling", text, transient=True)


def beside_quota(first: First, short: Shortage, now_s: float) -> Infeasible:
    """Return why a job waits although its namespace has enough quota: it would delay the first in line there.

    ``short``: what is left beside the ``first``, and what the job needs. ``now_s``: time on the same clock.
    """
    text = (
        f"found a plan, but job {first.key[1]}, which is before this one in the queue, waits for the same quota and is "
        f"predicted to start {_start_text(first, now_s)}. With what it needs counted as used: {short}. Wait: this job "
        "is planned again when that job has started. Or raise the quota, lower spec.nodes.max or the run time, or use "
        "a higher priority class"
    )
    return Infeasible(QUOTA_EXCEEDED, "spec.nodes", text, transient=True)


def _start_text(first: First, now_s: float) -> str:
    left_s = first.shadow.start_s - now_s
    return "at an unknown time" if left_s == inf else f"within {human_duration(max(0.0, left_s))} (p90)"


WaitingLine = Line[ParsedJob]


@dataclass(frozen=True)
class Lines:
    """The waiting jobs, as they are planned.

    ``devices``, ``quota``: the jobs for which no plan was possible because of devices and of quotas. ``counts``: False:
    a job that waits for devices may be delayed, because an assignment has given devices to the job that is planned.
    ``passed_over``: True: a job is delayed only if it cannot start now anyway, because an assignment has given devices
    that it could use to others.
    """

    devices: WaitingLine
    quota: WaitingLine
    counts: Callable[[JobKey], bool] = lambda key: True
    passed_over: Callable[[JobKey], bool] = lambda key: False


class Answers:
    """The answers of all jobs, and the lines of those that wait. Use it in one event loop only.

    A job that has not asked again for ``REFRESH_S`` + ``RECONCILE_S`` cannot be reconciled. It must not block the
    others, and leaves its line.
    """

    def __init__(self, devices: WaitingLine, quota: WaitingLine, clock: Callable[[], float]) -> None:
        """``devices``, ``quota``: empty lines for the jobs that wait for devices and for quotas."""
        self._found: dict[JobKey, Answer] = {}
        self._devices, self._quota, self._clock = devices, quota, clock
        self._asked_s: dict[JobKey, float] = {}
        """When the jobs in line were answered, the earliest first."""

    def get(self, key: JobKey | None) -> Answer | None:
        return None if key is None else self._found.get(key)

    def starts(self, key: JobKey) -> bool:
        """Return True if the answer of a job that waits for new nodes ends its wait (``starts``)."""
        answer = self.get(key)
        return answer is not None and starts(answer.decision, answer.error)

    def has_no_plan(self, first: JobKey | None) -> bool:
        """Return True if ``first``, behind which another job waits, has no plan yet, or if it is None (no such job)."""
        answer = self.get(first)
        return first is None or (answer is not None and isinstance(answer.decision, Infeasible))

    def infeasible(self) -> dict[JobKey, Answer]:
        """Return the answers that no plan is possible."""
        return {key: each for key, each in self._found.items() if isinstance(each.decision, Infeasible)}

    def put(self, key: JobKey, answer: Answer) -> None:
        before = self._found.get(key)
        self._found[key] = answer
        if before is None or before.at_s != answer.at_s:
            self._asked_s.pop(key, None)
        lines = (self._devices, answer.waits_for_devices), (self._quota, answer.waits_for_quota)
        for line, waits in lines:
            if waits:
                line.put(key, answer.question)
                self._asked_s[key] = answer.at_s
            else:
                line.remove(key)

    def explain(self, key: JobKey, explained: Callable[[JobKey, Infeasible], Infeasible]) -> bool:
        """Replace the reason why a job waits by that of ``explained``. Return False if the job does not wait."""
        answer = self._found.get(key)
        if answer is None or not isinstance(answer.decision, Infeasible):
            return False
        self.put(key, replace(answer, decision=explained(key, answer.decision)))
        return True

    def remove(self, key: JobKey) -> None:
        """Remove the answer of a job. Do nothing if it has none."""
        self._found.pop(key, None)
        self._leave(key)

    def clear(self) -> None:
        for key in list(self._found):
            self.remove(key)

    def lines(self) -> Lines:
        """Return the jobs in line as they are now. Later answers change them."""
        limit_s = self._clock() - REFRESH_S - RECONCILE_S
        while self._asked_s and self._asked_s[first := next(iter(self._asked_s))] <= limit_s:
            self._leave(first)
        return Lines(self._devices, self._quota)

    def for_devices(self) -> dict[JobKey, ParsedJob]:
        """Return the question of each job that has no plan because others use devices that it could use."""
        return dict(self.lines().devices)

    def for_quota(self) -> dict[JobKey, ParsedJob]:
        """Return the question of each job that has no plan because of the quotas of its namespace."""
        return dict(self.lines().quota)

    def _leave(self, key: JobKey) -> None:
        self._asked_s.pop(key, None)
        self._devices.remove(key)
        self._quota.remove(key)


class KnownWaiting:
    """The jobs that waited for devices or quotas when this operator began to plan, and have not asked for a plan yet.

    If jobs that come later in the queue were planned before these have asked, they would take the devices or quotas.
    """

    def __init__(self, cache: Cache, clock: Callable[[], float]) -> None:
        self._cache, self._clock = cache, clock
        self._heard: set[JobKey] | None = set()
        """Jobs that have asked so far, even before ``all_heard``; None: nobody waits for questions any more."""

    async def all_heard(self) -> None:
        """Wait until each job whose status says that it waits for devices or quotas has asked, ``HEAR_S`` at most."""
        waiting = {job.key for job in self._cache.jobs() if devices_waited_for(job) is not None or lacks_quota(job)}
        end_s = self._clock() + HEAR_S
        while self._heard is not None and waiting - self._heard and self._clock() < end_s:
            await asyncio.sleep(HEAR_AGAIN_S)
        self._heard = None

    def heard(self, key: JobKey) -> None:
        """Note that a job has asked, needs no plan, or is gone."""
        if self._heard is not None:
            self._heard.add(key)

    def forget_all(self) -> None:
        """Begin again, because another operator may plan until this one is the leader again."""
        self._heard = set()


class NamespaceTurns:
    """Counts the answers for the jobs of each namespace, so that namespaces take turns."""

    def __init__(self) -> None:
        self._answers = Counter[str]()
        self._last: dict[str, int] = {}
        """For each namespace, the number of its last answer, counted over all namespaces."""

    def begin(self) -> None:
        """Begin a new round. Call this when no job waits for an answer."""
        self._answers.clear()

    def answered(self, namespace: str) -> None:
        self._last[namespace] = max(self._last.values(), default=0) + 1
        self._answers[namespace] += 1

    def of(self, namespace: str) -> tuple[int, int]:
        """Return the sort key by which namespaces take turns: (turn, number of the last answer), smallest first.

        The turn of a namespace grows after each ``TURN_ANSWERS`` answers in a round.
        """
        return self._answers[namespace] // TURN_ANSWERS, self._last.get(namespace, 0)
