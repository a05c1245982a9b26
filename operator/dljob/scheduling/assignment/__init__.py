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
running jobs would give up devices for jobs that cannot start. Jobs of an owner share its quotas as all jobs share the
devices: a running job gives up quota for others of its owner by the same rules (``resources``). A waiting job gets no
part for which a running job would have to give up quota that does not move.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, repeat

from dljob.scheduling.assignment.moves import Moves, helped_by, idle_option, movers
from dljob.scheduling.assignment.one_by_one import in_order, total_s
from dljob.scheduling.assignment.patience import is_overdue
from dljob.scheduling.assignment.resources import Resources, needs
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
    "Resources",
    "assign",
    "assign_all",
    "exceeds",
    "idle_option",
    "in_order",
    "is_overdue",
    "less_used",
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
    """Return True if a job loses its part while a waiting job of a lower priority gets something that it could use."""
    lost = [job for job, old, new in zip(jobs, before, after, strict=True) if old is not None and new is None]
    given = [
        (job.priority, needs(job, part).keys())
        for j, (job, part) in enumerate(zip(jobs, after, strict=True))
        if part is not None and j not in holding
    ]
    return any(
        priority < job.priority and any(not used.isdisjoint(needs(job, option)) for option in job.options)
        for job in lost
        for priority, used in given
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
    staying = {i for i, mine in enumerate(held) if mine.devices and not mine.movable}
    while True:
        found, lacking = _assigned(*_with_quotas(jobs, held, staying), free, restart_s)
        # A waiting job must not get a part for which a running job would have to give up quota that does not.
        more = {i for i, mine in enumerate(held) if mine.devices and jobs[i].owner in lacking and not found.moves[i]}
        if more <= staying:
            return found
        staying |= more


def _assigned(
    jobs: Sequence[Candidate], held: Sequence[Held], free: Mapping[str, int], restart_s: float
) -> tuple[Assignment, set[str]]:
    """Return an assignment, and the owners whose quotas are too small for the parts of waiting jobs after the moves."""
    parts = share(jobs, free, [i for i, mine in enumerate(held) if mine.devices])
    resources = Resources.of(jobs, held, parts, free)
    moving = movers(held, parts, resources, restart_s)
    helped = tuple(helped_by(i, jobs, resources, moving) if moves else () for i, moves in enumerate(moving))
    proposed = Moves(jobs, held, parts, helped, restart_s)
    worthwhile = [i for i, moves in enumerate(moving) if moves and proposed.are_worthwhile(i)]
    # The parts of some need devices or quota of jobs that do not move now.
    fitting = resources.fitting(worthwhile)
    moves = tuple(i in fitting for i in range(len(jobs)))
    found = Assignment(parts, moves, tuple(others if m else () for m, others in zip(moves, helped, strict=True)))
    return found, {each[0] for each in resources.missing(fitting, waiting=True) if not isinstance(each, str)}


def _with_quotas(
    jobs: Sequence[Candidate], held: Sequence[Held], staying: Collection[int]
) -> tuple[list[Candidate], list[Held]]:
    """Return the jobs and what they hold, with the quotas that are left to those that wait or may give up some.

    ``staying``: indices of the running jobs that give up none. What they use is subtracted from what the quotas allow,
    and from what they use and need themselves. The limits are not below what the other jobs of an owner hold: it may
    keep that.
    """
    fixed, holds = defaultdict[str, QuotaAmounts](tuple), defaultdict[str, QuotaAmounts](tuple)
    for i, (job, mine) in enumerate(zip(jobs, held, strict=True)):
        if job.allowed and mine.uses:
            of = fixed if i in staying else holds
            of[job.owner] = sum_of((of[job.owner], mine.uses))

    def changed(i: int, job: Candidate) -> Candidate:
        if not (job.owner in fixed or job.owner in holds):
            return job
        left = less_used(job.allowed, fixed[job.owner])
        job = replace(job, allowed=tuple(map(max, left, chain(holds[job.owner], repeat(0)))))
        if i not in staying:
            return job
        beyond = (tuple(max(0, n) for n in less_used(each.needs, held[i].uses)) for each in job.options)
        return replace(job, options=tuple(map(Option.with_needs, job.options, beyond)))

    found = [changed(i, job) for i, job in enumerate(jobs)]
    return found, [replace(mine, uses=()) if i in staying else mine for i, mine in enumerate(held)]


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
        members, before = list(group), len(chosen)
        later = {i: least for i, least in (kept or {}).items() if i >= before + len(members) and least is not None}
        used = defaultdict[str, QuotaAmounts](tuple, given)
        for i, least in later.items():
            used[jobs[i].owner] = sum_of((used[jobs[i].owner], least.needs))
        equal = [_less_allowed(job, used[job.owner]) for job in members]
        own = [i - before for i in holding if before <= i < before + len(equal)]
        found = choose(equal, less(left, list(later.values())), own)
        chosen += found
        left = less(left, found)
        for job, part in zip(equal, found, strict=True):
            if part is not None and part.needs:
                given[job.owner] = sum_of((given[job.owner], part.needs))
    return tuple(chosen)


def _less_allowed(job: Candidate, given: QuotaAmounts) -> Candidate:
    """Return a job with what the quotas of its owner still allow after other jobs were ``given`` this."""
    return replace(job, allowed=less_used(job.allowed, given)) if given else job
