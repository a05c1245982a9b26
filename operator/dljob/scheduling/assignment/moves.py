"""Decide which running jobs restart on the parts that an assignment gives them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dljob.scheduling.assignment.resources import Resources, needs
from dljob.scheduling.assignment.together import fastest_fitting
from dljob.scheduling.assignment.types import Candidate, Choices, Held, Option
from dljob.scheduling.gain import MIN_BETWEEN_S, MIN_GAIN, MIN_GAIN_S


def movers(held: Sequence[Held], parts: Choices, resources: Resources, restart_s: float) -> tuple[bool, ...]:
    """Return for each job True if it runs and restarts on its part (the option that ``share`` chose for it).

    It restarts if that pays for the job itself, or if other jobs need what the job holds: devices or, if they are of
    the same owner, quota. ``held``: what each job holds. ``parts``: the part of each job; None: it gets no devices.
    ``resources``: of these jobs and parts. ``restart_s``: seconds of a restart. The parts of the jobs that restart fit
    beside what all other jobs hold. The parts of waiting jobs may not fit yet.
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
        if not pays and not resources.lacks_more(moving - {i}, moving):
            moving.remove(i)
    moving = resources.fitting(moving)
    return tuple(i in moving for i in range(len(held)))


def gains_by(mine: Held, seconds: float, restart_s: float) -> bool:
    """Return True if a running job gains enough by a restart, after which it needs ``seconds`` to its end.

    ``mine``: what the job holds, with its remaining time. ``restart_s``: seconds of the restart itself. The gain must
    reach ``MIN_GAIN_S`` seconds and the fraction ``MIN_GAIN`` of the job's remaining time.
    """
    return mine.left_s - seconds - restart_s >= max(MIN_GAIN_S, MIN_GAIN * mine.left_s)


def idle_option(
    i: int, jobs: Sequence[Candidate], held: Sequence[Held], resources: Resources, restart_s: float
) -> Option | None:
    """Return the option with which running job ``i`` would gain enough if it moved to devices that stay free otherwise.

    These are devices that neither the other jobs hold nor waiting jobs get, and its own. The same holds for what quotas
    limit. Return None if there is no such option.
    """
    left = resources.left_beside(i)
    fitting = (o for o in jobs[i].options if all(count <= left[each] for each, count in needs(jobs[i], o).items()))
    found = min(fitting, key=lambda option: option.seconds, default=None)
    return found if found is not None and gains_by(held[i], found.seconds, restart_s) else None


def helped_by(i: int, jobs: Sequence[Candidate], resources: Resources, moving: Sequence[bool]) -> tuple[int, ...]:
    """Return the indices of the jobs that get more of a resource because job ``i`` releases some of it when it moves.

    These jobs wait or move, and have at least the priority of job ``i``. ``resources``: of the jobs and their parts.
    """
    released = resources.released(i, {j for j, moves in enumerate(moving) if moves})
    return tuple(
        j
        for j, job in enumerate(jobs)
        if j != i
        and resources.gets_more(j, released)
        and job.priority >= jobs[i].priority
        and (not resources.held[j] or moving[j])
    )


@dataclass
class _Link:
    """A job of a chain of moves, whose ``others`` are being followed.

    ``others``: the jobs that it helps and that were not followed yet. ``gained_s``: by how many seconds in total jobs
    end sooner. ``apart_s``: how long the job makes room for them.
    """

    job: int
    others: Iterator[int]
    gained_s: float = 0.0
    apart_s: float = 0.0

    def add(self, gained_s: float, apart_s: float) -> None:
        self.gained_s, self.apart_s = self.gained_s + gained_s, max(self.apart_s, apart_s)


@dataclass(frozen=True)
class Moves:
    """Running jobs that could restart on their parts, and which others each of them would help by that.

    ``held``: what each job holds. ``parts``: the part of each job. ``helped``: for each job, the jobs that
    ``helped_by`` returns; none for a job that does not move. ``restart_s``: seconds of a restart.
    """

    jobs: Sequence[Candidate]
    held: Sequence[Held]
    parts: Choices
    helped: Sequence[Sequence[int]]
    restart_s: float

    def are_worthwhile(self, i: int) -> bool:
        """Return True if job ``i``, which could move, gains by that, or helps others enough.

        If it misses its deadline only by its move, another job must meet its own by that.
        """
        part = self.parts[i]
        assert part is not None
        repaid, rescues = gains_by(self.held[i], part.seconds, self.restart_s) or self._repays(i), self._rescues(i)
        return (repaid and rescues) if self._becomes_late(i) else (repaid or rescues)

    def _repays(self, i: int) -> bool:
        """Return True if other jobs gain more than job ``i`` loses when it moves to its part.

        The difference must reach ``MIN_GAIN_S`` seconds and the fraction ``MIN_GAIN`` of the remaining time of job
        ``i``.
        """
        return bool(self.helped[i]) and self._gained_s(i) >= max(MIN_GAIN_S, MIN_GAIN * self.held[i].left_s)

    def _gained_s(self, i: int) -> float:
        """Return by how many seconds in total jobs end sooner if job ``i`` moves.

        A helped job that becomes slower moves only because others need what it holds. It is a link of a chain: what
        these others gain counts, and what it loses. Each job counts once. The chain is not followed by calls of this
        method, because it may have more links than the stack of Python allows.
        """
        counted = {i}
        chain = [_Link(i, iter(self.helped[i]))]
        while True:
            link = chain[-1]
            j = next((j for j in link.others if j not in counted), None)
            if j is None:
                gained_s = link.gained_s - self._lost_s(link.job, link.apart_s)
                chain.pop()
                if not chain:
                    return gained_s
                chain[-1].add(gained_s, link.apart_s)
                continue
            counted.add(j)
            part = self.parts[j]
            assert part is not None
            if self.held[j].devices and part.seconds > self.held[j].left_s:
                chain.append(_Link(j, iter(self.helped[j])))
            else:
                link.add(self._helped_s(link.job, j), part.seconds)

    def _helped_s(self, i: int, j: int) -> float:
        """Return by how many seconds job ``j`` ends sooner if job ``i`` makes room for it.

        Assumed: without the move, a waiting job starts when job ``i`` ends. With the move, the waiting job starts now.
        When one of the two jobs ends, the other takes over its devices.
        """
        mine, part, held = self.parts[i], self.parts[j], self.held
        assert mine is not None and part is not None
        if held[j].devices:
            return held[j].left_s - part.seconds - self.restart_s
        count = max(sum(held[i].devices.values()), part.devices)
        alone = fastest_fitting(self.jobs[j].options, {part.device: count}) or part
        both_s = mine.seconds + self.restart_s
        done = min(1.0, both_s / part.seconds)
        ends_s = part.seconds if done == 1.0 else both_s + (1 - done) * alone.seconds
        return held[i].left_s + alone.seconds - ends_s

    def _lost_s(self, i: int, apart_s: float) -> float:
        """Return the seconds that job ``i`` loses by making room for others, which takes ``apart_s`` seconds.

        It then takes back its devices. For this, it restarts a second time, after ``MIN_BETWEEN_S`` seconds or more.
        """
        mine = self.parts[i]
        assert mine is not None
        slower = max(0.0, 1 - self.held[i].left_s / mine.seconds)
        return min(max(apart_s, MIN_BETWEEN_S), mine.seconds) * slower + 2 * self.restart_s

    def _becomes_late(self, i: int) -> bool:
        """Return True if job ``i`` misses its deadline only by its move."""
        due_s, part = self.jobs[i].due_s, self.parts[i]
        assert part is not None
        return due_s is not None and self.held[i].left_s <= due_s < part.seconds + self.restart_s

    def _rescues(self, i: int) -> bool:
        """Return True if a job meets its deadline only because job ``i`` moves.

        It is one of those that job ``i`` helps, or that these help by their own moves.
        """
        reached, to_follow = {i}, [i]
        while to_follow:
            new = set(self.helped[to_follow.pop()]) - reached
            reached |= new
            to_follow += new
        return any(map(self._is_rescued, reached - {i}))

    def _is_rescued(self, i: int) -> bool:
        due_s, mine, part = self.jobs[i].due_s, self.held[i], self.parts[i]
        if due_s is None or part is None:
            return False
        late = not mine.devices or mine.left_s > due_s
        return late and part.seconds + (self.restart_s if mine.devices else 0.0) <= due_s
