"""What an assignment knows of one job: its options as far as quotas allow them, its deadline, and its wait."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime

from dljob.cluster.catalogue import GPU_RESOURCES, vendor
from dljob.controller.planning.answers import First
from dljob.controller.planning.joint.options import Known, due_s, left
from dljob.controller.planning.queueing import Ask, Queue
from dljob.job.observed import JobSeen
from dljob.job.remaining import RESTART_S
from dljob.kube import Cache, JobKey
from dljob.reconcile import ParsedJob
from dljob.scheduling import NamespaceLimits, Quota
from dljob.scheduling.assignment import Candidate, Option, is_overdue
from dljob.status import FALSE, find, is_true, previous


class Candidates:
    """Makes the candidates of an assignment. Use it in one event loop only."""

    def __init__(
        self,
        cache: Cache,
        queue: Queue,
        short: Callable[[], Mapping[JobKey, ParsedJob]],
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        """``short``: returns the jobs that wait for the quotas of their namespaces, as they are planned."""
        self._cache, self._queue, self._short, self._clock, self._now = cache, queue, short, clock, now
        self._first: dict[JobKey, First] = {}
        """For each job that must leave quota to an earlier one of its namespace, that one."""
        self._allowed: dict[str, int | None] = {}
        """For each namespace, the number of GPUs that its quotas allow to all candidates together; None: any number."""
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
            self.allowed(key[0]),
        )

    def allowed(self, namespace: str) -> int | None:
        """Return ``Candidate.allowed`` of the jobs of a namespace."""
        return self._allowed.get(namespace)

    def options(self, key: JobKey, known: Known, *, running: bool) -> tuple[Option, ...]:
        """Return the options of a job, for the rest of its training, for which its namespace has the quota."""
        job = self._cache.job(key)
        if job is None or not known.options:
            return ()
        limits, first = self._queue.limits_without(key), self._first.get(key)
        beside = limits if first is None else self._queue.limits_beside(key, limits, first)

        def allowed(option: Option) -> bool:
            ends = first is None or first.shadow.after(self._clock(), option.seconds * known.spread)
            return _allowed(_unscoped(limits if ends else beside), option)

        return tuple(filter(allowed, left(known, previous(job), running=running)))

    async def look(self, questions: Mapping[JobKey, ParsedJob], known: Mapping[JobKey, Known], ask: Ask) -> None:
        """Find what quotas allow to the jobs ``questions``, and which must leave some to the first in line.

        ``Queue.without_delay`` admits no other plan of them. In line are the jobs of the namespace that wait for quota,
        also those that wait for devices as well. ``known``: the options of the jobs. ``ask``: makes plans.
        """
        self._first.clear()
        namespaces = {namespace for namespace, _ in questions}
        self._allowed = {name: self._left([key for key in questions if key[0] == name], known) for name in namespaces}
        lines: dict[str, dict[JobKey, ParsedJob]] = {}
        for key, each in {**self._short(), **questions}.items():
            if key not in questions or self._lacks_quota(key, known[key]):
                lines.setdefault(key[0], {})[key] = each
        firsts = {name: await self._queue.first(lines[name], ask) for name in sorted(namespaces & lines.keys())}
        for key, question in questions.items():
            if (first := firsts.get(key[0])) is not None:
                its, mine = self._queue.job(lines[key[0]][first.key]), self._queue.job(question)
                if self._queue.is_before(its, mine, holds=self._queue.holds_devices(key)):
                    self._first[key] = first

    def _left(self, keys: Sequence[JobKey], known: Mapping[JobKey, Known]) -> int | None:
        """Return how many GPUs the quotas of a namespace leave to its jobs ``keys``, with those that they hold.

        Return None if that is any number, or if the jobs may use GPUs of several vendors, which have other quotas.
        """
        vendors = {vendor(option.device) for key in keys for option in known[key].options}
        if len(vendors) != 1:
            return None
        gpus = f"requests.{GPU_RESOURCES.get(vendors.pop(), '')}"
        quotas = _unscoped(self._queue.limits_without(keys[0], keys))
        return min((max(0, quota.left(gpus)) // 1000 for quota in quotas if gpus in quota.hard), default=None)

    def _lacks_quota(self, key: JobKey, known: Known) -> bool:
        """Return True if a job waits, and its namespace has the quota for none of its options."""
        return bool(known.options) and not (self._queue.holds_devices(key) or self.options(key, known, running=False))

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


def _unscoped(limits: NamespaceLimits) -> list[Quota]:
    """Return the quotas without scopes.

    Scopes select pods, which do not exist yet. The planner, which knows them, compares its plans with all quotas.
    """
    return [quota for quota in limits.quotas if not quota.scopes]


def _allowed(quotas: Sequence[Quota], option: Option) -> bool:
    """Return True if the quotas leave enough GPUs and pods for an option."""
    gpus = GPU_RESOURCES.get(vendor(option.device), "")
    needs = {f"requests.{gpus}": option.devices, "pods": option.nodes, "count/pods": option.nodes}
    return all(
        name not in quota.hard or 1000 * count <= max(0, quota.left(name))
        for quota in quotas
        for name, count in needs.items()
    )
