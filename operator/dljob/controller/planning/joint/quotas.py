"""What the quotas of namespaces leave to the jobs of an assignment, together and one by one."""

from collections.abc import Mapping

from dljob.controller.planning.answers import First
from dljob.controller.planning.joint.options import Charges, Known, left
from dljob.controller.planning.joint.state import PlanningState
from dljob.controller.planning.queue.shadows import Ask
from dljob.kube import JobKey
from dljob.reconcile import ParsedJob
from dljob.scheduling import SharedQuotas
from dljob.scheduling.assignment import Option, QuotaAmounts
from dljob.scheduling.limits.quotas import shortages
from dljob.status import previous

NO_QUOTAS = SharedQuotas()


class Quotas:
    """Compares the options of jobs with the quotas of their namespaces. Use it in one event loop only."""

    def __init__(self, state: PlanningState) -> None:
        self._cache, self._queue, self._plans = state.cache, state.queue, state.plans
        self._short, self._clock = state.short, state.clock
        self._first: dict[JobKey, First] = {}
        """For each job that must leave quota to an earlier one of its namespace, that one."""
        self._shared: dict[str, SharedQuotas] = {}
        """For each namespace, its quotas as if the jobs of the last assignment held nothing."""

    def allowed(self, namespace: str) -> QuotaAmounts:
        """Return ``Candidate.allowed`` of the jobs of a namespace."""
        return self._shared.get(namespace, NO_QUOTAS).allowed()

    def uses(self, key: JobKey) -> QuotaAmounts:
        """Return ``Held.uses`` of a job: what its pods and its reservations charge."""
        return self._shared.get(key[0], NO_QUOTAS).needed(self._queue.holdings.charges_of(key))

    def options(self, key: JobKey, known: Known, held: Mapping[str, int], *, running: bool) -> tuple[Option, ...]:
        """Return the options of a job, for the rest of its training, for which its namespace has the quota.

        ``held``: the devices that it holds, by type. ``running``: False: it holds none.
        """
        job = self._cache.job(key)
        if job is None or not known.options:
            return ()
        limits, first = self._queue.holdings.limits_without(key), self._first.get(key)
        beside = limits if first is None else self._queue.holdings.limits_beside(key, limits, first)
        shared, found = self._shared.get(key[0], NO_QUOTAS), []
        options = left(known, previous(job), running=running)
        for option, planned in zip(options, known.charges, strict=True):
            charges = self._charges(key, option, planned, held, running=running)
            ends = first is None or first.shadow.after(self._clock(), option.seconds * known.spread)
            if not shortages((limits if ends else beside).quotas, charges):
                found.append(option.with_needs(shared.needed(charges)))
        return tuple(found)

    def new_options(self, namespace: str, known: Known) -> tuple[Option, ...]:
        """Return the options of a job that does not exist yet, with what they need of the quotas of its namespace."""
        shared, charged = self._shared.get(namespace, NO_QUOTAS), zip(known.options, known.charges, strict=True)
        return tuple(option.with_needs(shared.needed(charges)) for option, charges in charged)

    def _charges(
        self, key: JobKey, option: Option, planned: Charges, held: Mapping[str, int], *, running: bool
    ) -> Charges:
        """Return what a job with an option charges beyond its objects other than pods that exist already.

        ``planned``: what all objects of the option charge. On the devices that it holds, the job goes on with its pods,
        which may be smaller than those of the option.
        """
        if held == {option.device: option.devices}:
            return tuple(self._queue.holdings.charges_of(key))
        made = running or self._plans.known(key) is not None
        return tuple((charge, count) for charge, count in planned if charge.is_pod or not made)

    async def look(self, questions: Mapping[JobKey, ParsedJob], known: Mapping[JobKey, Known], ask: Ask) -> None:
        """Find what quotas allow to the jobs ``questions``, and which must leave some to the first in line.

        ``Queue.without_delay`` admits no other plan of them. In line are the jobs of the namespace that wait for quota,
        also those that wait for devices as well. ``known``: the options of the jobs. ``ask``: makes plans.
        """
        self._first.clear()
        namespaces = {namespace for namespace, _ in questions}
        self._shared = {name: self._as_if_ended([key for key in questions if key[0] == name]) for name in namespaces}
        lines: dict[str, dict[JobKey, ParsedJob]] = {}
        for key, each in {**self._short(), **questions}.items():
            if key not in questions or self._lacks_quota(key, known[key]):
                lines.setdefault(key[0], {})[key] = each
        firsts = {
            name: await self._queue.first(self._queue.in_order(lines[name].values()), ask)
            for name in sorted(namespaces & lines.keys())
        }
        for key, question in questions.items():
            if (first := firsts.get(key[0])) is not None:
                its, mine = self._queue.job(lines[key[0]][first.key]), self._queue.job(question)
                if self._queue.is_before(its, mine, holds=self._queue.holdings.holds_devices(key)):
                    self._first[key] = first

    def _as_if_ended(self, keys: list[JobKey]) -> SharedQuotas:
        """Return the quotas of the namespace of the jobs ``keys`` as if these had ended."""
        return SharedQuotas(self._queue.holdings.limits_without(keys[0], keys).quotas)

    def _lacks_quota(self, key: JobKey, known: Known) -> bool:
        """Return True if a job waits, and its namespace has the quota for none of its options."""
        waits = bool(known.options) and not self._queue.holdings.holds_devices(key)
        return waits and not self.options(key, known, {}, running=False)
