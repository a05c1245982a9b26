"""Assign heterogeneous devices to several jobs together. Each device type goes to the jobs that gain most from it.

If jobs took devices one by one in the order of the queue, the first job would take the fastest devices, even if it
gains little from them, and all that it can use, even if ten others wait. Here, all jobs get few devices at first, and
then grow step by step. The next step is always the step with the greatest *relative* gain per device. Short jobs go
first: for a job with T remaining seconds, a step is worth the seconds that it saves / T ** ``POWER``. (For jobs with
sublinear speed-up, the average completion time is least if short jobs get more devices, but not all: Berg et al.,
"heSRPT: Parallel scheduling to minimize mean slowdown", Performance Evaluation 2020.)

Finally, two jobs exchange devices if that multiplies the sum of 1 / T of both jobs by more than ``MIN_EXCHANGE``.

Jobs of a higher priority are assigned first, as if the others did not exist.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations, groupby

from dljob.scheduling.gain import MIN_GAIN, MIN_GAIN_S

MIN_EXCHANGE = 1.2
"""Smallest factor by which an exchange of devices between two jobs must increase their sum of 1 / T (T: remaining
seconds of a job). Both jobs may have to restart, and predictions are uncertain."""
POWER = 2.0
"""Exponent of a job's remaining seconds T in the worth of a step: the larger it is, the more short jobs are favoured.
In the clairvoyant policy of benchmarks/scheduling, 1.5 to 2.5 gave the same completion times, 1 gave 19 % longer ones,
and 0, which favours long jobs, 48 % longer ones."""


@dataclass(frozen=True, slots=True)
class Option:
    """A plan of a job on ``per_node`` devices of each of ``nodes`` nodes with one type of device.

    ``seconds``: predicted seconds from the start of this plan until the job ends, above 0.
    """

    device: str
    nodes: int
    per_node: int
    seconds: float

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that waits or runs, and wants devices. ``options``: its plans, including those that do not fit now."""

    priority: int
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What a job holds now. ``devices``: device type → number of devices; empty for a job that waits.

    ``left_s``: remaining seconds if the job stays on these devices. ``movable``: False if the job must not restart now.
    """

    devices: Mapping[str, int]
    left_s: float = 0.0
    movable: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """The result of an assignment. Each field has one entry per job, in the order of the jobs.

    ``parts``: the option that each job gets, called its *part*; None: it gets no devices now. ``moves``: True if the
    job runs now and restarts on its part. ``helped``: indices of the jobs that need the devices that the job gives up;
    empty if the job does not restart.
    """

    parts: "Choices"
    moves: tuple[bool, ...]
    helped: tuple[tuple[int, ...], ...]


Choices = tuple[Option | None, ...]
Jobs = Sequence[tuple[Option, ...]]


def assign(jobs: Sequence[Candidate], free: Mapping[str, int]) -> Choices:
    """Choose an option for each waiting job; None for a job that gets no devices now.

    ``jobs``: in the order of the queue, jobs of the highest priority first. ``free``: number of free devices by type.
    For jobs of equal priority, the predicted sum of completion times is never larger than if each job in order took its
    fastest option.
    """

    def better(options: Jobs, left: Mapping[str, int]) -> Choices:
        return min(together(options, left), in_order(options, left), key=lambda each: total_s(options, each, left))

    return _by_priority(jobs, free, better)


def share(jobs: Sequence[Candidate], free: Mapping[str, int]) -> Choices:
    """Choose an option for each waiting or running job as if no job held devices yet; None: it gets none.

    ``free``: number of devices by type, including devices that running jobs in ``jobs`` hold. The result ignores what a
    restart costs: ``movers`` decides which running jobs really move to their option.
    """
    return _by_priority(jobs, free, together)


def movers(held: Sequence[Held], parts: Choices, free: Mapping[str, int], restart_s: float) -> tuple[bool, ...]:
    """Return for each job True if it runs and restarts on its part (the option that ``share`` chose for it).

    It restarts if that pays for the job itself, or if other jobs need what the job holds. ``held``: what each job
    holds. ``parts``: the part of each job; None: it gets no devices. ``free``: number of devices by type, including
    those that these jobs hold. ``restart_s``: seconds of a restart. The parts of the jobs that restart fit beside what
    all other jobs hold. The parts of waiting jobs may not fit yet.
    """

    moving = {
        i
        for i, (mine, part) in enumerate(zip(held, parts, strict=True))
        if mine.movable and mine.devices and part is not None and mine.devices != {part.device: part.devices}
    }
    for i in sorted(moving):
        part = parts[i]
        assert part is not None
        pays = gains_by(held[i], part.seconds, restart_s)
        missing = sum(_short(moving, held, parts, free, waiting=True).values())
        if not pays and sum(_short(moving - {i}, held, parts, free, waiting=True).values()) <= missing:
            moving.remove(i)
    moving = _fitting(moving, held, parts, free)
    return tuple(i in moving for i in range(len(held)))


def assign_all(
    jobs: Sequence[Candidate], held: Sequence[Held], free: Mapping[str, int], restart_s: float
) -> Assignment:
    """Assign devices to waiting and running jobs together.

    ``jobs``: sorted, the highest priority first. ``held``: what each job holds now. ``free``: number of devices by
    type, including those that running jobs hold. ``restart_s``: seconds of a restart. A running job that does not gain
    restarts only for jobs of equal or higher priority that gain more than it loses.
    """
    parts = share(jobs, free)
    moving = movers(held, parts, free, restart_s)
    helped = tuple(_helped(i, jobs, held, parts, moving) if moves else () for i, moves in enumerate(moving))
    gains = [
        part is not None and gains_by(mine, part.seconds, restart_s) for mine, part in zip(held, parts, strict=True)
    ]
    repay = {
        i
        for i, (m, own, others) in enumerate(zip(moving, gains, helped, strict=True))
        if m and (own or _repays(i, jobs, held, parts, others, restart_s))
    }
    # The parts of some need devices of jobs that do not move now.
    fitting = _fitting(repay, held, parts, free)
    moves = tuple(i in fitting for i in range(len(jobs)))
    return Assignment(parts, moves, tuple(others if m else () for m, others in zip(moves, helped, strict=True)))


def _short(
    moving: Collection[int], held: Sequence[Held], parts: Choices, free: Mapping[str, int], *, waiting: bool
) -> dict[str, int]:
    """Return how many devices of each type are missing if only the jobs ``moving`` (indices) move.

    ``waiting``: True if the waiting jobs also start on their parts.
    """
    used = Counter[str]()
    for i, (mine, part) in enumerate(zip(held, parts, strict=True)):
        if i not in moving:
            used.update(mine.devices)
        if part is not None and (i in moving or (waiting and not mine.devices)):
            used[part.device] += part.devices
    return {device: count - free.get(device, 0) for device, count in used.items() if count > free.get(device, 0)}


def _fitting(moving: Collection[int], held: Sequence[Held], parts: Choices, free: Mapping[str, int]) -> set[int]:
    """Return those of the jobs ``moving`` (indices) whose parts fit beside what all jobs hold that do not move."""
    fitting = set(moving)
    while missing_types := _short(fitting, held, parts, free, waiting=False).keys():
        wrong = [i for i in fitting if (part := parts[i]) is not None and part.device in missing_types]
        if not wrong:
            break  # Jobs hold more than there is, such as after the loss of a node.
        fitting.remove(max(wrong))
    return fitting


def gains_by(mine: Held, seconds: float, restart_s: float) -> bool:
    """Return True if a running job gains enough by a restart, after which it needs ``seconds`` to its end.

    ``mine``: what the job holds, with its remaining time. ``restart_s``: seconds of the restart itself. The gain must
    reach ``MIN_GAIN_S`` seconds and the fraction ``MIN_GAIN`` of the job's remaining time.
    """
    return mine.left_s - seconds - restart_s >= max(MIN_GAIN_S, MIN_GAIN * mine.left_s)


def _helped(
    i: int, jobs: Sequence[Candidate], held: Sequence[Held], parts: Choices, moving: Sequence[bool]
) -> tuple[int, ...]:
    """Return the indices of the jobs that get devices of a type of which job ``i`` frees some when it moves.

    These jobs wait or move, and have at least the priority of job ``i``.
    """
    mine = parts[i]
    assert mine is not None
    freed = {
        device for device, count in held[i].devices.items() if count > (mine.devices if device == mine.device else 0)
    }
    return tuple(
        j
        for j, part in enumerate(parts)
        if j != i
        and part is not None
        and part.device in freed
        and jobs[j].priority >= jobs[i].priority
        and (not held[j].devices or moving[j])
    )


def _repays(
    i: int,
    jobs: Sequence[Candidate],
    held: Sequence[Held],
    parts: Choices,
    helped: Sequence[int],
    restart_s: float,
) -> bool:
    """Return True if the jobs in ``helped`` gain more than job ``i`` loses when it moves to its part.

    The difference must reach ``MIN_GAIN_S`` seconds and the fraction ``MIN_GAIN`` of the remaining time of job ``i``.
    Assumed: without the move, a waiting job starts when job ``i`` ends. With the move, the waiting job starts now. When
    one of the two jobs ends, the other takes over its devices. For this, job ``i`` restarts a second time.
    """
    mine, gained_s, slower_s = parts[i], 0.0, 0.0
    assert mine is not None
    left_s, count = held[i].left_s, sum(held[i].devices.values())
    for j in helped:
        part = parts[j]
        assert part is not None
        slower_s = max(slower_s, min(part.seconds, mine.seconds) * (1 - left_s / mine.seconds))
        if held[j].devices:
            gained_s += held[j].left_s - part.seconds - restart_s
            continue
        alone = _fastest(jobs[j].options, {part.device: max(count, part.devices)}) or part
        both_s = mine.seconds + restart_s
        done = min(1.0, both_s / part.seconds)
        ends_s = part.seconds if done == 1.0 else both_s + (1 - done) * alone.seconds
        gained_s += left_s + alone.seconds - ends_s
    return bool(helped) and gained_s - slower_s - 2 * restart_s >= max(MIN_GAIN_S, MIN_GAIN * left_s)


def _by_priority(
    jobs: Sequence[Candidate], free: Mapping[str, int], choose: Callable[[Jobs, Mapping[str, int]], Choices]
) -> Choices:
    """Call ``choose`` for the jobs of each priority in turn, with the devices that are left, and join the results.

    ``jobs``: sorted, the highest priority first. The result has one entry per job, in this order.
    """
    chosen: list[Option | None] = []
    left = dict(free)
    for _, group in groupby(jobs, key=lambda job: job.priority):
        found = choose([job.options for job in group], left)
        chosen += found
        left = _less(left, found)
    return tuple(chosen)


def in_order(jobs: Jobs, free: Mapping[str, int]) -> Choices:
    """Return the option of each job if one after another takes its fastest option that fits; None: none fits."""
    left, found = dict(free), list[Option | None]()
    for options in jobs:
        best = _fastest(options, left)
        found.append(best)
        left = _less(left, (best,))
    return tuple(found)


def together(jobs: Jobs, free: Mapping[str, int]) -> Choices:
    """Return the option of each job if all start small, the shortest first, and then grow where it helps most.

    None: nothing is left for the job. At the end, pairs of jobs may exchange devices.
    """
    left = dict(free)
    chosen: list[Option | None] = [None] * len(jobs)
    ranks = [_ranked(None, options) for options in jobs]
    while True:
        best: tuple[float, int, Option] | None = None
        for i, ranked in enumerate(ranks):
            for worth, added, new in ranked:
                if best is not None and worth <= best[0]:
                    break
                if added <= left.get(new.device, 0):
                    best = worth, i, new
                    break
        if best is None:
            return _exchanged(jobs, chosen)
        _, i, new = best
        left = _less(left, (new,))
        old, chosen[i] = chosen[i], new
        if old is not None:
            left[old.device] += old.devices
        ranks[i] = _ranked(new, jobs[i])


def total_s(jobs: Jobs, choices: Choices, free: Mapping[str, int]) -> float:
    """Return the predicted seconds from now until the end of each job, summed over all jobs.

    A job without a choice waits. It starts, in order, at the first end of another job after which one of its options
    fits. A job that never fits counts nothing: no choice changes its time.
    """
    left = _less(free, choices)
    ends = [(choice.seconds, i, choice) for i, choice in enumerate(choices) if choice is not None]
    total, now_s = sum(seconds for seconds, _, _ in ends), 0.0
    heapify(ends)
    for i, options in enumerate(jobs):
        if choices[i] is not None or all(option.devices > free.get(option.device, 0) for option in options):
            continue
        while (best := _fastest(options, left)) is None:
            now_s, _, ended = heappop(ends)
            left[ended.device] += ended.devices
        left[best.device] -= best.devices
        total += now_s + best.seconds
        heappush(ends, (now_s + best.seconds, i, best))
    return total


def _exchanged(jobs: Jobs, chosen: list[Option | None]) -> Choices:
    """Let pairs of jobs with devices of different types exchange their devices, and return the resulting choices.

    Two jobs do so if the sum of 1 / (remaining seconds) of both becomes more than ``MIN_EXCHANGE`` times as large.
    """
    fastest: list[dict[tuple[str, int], Option | None]] = [{} for _ in jobs]

    def fastest_on(i: int, other: Option) -> Option | None:
        """Return the fastest option of job ``i`` on the devices of ``other``."""
        what = other.device, other.devices
        if what not in fastest[i]:
            fastest[i][what] = _fastest(jobs[i], {other.device: other.devices})
        return fastest[i][what]

    for _ in range(len(jobs)):
        changed = False
        for i, j in combinations(range(len(jobs)), 2):
            a, b = chosen[i], chosen[j]
            if a is None or b is None or a.device == b.device:
                continue
            first, second = fastest_on(i, b), fastest_on(j, a)
            if first is None or second is None:
                continue
            gained = 1 / first.seconds + 1 / second.seconds
            if gained > MIN_EXCHANGE * (1 / a.seconds + 1 / b.seconds):
                chosen[i], chosen[j], changed = first, second, True
        if not changed:
            break
    return tuple(chosen)


STARTS_FIRST = 1e30
"""Factor by which the start of a job counts more than the growth of another."""


def _ranked(old: Option | None, options: tuple[Option, ...]) -> list[tuple[float, int, Option]]:
    """Return the steps of a job from the option ``old`` that have a value, as (value, added devices, new option).

    The most valuable step comes first. ``old``: None if the job has no devices yet. The value is per added device.
    Added devices are of the new option's type.
    """
    steps = []
    for new in options:
        mine = old.devices if old is not None and old.device == new.device else 0
        worth = _worth(old, new)
        if worth > 0:
            steps.append((worth, new.devices - mine, new))
    steps.sort(key=lambda step: -step[0])
    return steps


def _worth(old: Option | None, new: Option) -> float:
    """Return the value, per added device, of giving a job the option ``new`` in place of ``old``; higher is better.

    ``old``: None if the job has no devices yet. The value is negative if the job would become slower.
    """
    if old is None:
        return STARTS_FIRST / (new.seconds * new.devices)
    more = max(0.5, new.devices - old.devices)
    return float((old.seconds - new.seconds) / old.seconds**POWER / more)


def _fastest(options: tuple[Option, ...], free: Mapping[str, int]) -> Option | None:
    fitting = (option for option in options if option.devices <= free.get(option.device, 0))
    return min(fitting, key=lambda option: option.seconds, default=None)


def _less(free: Mapping[str, int], choices: Sequence[Option | None]) -> dict[str, int]:
    left = dict(free)
    for choice in choices:
        if choice is not None:
            left[choice.device] = left.get(choice.device, 0) - choice.devices
    return left
