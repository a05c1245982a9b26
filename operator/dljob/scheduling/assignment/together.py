"""Give devices to jobs step by step: the growth of the module ``assignment``."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from dljob.scheduling.assignment.types import Candidate, Choices, Option, QuotaAmounts, exceeds, less_used, sum_of

MIN_EXCHANGE = 1.2
"""Smallest factor by which an exchange of devices between two jobs must increase their sum of 1 / T (T: remaining
seconds of a job). Both jobs may have to restart, and predictions are uncertain."""
POWER = 2.0
"""Exponent of a job's remaining seconds T in the worth of a step: the larger it is, the more short jobs are favoured.
In the clairvoyant policy of benchmarks/scheduling, 1.5 to 2.5 gave the same completion times, 1 gave 19 % longer ones,
and 0, which favours long jobs, 48 % longer ones."""


def together(jobs: Sequence[Candidate], free: Mapping[str, int], holding: Collection[int] = ()) -> Choices:
    """Return the option of each job if all start small, the shortest first, and then grow where it helps most.

    None: nothing is left for the job. The text of the module describes deadlines and entitlements. ``holding``: indices
    of the jobs that hold devices now. At the end, pairs of jobs may exchange devices.
    """
    first = set[int]()
    while True:
        found, shares = _grown(jobs, free, first, limited=False)
        if any(part is None and shares.lacks(job) for part, job in zip(found, jobs, strict=True)):
            found, _ = _grown(jobs, free, first, limited=True)
        without = {i for i in holding if found[i] is None} - first
        if not without:
            return _started(jobs, _exchanged(jobs, found), free)
        first |= without


def _grown(
    jobs: Sequence[Candidate], free: Mapping[str, int], first: Collection[int], *, limited: bool
) -> tuple[list[Option | None], "_Shares"]:
    """Return the options after the most valuable steps, and what each owner has.

    ``first``: indices of the jobs that start before all others. ``limited``: True: the others start within the
    entitlements of their owners first.
    """
    left, shares = dict(free), _Shares(jobs, free)
    chosen: list[Option | None] = [None] * len(jobs)
    ranks = [_started_small(job) if i in first or job.overdue else _ranked(None, job) for i, job in enumerate(jobs)]
    everyone, overdue = list(range(len(jobs))), [i for i, job in enumerate(jobs) if job.overdue and i not in first]
    starts = [(sorted(first), False), (overdue, limited)]
    if limited:
        starts += [(everyone, True), (overdue, False)]
    for members, within in (*starts, (everyone, False)):
        grows = members is everyone and not within
        while (step := _best_step(jobs, ranks, chosen, left, shares, members, within=within, grows=grows)) is not None:
            i, new = step
            left = less(left, (new,))
            old, chosen[i] = chosen[i], new
            shares.move(jobs[i].owner, old, new)
            if old is not None:
                left[old.device] += old.devices
            ranks[i] = _ranked(new, jobs[i])
    return chosen, shares


def _best_step(
    jobs: Sequence[Candidate],
    ranks: Sequence[Sequence[tuple[float, int, Option]]],
    chosen: Sequence[Option | None],
    left: Mapping[str, int],
    shares: "_Shares",
    members: Iterable[int],
    *,
    within: bool,
    grows: bool,
) -> tuple[int, Option] | None:
    """Return the most valuable step of one of the jobs ``members``, as (index, new option); None: there is none.

    ``ranks``: the steps of each job, as ``_ranked`` returns them. ``chosen``: what each job has. ``left``: free
    devices. ``within``: True: only steps within the entitlements. ``grows``: False: only starts.
    """
    best: tuple[float, int, Option] | None = None
    for i in members:
        if not grows and chosen[i] is not None:
            continue
        for worth, added, new in ranks[i]:
            if best is not None and worth <= best[0]:
                break
            if added > left.get(new.device, 0) or shares.forbids(jobs[i].owner, chosen[i], new):
                continue
            if not (within and shares.exceeded(jobs[i].owner, new)):
                best = worth, i, new
                break
    return None if best is None else best[1:]


def _started(jobs: Sequence[Candidate], chosen: Choices, free: Mapping[str, int]) -> Choices:
    """Return the choices after starts of jobs that have none on what is left. An exchange may release devices."""
    left, found, shares = less(free, chosen), list(chosen), _Shares(jobs, free, chosen)
    waiting = [i for i, part in enumerate(chosen) if part is None]
    ranks = [_ranked(None, job) if i in waiting else [] for i, job in enumerate(jobs)]
    while (step := _best_step(jobs, ranks, found, left, shares, waiting, within=False, grows=False)) is not None:
        i, new = step
        shares.move(jobs[i].owner, None, new)
        found[i], left = new, less(left, (new,))
    return tuple(found)


_ROUNDING = 1e-9


class _Shares:
    """What each owner has been given, the fraction of each device type to which it is entitled, and its quotas."""

    def __init__(
        self, jobs: Sequence[Candidate], free: Mapping[str, int], chosen: Sequence[Option | None] = ()
    ) -> None:
        """``chosen``: what jobs have been given already, in the order of the jobs."""
        weights = {job.owner: job.weight for job in jobs}
        self._allowed = {job.owner: job.allowed for job in jobs}
        self._entitled = {owner: weight / sum(weights.values()) for owner, weight in weights.items()}
        self._free = free
        self._given: dict[str, Counter[str]] = {owner: Counter() for owner in weights}
        self._used: dict[str, QuotaAmounts] = dict.fromkeys(weights, ())
        for job, part in zip(jobs, chosen, strict=False):
            if part is not None:
                self.move(job.owner, None, part)

    def exceeded(self, owner: str, new: Option) -> bool:
        """Return True if a start with the option ``new`` exceeds the entitlement of the owner, or one device."""
        most = self._entitled[owner] * self._free.get(new.device, 0)
        return self._given[owner][new.device] + new.devices > max(1.0, most) + _ROUNDING

    def forbids(self, owner: str, old: Option | None, new: Option) -> bool:
        """Return True if a step of a job needs more of a resource than the quotas of the owner allow."""
        more = new.needs if old is None else less_used(new.needs, old.needs)
        return exceeds(more, self._used[owner], self._allowed[owner])

    def lacks(self, job: Candidate) -> bool:
        """Return True if the owner of a job that got nothing could start it within its entitlement and its quotas."""
        fitting = [each for each in job.options if each.devices <= self._free.get(each.device, 0)]
        return any(not (self.exceeded(job.owner, each) or self.forbids(job.owner, None, each)) for each in fitting)

    def move(self, owner: str, old: Option | None, new: Option) -> None:
        if old is not None:
            self._given[owner][old.device] -= old.devices
        self._given[owner][new.device] += new.devices
        before = old.needs if old is not None else ()
        self._used[owner] = less_used(sum_of((self._used[owner], new.needs)), before)


def _exchanged(jobs: Sequence[Candidate], chosen: list[Option | None]) -> Choices:
    """Let pairs of jobs with devices of different types exchange their devices, and return the resulting choices.

    Two jobs do so if the sum of 1 / (remaining seconds) of both becomes more than ``MIN_EXCHANGE`` times as large, and
    their owners use no more than their quotas allow.
    """
    fastest: list[dict[tuple[str, int], Option | None]] = [{} for _ in jobs]

    def fastest_on(i: int, other: Option) -> Option | None:
        """Return the fastest option of job ``i`` on the devices of ``other``."""
        what = other.device, other.devices
        if what not in fastest[i]:
            fastest[i][what] = fastest_fitting(jobs[i].options, {other.device: other.devices})
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
                exchanged = [first if k == i else second if k == j else part for k, part in enumerate(chosen)]
                if all(_within_quotas(jobs, exchanged, owner) for owner in {jobs[i].owner, jobs[j].owner}):
                    chosen, changed = exchanged, True
        if not changed:
            break
    return tuple(chosen)


def _within_quotas(jobs: Sequence[Candidate], chosen: Sequence[Option | None], owner: str) -> bool:
    """Return True if the jobs of an owner need no more together than its quotas allow."""
    mine = [(job.allowed, part) for job, part in zip(jobs, chosen, strict=True) if job.owner == owner]
    return not exceeds(sum_of(part.needs for _, part in mine if part is not None), (), mine[0][0])


MEETS = 100.0
"""Factor on the worth of a step with which a job meets its deadline. With 3 or 10, fewer deadlines were met on five
streams of benchmarks/scheduling."""
NO_USE = 0.1
"""Factor on the worth of the growth of a job that meets its deadline already, or can no longer meet it."""
STARTS_IN_TIME = 1e6
"""Factor on the worth of a start with which a job meets its deadline: such jobs start before all others."""
STARTS_FIRST = 1e30
"""Factor by which the start of a job counts more than the growth of another."""


def _ranked(old: Option | None, job: Candidate) -> list[tuple[float, int, Option]]:
    """Return the steps of a job from the option ``old`` that have a value, as (value, added devices, new option).

    The most valuable step comes first. ``old``: None if the job has no devices yet. The value is per added device.
    Added devices are of the new option's type.
    """
    steps = []
    for new in job.options:
        mine = old.devices if old is not None and old.device == new.device else 0
        worth = _worth(old, new) * _urgency(old, new, job)
        if worth > 0:
            steps.append((worth, new.devices - mine, new))
    steps.sort(key=lambda step: -step[0])
    return steps


def _started_small(job: Candidate) -> list[tuple[float, int, Option]]:
    """Return the steps with which a job starts that must not be left without devices, in the form of ``_ranked``.

    The fewest devices come first, and of equally many the fastest, but before all others those with which the job meets
    its deadline. Whatever it gets beyond that, it gets by growth.
    """
    due_s = job.due_s if job.due_s is not None else 0.0
    order = sorted(job.options, key=lambda option: (option.seconds > due_s, option.devices, option.seconds))
    return [(STARTS_FIRST / (1 + place), option.devices, option) for place, option in enumerate(order)]


def _urgency(old: Option | None, new: Option, job: Candidate) -> float:
    """Return the factor by which the deadline of a job changes the worth of a step from ``old`` to ``new``."""
    if job.due_s is None:
        return 1.0
    if old is None:
        return STARTS_IN_TIME if new.seconds <= job.due_s else 1.0
    if new.seconds <= job.due_s < old.seconds:
        return MEETS
    can_still_meet = old.seconds > job.due_s >= min(option.seconds for option in job.options)
    return 1.0 if can_still_meet else NO_USE


def _worth(old: Option | None, new: Option) -> float:
    """Return the value, per added device, of giving a job the option ``new`` in place of ``old``; higher is better.

    ``old``: None if the job has no devices yet. The value is negative if the job would become slower.
    """
    if old is None:
        return STARTS_FIRST / (new.seconds * new.devices)
    more = max(0.5, new.devices - old.devices)
    return float((old.seconds - new.seconds) / old.seconds**POWER / more)


def fastest_fitting(options: tuple[Option, ...], free: Mapping[str, int]) -> Option | None:
    fitting = (option for option in options if option.devices <= free.get(option.device, 0))
    return min(fitting, key=lambda option: option.seconds, default=None)


def less(free: Mapping[str, int], choices: Sequence[Option | None]) -> dict[str, int]:
    left = dict(free)
    for choice in choices:
        if choice is not None:
            left[choice.device] = left.get(choice.device, 0) - choice.devices
    return left
