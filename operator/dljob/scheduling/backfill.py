"""Back-fill: let a job start before the first in line only if that does not delay the first.

The first job in line that cannot start has a *shadow reservation*: the earliest time at which it is predicted to start,
and the devices that it needs then. Another job may start before it if it is predicted to end before that time, or if
its pods fit beside the reservation. (EASY back-fill: Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995.)
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from dljob.cluster import ClusterView, Node
from dljob.scheduling.limits.charges import Charge
from dljob.scheduling.reservations import Reservation, without_reserved

START_UP_S = 60.0
"""Seconds to add to the predicted run time of a job that overtakes the first in line: its pods must start and stop.

Pods with a cached image are up after about 10 s; the rest is a margin, because a late job delays the first in line.
"""
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that holds devices. ``left_s``: 90th percentile of its remaining seconds; None: unknown."""

    key: Key
    left_s: float | None


def in_order_of_ends(jobs: Iterable[RunningJob]) -> tuple[RunningJob, ...]:
    """Return the jobs sorted by predicted end, the earliest first. Jobs with unknown ends come last."""
    return tuple(sorted(jobs, key=lambda job: (_end_s(job), job.key)))


def start_in_s(ends: tuple[RunningJob, ...], needed: int) -> float:
    """Return the seconds until the first ``needed`` jobs of ``ends`` have ended; infinity if that is unknown.

    ``ends``: result of ``in_order_of_ends``. Return 0 if ``needed`` is 0.
    """
    return max((_end_s(job) for job in ends[:needed]), default=0.0)


@dataclass(frozen=True, slots=True)
class StartSearch:
    """Binary search for the smallest number of running jobs that must end before a waiting job can start.

    The running jobs end in a fixed order. A plan of the waiting job is possible after the first ``possible`` of them
    have ended, and not after fewer than ``least``. When both numbers are equal, the search is done.
    """

    least: int
    possible: int

    @property
    def done(self) -> bool:
        return self.least == self.possible

    @property
    def probe(self) -> int:
        """Return the number to try next: the caller asks for a plan as if so many running jobs had ended."""
        return (self.least + self.possible) // 2

    def after(self, *, feasible: bool) -> "StartSearch":
        """Return the narrowed search. ``feasible``: True if a plan was possible after ``probe`` jobs had ended."""
        return StartSearch(self.least, self.probe) if feasible else StartSearch(self.probe + 1, self.possible)


@dataclass(frozen=True, slots=True)
class Shadow:
    """The shadow reservation of the first job in line.

    ``start_s``: when the job is predicted to start, on the caller's clock; infinity: unknown. ``room``: what is free at
    that time beside the pods of the job. ``charges``: what the objects of the job will charge to the quotas of its
    namespace: pairs of the charge of an object and the number of such objects.
    """

    start_s: float
    room: ClusterView
    charges: tuple[tuple[Charge, int], ...] = ()

    def after(self, now_s: float, run_s: float | None) -> bool:
        """Return True if a job that starts now ends before the first in line starts, and thus does not delay it.

        ``run_s``: 90th percentile of its run time in seconds, to which ``START_UP_S`` is added; None: unknown. Return
        False if ``run_s`` or ``start_s`` is unknown.
        """
        return run_s is not None and now_s + run_s + START_UP_S <= self.start_s < inf

    def beside(self, free: ClusterView, own: ClusterView | None = None) -> ClusterView:
        """Return what another job may use now without taking anything that the first in line needs later.

        For each resource of a node, this is the smaller of two amounts: what is free now (in ``free``), and what is
        free when the first in line has started (in ``room``). ``own``: for a job that holds devices, the same nodes
        with what it holds counted as free, too; it keeps all of that.
        """
        later = {node.name: node for node in self.room.nodes}
        beside = {node.name: _less_of(node, later[node.name]) for node in free.nodes if node.name in later}
        if own is None:
            return ClusterView(tuple(beside.values()))
        others = {node.name: node for node in free.nodes}
        return ClusterView(tuple(_with_own(node, others.get(node.name), beside.get(node.name)) for node in own.nodes))


def shadow(start_s: float, view: ClusterView, needs: Iterable[Reservation], now: ClusterView) -> Shadow:
    """Return the shadow reservation of the first in line.

    ``start_s``: when it is predicted to start. ``view``: what is free at that time. ``needs``: what its pods need.
    ``now``: what is free now. Of equal nodes, the reservation is on those with the least free now, so that other jobs
    can use the others until then and beyond.
    """
    free = {node.name: (node.free_devices, node.free_cpu) for node in now.nodes}
    in_order = sorted(view.nodes, key=lambda node: free.get(node.name, (0, 0.0)))
    needs = tuple(needs)
    charges = tuple((need.charge, need.uncreated) for need in needs if need.charge is not None)
    return Shadow(start_s, without_reserved(ClusterView(tuple(in_order)), needs), charges)


def _end_s(job: RunningJob) -> float:
    return inf if job.left_s is None else max(0.0, job.left_s)


def _less_of(now: Node, later: Node) -> Node:
    return replace(
        now,
        free_devices=min(now.free_devices, later.free_devices),
        free_cpu=min(now.free_cpu, later.free_cpu),
        free_memory_nbytes=min(now.free_memory_nbytes, later.free_memory_nbytes),
    )


def _with_own(own: Node, free: Node | None, beside: Node | None) -> Node:
    """Return a node with what a job holds there, and what it may use in addition.

    ``own``: the node with what the job holds counted as free. ``free``: the node with what is free for all jobs.
    ``beside``: what the job may use of ``free``. None: nothing.
    """

    def sums(name: str) -> tuple[float, float]:
        total, shared, more = (0 if node is None else getattr(node, name) for node in (own, free, beside))
        return max(0, total - shared), more

    # A node without GPUs has one free device, whatever runs there.
    devices = sum(sums("free_devices")) if own.is_gpu else own.free_devices
    return replace(
        own,
        free_devices=int(devices),
        free_cpu=sum(sums("free_cpu")),
        free_memory_nbytes=int(sum(sums("free_memory_nbytes"))),
    )
