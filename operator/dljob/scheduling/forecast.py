"""Forecast when waiting jobs start and end: simulate the queue with predicted run times.

The queue is simulated three times: with the 10th percentile, the median and the 90th percentile of all run times. Jobs
start in the order of the queue, and back-fill lets others start before the first in line if that does not delay it. In
reality, not all runs are short or all long at once, so the interval is too wide rather than too narrow.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, groupby
from math import inf

from dljob.cluster import ClusterView
from dljob.scheduling.reservations import Reservation

Key = tuple[str, str]
MAX_FORECAST = 100
"""Maximum number of waiting jobs that are simulated. For the jobs behind them, there is no forecast.

On 1,000 nodes with 300 running jobs, the forecast for 100 took about a second.
"""


@dataclass(frozen=True, slots=True)
class Interval:
    """Percentiles of a time in seconds. Infinity: unknown."""

    p10: float
    p50: float
    p90: float

    def __post_init__(self) -> None:
        if not self.p10 <= self.p50 <= self.p90:
            raise ValueError(f"Interval: found {self}; expected p10 <= p50 <= p90")

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(self.p10 + other.p10, self.p50 + other.p50, self.p90 + other.p90)


UNKNOWN = Interval(inf, inf, inf)


def interval(median_s: float, ratio: float) -> Interval:
    """Return the interval from ``median_s / ratio`` (10th percentile) to ``median_s * ratio`` (90th percentile).

    A ratio below 1 counts as 1. Negative times count as 0.
    """
    median_s, ratio = max(0.0, median_s), max(1.0, ratio)
    return Interval(median_s / ratio, median_s, median_s * ratio)


@dataclass(frozen=True, slots=True)
class Use:
    """Resources of one node. ``cpu``: in cores."""

    node: str
    devices: int
    cpu: float
    memory_nbytes: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that holds devices.

    ``left``: its remaining time. ``uses``: what its pods take from nodes. ``needs``: what its pods without nodes need.
    """

    key: Key
    left: Interval
    uses: tuple[Use, ...] = ()
    needs: tuple[Reservation, ...] = ()


@dataclass(frozen=True, slots=True)
class Waiter:
    """A job in the queue. ``run``: its run time. ``needs``: what its pods need for the plan on the empty cluster."""

    key: Key
    run: Interval
    needs: tuple[Reservation, ...]


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a waiting job starts and ends, in seconds from now. ``start``: infinity if it is unknown."""

    start: Interval
    end: Interval


def forecast(free: ClusterView, holders: Sequence[Holder], line: Sequence[Waiter]) -> dict[Key, Forecast]:
    """Return forecasts for the first ``MAX_FORECAST`` jobs of a queue.

    ``free``: what no pod uses now. ``line``: the waiting jobs that the cluster could run, in the order of the queue.
    """
    line = line[:MAX_FORECAST]
    low = _starts(free, [(h, h.left.p10) for h in holders], [(w, w.run.p10) for w in line])
    median = _starts(free, [(h, h.left.p50) for h in holders], [(w, w.run.p50) for w in line])
    high = _starts(free, [(h, h.left.p90) for h in holders], [(w, w.run.p90) for w in line])
    found = {}
    for job in line:
        # With other run times, another job may be back-filled, and a job may start sooner although all runs are longer.
        start = Interval(*sorted((low[job.key], median[job.key], high[job.key])))
        found[job.key] = Forecast(start, start + job.run)
    return found


def _starts(
    free: ClusterView, holders: Iterable[tuple[Holder, float]], line: Iterable[tuple[Waiter, float]]
) -> Mapping[Key, float]:
    """Return for each job in ``line`` the seconds until it starts; infinity: unknown.

    ``holders``: (job, remaining seconds). ``line``: (job, seconds of its run).
    """
    nodes, numbers = _Nodes(free), count()
    ends: _Ends = []
    for holder, left_s in holders:
        ends.append((left_s, next(numbers), (*holder.uses, *(nodes.take(holder.needs) or ()))))
    heapify(ends)
    waiting, now_s = list(line), 0.0
    starts = {job.key: inf for job, _ in waiting}
    shapes = {job.key: _shape(job) for job, _ in waiting}
    shadow: _Shadow | None = None
    while waiting:
        left: list[tuple[Waiter, float]] = []
        failed: set[object] = set()
        """Shapes of jobs that do not fit now. This loop frees nothing, so jobs of equal shape are not tried."""
        shadow = shadow if shadow is not None and shadow.key == waiting[0][0].key else None
        for job, run_s in waiting:
            overtakes = shadow is not None and shadow.key != job.key
            late = overtakes and shadow is not None and now_s + run_s > shadow.start_s
            if late and shadow is not None and not shadow.room.fits(job.needs):
                left.append((job, run_s))
                continue
            taken = nodes.take(job.needs) if shapes[job.key] not in failed else None
            if taken is not None:
                starts[job.key] = now_s
                heappush(ends, (now_s + run_s, next(numbers), taken))
                if late and shadow is not None:
                    shadow.room.take(job.needs)
            else:
                left.append((job, run_s))
                failed.add(shapes[job.key])
                shadow = shadow or _shadow(nodes, ends, job)
        waiting = left
        if not ends or ends[0][0] == inf:
            break
        now_s = ends[0][0]
        while ends and ends[0][0] == now_s:
            nodes.give(heappop(ends)[2])
    return starts


def _shape(job: Waiter) -> tuple[object, ...]:
    """Return what the pods of a job need, as a key. Jobs with equal keys fit on the same nodes."""
    return tuple((need.device, need.nodes, need.devices, need.cpu, need.memory_nbytes) for need in job.needs)


_Ends = list[tuple[float, int, tuple[Use, ...]]]
"""A heap of (seconds until resources become free, unique number that breaks ties, the resources)."""


@dataclass(frozen=True, slots=True)
class _Shadow:
    """The shadow reservation of the first in line: when it starts, and what is free then beside its pods."""

    key: Key
    start_s: float
    room: "_Nodes"


def _shadow(nodes: "_Nodes", ends: _Ends, job: Waiter) -> _Shadow | None:
    """Return the shadow reservation of a job that cannot start now; None if it cannot start even after all ends.

    A job without a shadow waits for something other than these ends, and blocks no other job.
    """
    room = nodes.copy()
    for end_s, together in groupby(sorted(ends), key=lambda end: end[0]):
        for _, _, uses in together:
            room.give(uses)
        if room.take(job.needs) is not None:
            return _Shadow(job.key, end_s, room)
    return None


_State = tuple[int, int, int]
"""What a node has left: free devices (0 without GPUs), free thousandths of a core, and free bytes of memory."""


class _Nodes:
    """The free resources of nodes, indexed by the number of free devices, or of free cores for nodes without GPUs.

    Most nodes of a busy cluster are full, so that most questions are answered without looking at a node.
    """

    def __init__(self, view: ClusterView) -> None:
        self._at: dict[str, tuple[str, bool, _State]] = {}
        self._levels: dict[str, dict[int, dict[str, None]]] = {}
        """Names of nodes, by device type and level (``_level``). The innermost dictionaries are ordered sets."""
        for node in view.nodes:
            state = node.free_devices if node.is_gpu else 0, round(node.free_cpu * 1000), node.free_memory_nbytes
            self._put(node.name, node.device, node.is_gpu, state)

    def copy(self) -> "_Nodes":
        other = _Nodes(ClusterView())
        other._at = dict(self._at)
        other._levels = {
            device: {level: dict(names) for level, names in levels.items()} for device, levels in self._levels.items()
        }
        return other

    def fits(self, needs: Sequence[Reservation]) -> bool:
        """Return True if pods fit on the nodes. Nothing changes."""
        if len(needs) == 1:
            return self._room_for(needs[0]) is not None
        taken = self.take(needs)
        self.give(taken or ())
        return taken is not None

    def take(self, needs: Iterable[Reservation]) -> tuple[Use, ...] | None:
        """Take what pods need, on the nodes with the most free devices first. If the pods do not fit, return None."""
        taken: list[Use] = []
        for need in needs:
            names = self._room_for(need)
            if names is None:
                self.give(taken)
                return None
            uses = [Use(name, need.devices, need.cpu, need.memory_nbytes) for name in names]
            for use in uses:
                self._change(use, -1)
            taken += uses
        return tuple(taken)

    def give(self, uses: Iterable[Use]) -> None:
        """Return resources to their nodes. Nodes that no longer exist are left out."""
        for use in uses:
            self._change(use, 1)

    def _room_for(self, need: Reservation) -> list[str] | None:
        """Return the names of ``need.nodes`` nodes with room for one pod each; None if there are fewer such nodes."""
        levels = self._levels.get(need.device, {})
        if not levels:
            return None if need.nodes else []
        is_gpu = self._at[next(iter(next(iter(levels.values()))))][1]
        state = need.devices if is_gpu else 0, round(need.cpu * 1000), need.memory_nbytes
        enough = sorted((level for level in levels if level >= _level(is_gpu, state)), reverse=True)
        if sum(len(levels[level]) for level in enough) < need.nodes:
            return None
        found: list[str] = []
        for level in enough:
            for name in levels[level]:
                if len(found) == need.nodes:
                    return found
                if all(free >= needed for free, needed in zip(self._at[name][2], state, strict=True)):
                    found.append(name)
        return found if len(found) == need.nodes else None

    def _change(self, use: Use, sign: int) -> None:
        if use.node not in self._at:
            return
        device, is_gpu, (devices, cpu_m, nbytes) = self._at[use.node]
        level = _level(is_gpu, (devices, cpu_m, nbytes))
        names = self._levels[device][level]
        del names[use.node]
        if not names:
            del self._levels[device][level]
        devices += sign * use.devices if is_gpu else 0
        state = devices, cpu_m + sign * round(use.cpu * 1000), nbytes + sign * use.memory_nbytes
        self._put(use.node, device, is_gpu, state)

    def _put(self, name: str, device: str, is_gpu: bool, state: _State) -> None:
        self._at[name] = device, is_gpu, state
        self._levels.setdefault(device, {}).setdefault(_level(is_gpu, state), {})[name] = None


def _level(is_gpu: bool, state: _State) -> int:
    return state[0] if is_gpu else state[1] // 1000
