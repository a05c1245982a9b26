"""What the quotas of namespaces leave to the jobs of an assignment, together and one by one.

Jobs of a namespace share its quotas as all jobs share the devices: an assignment lets a running job that may move give
up quota for others. Each job is therefore compared with the quotas as if such jobs had ended.
"""

from collections.abc import Collection, Mapping

from dljob.controller.planning.answers import First
from dljob.controller.planning.joint.options import Charges, Known, left
from dljob.controller.planning.joint.state import PlanningState
from dljob.controller.planning.queue.shadows import Ask
from dljob.kube import JobKey
from dljob.reconcile import ParsedJob
from dljob.scheduling import SharedQuotas
from dljob.scheduling.assignment import Option, QuotaAmounts, exceeds, less_used, sum_of
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
        """For each namespace, its quotas as if the jobs of the last assignment, and those that move, held nothing."""
        self._waiting = set[JobKey]()
        """The waiting jobs of the last assignment."""
        self._staying: dict[JobKey, QuotaAmounts] = {}
        """What each running job of the last assignment uses that must not move now."""
        self._moving: dict[JobKey, QuotaAmounts] = {}
        """What each job needs for its new plan that moved during the last assignment."""

    def allowed(self, namespace: str, *, moving: bool = False) -> QuotaAmounts:
        """Return ``Candidate.allowed`` of the jobs of a namespace. ``moving``: True: those that move are among them."""
        allowed = self._shared.get(namespace, NO_QUOTAS).allowed()
        return allowed if moving else less_used(allowed, _sum_in(namespace, self._moving))

    def uses(self, key: JobKey) -> QuotaAmounts:
        """Return ``Held.uses`` of a job: what its pods and its reservations charge."""
        return self._shared.get(key[0], NO_QUOTAS).needed(self._queue.holdings.charges_of(key))

    def options(self, key: JobKey, known: Known, held: Mapping[str, int], *, running: bool) -> tuple[Option, ...]:
        """Return the options of a job, for the rest of its training, for which its namespace has the quota.

        Quota that running jobs use that may move now counts as free, because they may release it. ``held``: the devices
        that the job holds, by type. ``running``: False: it holds none.
        """
        job = self._cache.job(key)
        if job is None or not known.options:
            return ()
        shared, first, found = self._shared.get(key[0], NO_QUOTAS), self._first.get(key), []
        most = less_used(shared.allowed(), _sum_in(key[0], self._staying | self._moving, without=key))
        beside, over = (most, most) if first is None else self._beside(key, most, first)
        options = left(known, previous(job), running=running)
        for option, planned in zip(options, known.charges, strict=True):
            needs = shared.needed(self._charges(key, option, planned, held, running=running))
            ends = first is not None and first.shadow.after(self._clock(), option.seconds * known.spread)
            stays = held == {option.device: option.devices}
            if stays or not exceeds(needs, (), beside) or (ends and not exceeds(needs, (), over)):
                found.append(option.with_needs(needs))
        return tuple(found)

    def _beside(self, key: JobKey, most: QuotaAmounts, first: First) -> tuple[QuotaAmounts, QuotaAmounts]:
        """Return what a job may use beside the first in line, and what it may use if it ends before that can start.

        ``most``: what it could use without the first in line. If that one takes no part in the assignment, it takes
        what running jobs release. Then only what is free now counts for jobs that end before.
        """
        shared = self._shared.get(key[0], NO_QUOTAS)
        rest = less_used(most, shared.needed(first.shadow.charges))
        beside = tuple(min(all_, max(each, own)) for all_, each, own in zip(most, rest, self.uses(key), strict=True))
        if first.key in self._waiting:
            return beside, most
        return beside, SharedQuotas(self._queue.holdings.limits_without(key).quotas).allowed()

    def new_options(self, namespace: str, known: Known) -> tuple[Option, ...]:
        """Return the options of a job that does not exist yet, with what they need of the quotas of its namespace."""
        shared, charged = self._shared.get(namespace, NO_QUOTAS), zip(known.options, known.charges, strict=True)
        return tuple(option.with_needs(shared.needed(charges)) for option, charges in charged)

    def charges(self, key: JobKey, known: Known, part: Option, *, running: bool) -> Charges:
        """Return what a job charges with its part, which is one of its options. ``running``: it moves to its part."""
        charged = zip(known.options, known.charges, strict=True)
        found = (each for each in charged if (each[0].device, each[0].devices) == (part.device, part.devices))
        return next((self._charges(key, option, planned, {}, running=running) for option, planned in found), ())

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
        """Find which of the jobs ``questions`` must leave quota to the first in line of their namespace.

        ``Queue.without_delay`` admits no other plan of them. In line are the jobs of the namespace that wait for quota,
        also those that wait for devices as well. ``known``: the options of the jobs. ``ask``: makes plans.
        """
        self._first.clear()
        namespaces = {namespace for namespace, _ in questions}
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

    def count(
        self,
        waiting: Collection[JobKey],
        running: Mapping[JobKey, bool],
        moving: Mapping[JobKey, Option],
        ended: Collection[JobKey],
        known: Mapping[JobKey, Known],
    ) -> None:
        """Find what the quotas allow to the jobs of an assignment together.

        ``waiting``, ``running``: these jobs; True: it may move now. ``moving``: jobs whose pods stop, because they move
        to these parts. ``ended``: others whose pods stop for good. ``known``: the options of the jobs that move.
        """
        keys = [*waiting, *running, *(key for key in moving if key in known)]
        namespaces = {namespace for namespace, _ in keys}
        self._shared = {name: self._as_if_ended([key for key in keys if key[0] == name], ended) for name in namespaces}
        self._waiting = set(waiting)
        self._staying = {key: self.uses(key) for key, movable in running.items() if not movable}
        self._moving = {
            key: self._shared[key[0]].needed(self.charges(key, known[key], part, running=True))
            for key, part in moving.items()
            if key in known
        }

    def _as_if_ended(self, keys: list[JobKey], ended: Collection[JobKey]) -> SharedQuotas:
        """Return the quotas of the namespace of the jobs ``keys`` as if these and the jobs ``ended`` had ended."""
        return SharedQuotas(self._queue.holdings.limits_without(keys[0], {*keys, *ended}).quotas)

    def _lacks_quota(self, key: JobKey, known: Known) -> bool:
        """Return True if a job waits, and its namespace now has the quota for none of its options."""
        if not known.options or self._queue.holdings.holds_devices(key):
            return False
        quotas, options = (
            self._queue.holdings.limits_without(key).quotas,
            zip(known.options, known.charges, strict=True),
        )
        return all(shortages(quotas, self._charges(key, *each, {}, running=False)) for each in options)


def _sum_in(namespace: str, amounts: Mapping[JobKey, QuotaAmounts], without: JobKey | None = None) -> QuotaAmounts:
    """Return the sum of the amounts of the jobs of a namespace, except the job ``without``."""
    return sum_of(each for key, each in amounts.items() if key[0] == namespace and key != without)
