"""A simulation of the queue: jobs start in its order, with back-fill, and end after their assumed run times."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, groupby
from math import inf

from dljob.cluster import ClusterView
from dljob.scheduling.forecasting.free_nodes import FreeNodes, Use
from dljob.scheduling.forecasting.times import NO_TIME, Interval
from dljob.scheduling.order import QueuedJob, QueuePolicy, dominant_share
from dljob.scheduling.requests import NOTHING, Requests
from dljob.scheduling.reservations import Reservation

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that holds devices.

    ``left``: its remaining time. ``uses``: what its pods take from nodes. ``needs``: what those of its pods need that
    have no node yet.
    """

    key: Key
    left: Interval
    uses: tuple[Use, ...] = ()
    needs: tuple[Reservation, ...] = ()


@dataclass(frozen=True, slots=True)
class PossiblePlan:
    """A plan with which a waiting job can start.

    ``run``: run time of the job from its first step on. ``needs``: what its pods need.
    """

    run: Interval
    needs: tuple[Reservation, ...]


@dataclass(frozen=True, slots=True)
class Waiter:
    """A job in the queue. It starts with the first of ``plans`` for which there is room. ``plans``: the best one first.

    ``queued``: what its place in the queue depends on. None: it keeps its place relative to all other jobs.
    """

    key: Key
    plans: tuple[PossiblePlan, ...]
    queued: QueuedJob | None = None


@dataclass(frozen=True)
class Shares:
    """What is needed to compute the dominant shares of namespaces, by which the queue is ordered.

    A dominant share is the largest of the fractions of devices, CPU and memory that the jobs of a namespace hold.
    ``total``: the resources of all nodes. ``policy``: the weights of namespaces.
    """

    total: Requests
    policy: QueuePolicy


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job that is expected to be created in ``in_s`` seconds."""

    in_s: float
    job: Waiter


def simulate(
    free: ClusterView,
    holders: Sequence[Holder],
    line: Sequence[Waiter],
    seconds: Callable[[Interval], float],
    shares: Shares | None = None,
    arrivals: Sequence[Arrival] = (),
    start_up: Interval = NO_TIME,
) -> Mapping[Key, tuple[float, float]]:
    """Simulate the queue. Return for each job of ``line`` the seconds until its start and its end; infinity: unknown.

    ``free``: the nodes with what no pod uses now. ``holders``: jobs that hold devices. ``line``: waiting jobs in the
    order of the queue. ``seconds``: chooses the time to assume from an interval, such as its median. ``shares``: None
    if the order of the queue never changes. ``arrivals``: jobs to come, sorted by time. ``start_up``: time for which a
    job that starts holds its devices before its first step.
    """
    nodes, queue, numbers, shapes = FreeNodes(free), _Line(line, shares), count(), _Shapes()
    ends: _Ends = []
    for holder in holders:
        taken = (*holder.uses, *(nodes.take(holder.needs) or ()))
        ends.append((seconds(holder.left), next(numbers), holder.key[0], taken))
        queue.hold(holder.key[0], taken)
    heapify(ends)
    coming, now_s, start_s = deque(arrivals), 0.0, seconds(start_up)

    def total_s(plan: PossiblePlan) -> float:
        return start_s + seconds(plan.run)

    found = dict.fromkeys((job.key for job in line), (inf, inf))
    unknown = set(found)
    shadows: list[_Shadow] = []
    """Those of the first jobs that wait for each of the device types, in the order of the queue."""
    while unknown:
        while coming and coming[0].in_s <= now_s:
            queue.add(coming.popleft().job)
        known, shadows = {each.key: each for each in shadows}, []
        reserved: frozenset[str] = frozenset()
        full: set[int] = set()
        """Shapes (``_Shapes``) of the plans for which there is no room at this moment.

        A start frees nothing, so other plans of these shapes need not be tried at this moment.
        """
        for job in queue.in_order():
            started = None
            if not full.issuperset(shapes.of(job)):  # It contains those of most jobs of a long queue, at most moments.
                devices = shapes.devices(job)
                before = next((each for each in shadows if not each.devices.isdisjoint(devices)), None)
                started = _start(nodes, job, before, now_s, total_s, full, shapes.of(job))
            if started is not None:
                run_s, taken = started
                queue.start(job, taken)
                heappush(ends, (now_s + run_s, next(numbers), job.key[0], taken))
                if job.key in unknown:
                    found[job.key] = now_s, now_s + run_s
                    unknown.remove(job.key)
                known = {}  # It may take what later jobs were to get.
            elif not shapes.devices(job) <= reserved:
                shadow = known.get(job.key) or _shadow(nodes, ends, job, shapes.devices(job))
                if shadow is not None:
                    shadows.append(shadow)
                    reserved |= shadow.devices
        now_s = min(ends[0][0] if ends else inf, coming[0].in_s if coming else inf)
        if now_s == inf:
            break
        while ends and ends[0][0] <= now_s:
            _, _, namespace, taken = heappop(ends)
            nodes.give(taken)
            queue.release(namespace, taken)
    return found


class _Line:
    """The waiting jobs of a simulation, and what the jobs of each namespace hold, by which they are ordered."""

    def __init__(self, line: Iterable[Waiter], shares: Shares | None) -> None:
        self._shares = shares
        self._held: dict[str, Requests] = {}
        self._share_of: dict[str, float] = {}
        """Dominant share of each namespace that holds something, divided by its weight."""
        self._numbers = count()
        self._jobs: dict[str, list[tuple[tuple[object, ...], int, Waiter]]] = {}
        """The waiting jobs of each namespace, in the order of the queue. Within a namespace, the share is the same."""
        for job in line:
            self.add(job)

    @property
    def first(self) -> Key | None:
        """The key of the first job in line; None if no job waits."""
        return next((job.key for job in self.in_order()), None)

    def add(self, job: Waiter) -> None:
        namespace = job.key[0] if self._shares is not None else ""
        insort(self._jobs.setdefault(namespace, []), (self._rank(job), next(self._numbers), job), key=lambda e: e[:2])

    def start(self, job: Waiter, taken: Iterable[Use]) -> None:
        """Remove a job from the queue, and count ``taken`` as held by its namespace."""
        line = self._jobs[job.key[0] if self._shares is not None else ""]
        del line[next(i for i, entry in enumerate(line) if entry[2] is job)]
        self.hold(job.key[0], taken)

    def hold(self, namespace: str, taken: Iterable[Use], sign: int = 1) -> None:
        mine = self._held.get(namespace, NOTHING)
        for use in taken:
            mine += Requests(sign * round(1000 * use.cpu), sign * use.memory_nbytes, sign * use.devices)
        self._held[namespace] = mine
        if self._shares is not None:
            share = dominant_share(mine, self._shares.total)
            self._share_of[namespace] = self._shares.policy.weighted(namespace, share)

    def release(self, namespace: str, taken: Iterable[Use]) -> None:
        self.hold(namespace, taken, -1)

    def in_order(self) -> Iterable[Waiter]:
        """Yield each waiting job once, the first in line first.

        The caller may start the yielded job: this changes the share of its namespace, and thus the order of the rest.
        """
        next_of = dict.fromkeys(self._jobs, 0)
        while True:
            heads = [
                (self._place(line[next_of[name]]), name)
                for name, line in self._jobs.items()
                if next_of[name] < len(line)
            ]
            if not heads:
                return
            _, name = min(heads)
            line, at = self._jobs[name], next_of[name]
            job = line[at][2]
            yield job
            if at < len(line) and line[at][2] is job:
                next_of[name] += 1

    def _rank(self, job: Waiter) -> tuple[object, ...]:
        """Return the sort key of a job within its namespace; empty if jobs keep the order in which they were added."""
        if self._shares is None or job.queued is None:
            return ()
        return (*job.queued.urgency[:3], job.queued.created, job.queued.uid)

    def _place(self, entry: tuple[tuple[object, ...], int, Waiter]) -> tuple[object, ...]:
        """Return the sort key of a job among those of all namespaces, with its namespace's current dominant share.

        ``entry``: (sort key of the job within its namespace, its number in the order of arrival, the job). The key is
        like that of ``QueuedJob.place``; jobs whose order never changes have only their number as the key.
        """
        rank, number, job = entry
        if self._shares is None or not rank:
            return (number,)
        return (*rank[:3], self._share_of.get(job.key[0], 0.0), *rank[3:])


def _start(
    nodes: FreeNodes,
    job: Waiter,
    before: "_Shadow | None",
    now_s: float,
    seconds: Callable[[PossiblePlan], float],
    full: set[int],
    shapes: Sequence[int],
) -> tuple[float, tuple[Use, ...]] | None:
    """Start a job with the best plan for which there is room. Return the seconds until its end and what it takes.

    Return None if no plan has room. ``before``: the shadow reservation of a job before this one, which this one must
    not delay; None: there is none. A job that ends after the start of this reservation, or if that is unknown, also
    takes its resources from ``before.room``. ``now_s``: simulated time. ``seconds``: returns the seconds from the start
    to the end of a job with a plan. ``full``: shapes of plans that have no room now. These are skipped, and the
    function adds those that it finds. ``shapes``: the shapes of the job's plans (see ``_Shapes``).
    """
    for plan, shape in zip(job.plans, shapes, strict=True):
        if shape in full:
            continue
        run_s = seconds(plan)
        # If the start of the first in line is unknown, it may be soon (``Shadow.after``).
        late = before is not None and (before.start_s == inf or now_s + run_s > before.start_s)
        room = before.room if before is not None and late else None
        taken = nodes.take(plan.needs, room)
        if taken is not None:
            return run_s, taken
        if room is None:
            full.add(shape)
    return None


class _Shapes:
    """Numbers for what the pods of plans need, called *shapes*. Plans with equal numbers fit on the same nodes."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._of: dict[Key, tuple[int, ...]] = {}
        self._devices: dict[Key, frozenset[str]] = {}

    def of(self, job: Waiter) -> tuple[int, ...]:
        """Return the shapes of the plans of a job, in their order."""
        found = self._of.get(job.key)
        if found is None:
            found = self._of[job.key] = tuple(self._number(plan.needs) for plan in job.plans)
        return found

    def devices(self, job: Waiter) -> frozenset[str]:
        """Return the device types of all plans of a job."""
        found = self._devices.get(job.key)
        if found is None:
            found = self._devices[job.key] = frozenset(need.device for plan in job.plans for need in plan.needs)
        return found

    def _number(self, needs: Iterable[Reservation]) -> int:
        shape = tuple((n.device, n.nodes, n.devices, n.cpu, n.memory_nbytes, n.domain.terms) for n in needs)
        return self._numbers.setdefault(shape, len(self._numbers))


_Ends = list[tuple[float, int, str, tuple[Use, ...]]]
"""A heap of (seconds until resources become free, unique number that breaks ties, namespace of the job, resources)."""


@dataclass(frozen=True, slots=True)
class _Shadow:
    """The shadow reservation of a first in line: when it can start, and what is free then beside its pods.

    ``start_s``: in seconds of simulated time. Another job that starts earlier must end before it, or fit into ``room``,
    if it may use one of ``devices``, the device types of this job.
    """

    key: Key
    start_s: float
    room: FreeNodes
    devices: frozenset[str]


def _shadow(nodes: FreeNodes, ends: _Ends, job: Waiter, devices: frozenset[str]) -> _Shadow | None:
    """Return the shadow reservation of a job that cannot start now; None if it never fits.

    ``ends``: when the jobs that hold devices end. ``devices``: the device types of the job. The reservation starts at
    the first of these ends after which the job fits. A job that does not fit even after the last end waits for
    something else, and blocks no other job.
    """
    room = nodes.copy()
    for end_s, together in groupby(sorted(ends), key=lambda end: end[0]):
        for _, _, _, taken in together:
            room.give(taken)
        # On nodes that become free only then: what is free now is left for jobs that start before.
        if any(room.take(plan.needs, latest_first=True) is not None for plan in job.plans):
            return _Shadow(job.key, end_s, room, devices)
    return None
