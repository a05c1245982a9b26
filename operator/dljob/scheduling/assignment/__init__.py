"""Assign heterogeneous devices to several jobs together. Each device type goes to the jobs that gain most from it.

If jobs took devices one by one in the order of the queue, the first job would take the fastest devices, even if it
gains little from them, and all that it can use, even if ten others wait. Here, all jobs get few devices at first, and
then grow step by step. The next step is always the step with the greatest *relative* gain per device. Short jobs go
first: for a job with T remaining seconds, a step is worth the seconds that it saves / T ** ``POWER``. (For jobs with
sublinear speed-up, the average completion time is least if short jobs get more devices, but not all: Berg et al.,
"heSRPT: Parallel scheduling to minimize mean slowdown", Performance Evaluation 2020.)

A job with a deadline that it can meet starts before all others, with the devices that it needs for that. Beyond that,
more devices are of less use to it than to others (``NO_USE``), and also once the deadline can no longer be met. No job
restarts on devices with which it misses its deadline, unless another one meets its own by that. A job that does not
become late by that restarts if another one meets its deadline by that, whatever it loses.

A running job never gives up all its devices for others of its priority: if nothing is left for it, it starts first,
with as few devices as possible, or as its deadline allows. Without this rule, it would keep what it has, because a move
needs a part to move to, and no other job could start.

A job that is *overdue* (``patience``) starts before other waiting jobs of its priority, with as few devices as
possible, or as its deadline allows. Without this rule, a long job would wait for ever while short ones keep coming.

Finally, two jobs exchange devices if that multiplies the sum of 1 / T of both jobs by more than ``MIN_EXCHANGE``.

Jobs of a higher priority are assigned first, as if the others did not exist. Only running jobs of a lower priority keep
a smallest part, for the same reason, unless a job of the higher priority preempts them, or loses its part while a
waiting job of a lower priority gets one.

Each owner (namespace) is entitled to a fraction of each device type: its weight divided by the weights of all owners
that have jobs. If nothing is left for a job whose owner has less, jobs start within the entitlements first, so that an
owner with many short jobs cannot keep the others from starting.

All jobs of an owner together need no more of any resource than its quotas allow (``Candidate.allowed``). Otherwise,
running jobs would give up devices for jobs that cannot start.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from dljob.scheduling.assignment.moves import (
    Moves,
    fitting_moves,
    helped_by,
    idle_option,
    movers,
)
from dljob.scheduling.assignment.one_by_one import in_order, total_s
from dljob.scheduling.assignment.patience import is_overdue
from dljob.scheduling.assignment.together import less, together
from dljob.scheduling.assignment.types import (
    Assignment,
    Candidate,
    Choices,
    Held,
    Jobs,
    Option,
    QuotaAmounts,
    exceeds,
    less_used,
    sum_of,
)

__all__ = [
    "Assignment",
    "Candidate",
    "Choices",
    "Held",
    "Jobs",
    "Option",
    "QuotaAmounts",
    "assign",
    "assign_all",
    "exceeds",
    "gains_by",
    "idle_option",
    "in_order",
    "is_overdue",
    "movers",
    "share",
    "sum_of",
    "together",
    "total_s",
]


def assign(jobs: Sequence[Candidate], free: Mapping[str, int]) -> Choices:
    """Choose an option for each waiting job; None for a job that gets no devices now.

    ``jobs``: in the order of the queue, jobs of the highest priority first. ``free``: number of free devices by type.
    For jobs of equal priority, the predicted sum of completion times is never larger than if each job in order took its
    fastest option.
    """

    def better(equal: Sequence[Candidate], left: Mapping[str, int], _: Collection[int]) -> Choices:
        options = [job.options for job in equal]
        return min(together(equal, left), in_order(options, left), key=lambda each: total_s(options, each, left))

    return _by_priority(jobs, free, better)


def share(jobs: Sequence[Candidate], free: Mapping[str, int], holding: Collection[int] = ()) -> Choices:
    """Choose an option for each waiting or running job as if no job held devices yet; None: it gets none.

    ``free``: number of devices by type, including devices that running jobs in ``jobs`` hold. ``holding``: indices of
    these running jobs. Each of them gets devices if it can: the text of the module describes when. The result ignores
    what a restart costs: ``movers`` decides which running jobs really move to their option.
    """
    found = _by_priority(jobs, free, together, holding)
    if all(found[i] is not None for i in holding):
        return found
    lower = [i for i in sorted(holding) if jobs[i].priority < jobs[0].priority and not _preempted(jobs, i, holding)]
    best, fewest, most = found, 0, len(lower)
    while fewest < most:  # A bisection finds how many of them can keep a part, the first in line before the others.
        count = (fewest + most + 1) // 2
        kept = {i: _smallest(jobs[i], free) for i in lower[:count]}
        tried = _by_priority(jobs, free, together, holding, kept)
        if _passes_over(jobs, found, tried, holding):
            most = count - 1
        else:
            best, fewest = tried, count
    return best


def _passes_over(jobs: Sequence[Candidate], before: Choices, after: Choices, holding: Collection[int]) -> bool:
    """Return True if a job loses its part while a waiting job of a lower priority gets devices that it could use."""
    lost = [job for job, old, new in zip(jobs, before, after, strict=True) if old is not None and new is None]
    given = [
        (job.priority, part.device)
        for j, (job, part) in enumerate(zip(jobs, after, strict=True))
        if part is not None and j not in holding
    ]
    return any(
        priority < job.priority and any(option.device == device for option in job.options)
        for job in lost
        for priority, device in given
    )


def _preempted(jobs: Sequence[Candidate], i: int, holding: Collection[int]) -> bool:
    """Return True if running job ``i`` stops for a waiting job of a higher priority."""
    return any(job.preempts and job.priority > jobs[i].priority and j not in holding for j, job in enumerate(jobs))


def _smallest(job: Candidate, free: Mapping[str, int]) -> Option | None:
    """Return the option of a job that leaves most to others: it needs the smallest fraction of a type's devices."""
    fitting = (each for each in job.options if each.devices <= free.get(each.device, 0))
    return min(fitting, key=lambda each: (each.devices / free[each.device], each.seconds), default=None)


def assign_all(
    jobs: Sequence[Candidate], held: Sequence[Held], free: Mapping[str, int], restart_s: float
) -> Assignment:
    """Assign devices to waiting and running jobs together.

    ``jobs``: sorted, the highest priority first. ``held``: what each job holds now. ``free``: number of devices by
    type, including those that running jobs hold. ``restart_s``: seconds of a restart. A running job that does not gain
    restarts only for jobs of equal or higher priority that gain more than it loses, or of which one meets its deadline
    by that.
    """
    jobs = _with_held(jobs, held)
    parts = share(jobs, free, [i for i, mine in enumerate(held) if mine.devices])
    moving = movers(held, parts, free, restart_s)
    helped = tuple(helped_by(i, jobs, held, parts, moving) if moves else () for i, moves in enumerate(moving))
    proposed = Moves(jobs, held, parts, helped, restart_s)
    worthwhile = [i for i, moves in enumerate(moving) if moves and proposed.are_worthwhile(i)]
    # The parts of some need devices of jobs that do not move now.
    fitting = fitting_moves(worthwhile, held, parts, free)
    moves = tuple(i in fitting for i in range(len(jobs)))
    return Assignment(parts, moves, tuple(others if m else () for m, others in zip(moves, helped, strict=True)))


def _with_held(jobs: Sequence[Candidate], held: Sequence[Held]) -> list[Candidate]:
    """Return the jobs with limits by quotas that are not below what the jobs of an owner hold: it may keep that."""
    holds = defaultdict[str, QuotaAmounts](tuple)
    for job, mine in zip(jobs, held, strict=True):
        if job.allowed and mine.uses:
            holds[job.owner] = sum_of((holds[job.owner], mine.uses))

    return [
        replace(job, allowed=tuple(map(max, job.allowed, holds[job.owner]))) if job.owner in holds else job
        for job in jobs
    ]


def _by_priority(
    jobs: Sequence[Candidate],
    free: Mapping[str, int],
    choose: Callable[[Sequence[Candidate], Mapping[str, int], Collection[int]], Choices],
    holding: Collection[int] = (),
    kept: Mapping[int, Option | None] | None = None,
) -> Choices:
    """Call ``choose`` for the jobs of each priority in turn, with the devices that are left, and join the results.

    ``jobs``: sorted, the highest priority first. The result has one entry per job, in this order. ``holding``: indices
    of jobs; ``choose`` gets those of its own jobs. ``kept``: what jobs of a higher priority leave to these jobs.
    """
    chosen: list[Option | None] = []
    left, given = dict(free), defaultdict[str, QuotaAmounts](tuple)
    for _, group in groupby(jobs, key=lambda job: job.priority):
        equal, before = [_less_allowed(job, given[job.owner]) for job in group], len(chosen)
        later = [part for i, part in (kept or {}).items() if i >= before + len(equal)]
        own = [i - before for i in holding if before <= i < before + len(equal)]
        found = choose(equal, less(left, later), own)
        chosen += found
        left = less(left, found)
        for job, part in zip(equal, found, strict=True):
            if part is not None and part.needs:
                given[job.owner] = sum_of((given[job.owner], part.needs))
    return tuple(chosen)


def _less_allowed(job: Candidate, given: QuotaAmounts) -> Candidate:
    """Return a job with what the quotas of its owner still allow after other jobs were ``given`` this."""
    return replace(job, allowed=less_used(job.allowed, given)) if given else job
