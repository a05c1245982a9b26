"""Preemption: which running jobs of lower priority stop, so that the first job in line can start.

A job that is preempted writes a checkpoint, releases its devices and waits in the queue like any other. It loses the
time of a restart and, if the checkpoint fails, the work since the previous checkpoint. Of all sets of jobs that make
room, the operator chooses the set that loses the fewest device-seconds.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice

from dljob.cluster import ClusterView, Node, nodes_left
from dljob.scheduling.requests import NOTHING, Requests
from dljob.scheduling.reservations import Reservation

PROTECTED_S = 900.0
"""Seconds for which a job that resumed after a preemption is not preempted again.

A restart takes 20 s to 60 s. With one preemption in 15 minutes, a job loses less than a tenth of its time.
"""
MAX_CHECKS = 50_000
"""Maximum number of nodes to examine in the search for the set of jobs that loses least. The search takes up to 0.2 s.

Each set that is tried examines all nodes. The limit is enough to try all sets of 12 jobs on 12 nodes.
"""
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Preemptible:
    """A running job that may be preempted.

    ``holds``: what its pods take from each node, by the node's name. ``lost_s``: training time since its last
    checkpoint. ``restart_s``: time from its next admission to its next step. ``left_s``: remaining run time; None:
    unknown. All times are predicted, in seconds.
    """

    key: Key
    priority: int
    holds: Mapping[str, Requests]
    lost_s: float
    restart_s: float
    left_s: float | None

    @property
    def cost(self) -> float:
        """Return the device-seconds that a preemption loses. A pod without GPUs counts as one device."""
        devices = sum(max(1, each.devices) for each in self.holds.values())
        return devices * (self.lost_s + self.restart_s)

    @property
    def ends_soon(self) -> bool:
        """Return True if the remaining run time is not longer than the time that a preemption loses.

        Such a job is not preempted. Return False if the remaining time is unknown.
        """
        return self.left_s is not None and self.left_s <= self.lost_s + self.restart_s


Admits = Callable[[Collection[Key]], bool]
"""Function that returns True if the quotas of a waiting job admit it after running jobs with these keys have stopped.

If it returns True for some jobs, it does so for all sets that contain them."""


def victims(
    priority: int,
    needs: Sequence[Reservation],
    view: ClusterView,
    running: Iterable[Preemptible],
    admits: Admits = lambda stopped: True,
    sharing: Collection[Key] = (),
) -> tuple[Preemptible, ...]:
    """Choose the running jobs to preempt, so that a waiting job has room and the preempted jobs lose least in total.

    ``priority``: priority of the waiting job; only jobs of a lower priority are chosen. ``needs``: what its pods need.
    ``view``: the nodes with what is free now. ``admits``: of its quotas. ``sharing``: jobs that use these quotas, which
    may be chosen wherever they run. Return an empty tuple if there is room already, or if there is none even after all
    these jobs have stopped. The result is exact unless the search exceeds ``MAX_CHECKS``. In that case, jobs are added,
    those that lose least first, until there is room. Jobs that turn out not to be needed are then removed.
    """
    devices = {need.device for need in needs if need.nodes}
    view = ClusterView(tuple(node for node in view.nodes if node.device in devices and not node.left_out))
    useful = {node.name for node in view.nodes}
    may = (job for job in running if job.priority < priority and not job.ends_soon)
    jobs = sorted(
        (job for job in may if useful & job.holds.keys() or job.key in sharing),
        key=lambda job: (job.cost, job.priority, job.key),
    )

    def starts(stopped: Sequence[Preemptible]) -> bool:
        return _fit(_without(view, stopped), needs) and admits({each.key for each in stopped})

    if starts(()) or not starts(jobs):
        return ()
    sets = islice(_cheapest_first(jobs), MAX_CHECKS // len(view.nodes))
    found = next((each for each in sets if starts(each)), None)
    if found is None:
        count = bisect_left(range(len(jobs)), True, key=lambda i: starts(jobs[: i + 1])) + 1
        found = tuple(jobs[:count])
    return _needed(found, starts)


def _cheapest_first(jobs: Sequence[Preemptible]) -> Iterator[tuple[Preemptible, ...]]:
    """Yield all non-empty sets of jobs in the order of their total cost, the cheapest first. ``jobs``: sorted by cost.

    The sets form a search tree, and a heap contains the next ones. From a set whose most expensive job is number i, one
    branch adds job i + 1, and the other has job i + 1 in place of job i. Neither of the two new sets costs less than
    the set that they come from, and each set is reached once.
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(jobs[0].cost, (0,))] if jobs else []
    while heap:
        cost, chosen = heappop(heap)
        yield tuple(jobs[i] for i in chosen)
        last, following = chosen[-1], chosen[-1] + 1
        if following < len(jobs):
            heappush(heap, (cost + jobs[following].cost, (*chosen, following)))
            heappush(heap, (cost + jobs[following].cost - jobs[last].cost, (*chosen[:-1], following)))


def _needed(
    chosen: tuple[Preemptible, ...], starts: Callable[[Sequence[Preemptible]], bool]
) -> tuple[Preemptible, ...]:
    """Return ``chosen`` without jobs that need not stop. The most expensive jobs are removed first.

    ``starts``: function that returns True if the waiting job can start after these jobs have stopped.
    """
    for job in sorted(chosen, key=lambda each: -each.cost):
        others = tuple(each for each in chosen if each is not job)
        if starts(others):
            chosen = others
    return chosen


def beside_running(view: ClusterView, whole: ClusterView, running: Iterable[Preemptible]) -> ClusterView:
    """Return the view with what is free beside the pods of ``running`` on nodes without room for another pod.

    Nothing counts as free on such a node, although a job that stops there makes room for a pod that uses all of it.
    ``whole``: the nodes with what is free after all of these jobs have stopped.
    """
    full = {node.name for node in view.nodes if node.free_pods == 0}
    if not full:
        return view
    held = _held(running)
    beside = {
        node.name: replace(_more_of(node, NOTHING - held.get(node.name, (NOTHING, 0))[0]), free_pods=0)
        for node in whole.nodes
        if node.name in full
    }
    return ClusterView(tuple(beside.get(node.name, node) for node in view.nodes))


def _held(jobs: Iterable[Preemptible]) -> dict[str, tuple[Requests, int]]:
    """Return (what the pods of ``jobs`` take from a node, the number of these jobs) by the node's name."""
    held: dict[str, tuple[Requests, int]] = {}
    for job in jobs:
        for name, each in job.holds.items():
            requests, pods = held.get(name, (NOTHING, 0))
            held[name] = requests + each, pods + 1
    return held


def _without(view: ClusterView, jobs: Iterable[Preemptible]) -> ClusterView:
    """Return the view as if the pods of ``jobs`` were gone. A job has one pod on each of its nodes."""
    freed = _held(jobs)
    return ClusterView(tuple(_more_of(node, *freed[node.name]) if node.name in freed else node for node in view.nodes))


def _more_of(node: Node, freed: Requests, pods: int = 0) -> Node:
    """Return the node with more free resources, and with room for more pods."""
    return replace(
        node,
        free_devices=node.free_devices + freed.devices if node.is_gpu else node.free_devices,
        free_cpu=node.free_cpu + freed.cpu_m / 1000,
        free_memory_nbytes=node.free_memory_nbytes + freed.memory_nbytes,
        free_pods=None if node.free_pods is None else node.free_pods + pods,
    )


def _fit(view: ClusterView, needs: Sequence[Reservation]) -> bool:
    """Return True if each pod of ``needs`` finds a node of its own. A node runs at most one pod of a job."""
    if len(needs) == 1:
        return sum(_holds(node, needs[0]) for node in view.nodes) >= needs[0].nodes
    fitting = [[node.name for node in view.nodes if _holds(node, need)] for need in needs]
    for i, (need, names) in enumerate(zip(needs, fitting, strict=True)):
        before = zip(fitting[:i], needs[:i], strict=True)
        if nodes_left(names, [(others, its.nodes) for others, its in before if its.device == need.device]) < need.nodes:
            return False
    return True


def _holds(node: Node, need: Reservation) -> bool:
    enough_devices = not node.is_gpu or node.free_devices >= need.devices
    enough = node.free_cpu >= need.cpu and node.free_memory_nbytes >= need.memory_nbytes
    room = node.device == need.device and node.free_pods != 0
    return room and enough_devices and enough and need.allows(node)
