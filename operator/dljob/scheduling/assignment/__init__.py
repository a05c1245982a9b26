"""Assign heterogeneous devices to several jobs together. Each device type goes to the jobs that gain most from it.

If jobs took devices one by one in the order of the queue, the first job would take the fastest devices, even if it
gains little from them, and all that it can use, even if ten others wait. Here, all jobs get few devices at first, and
then grow step by step. The next step is always the step with the greatest *relative* gain per device. Short jobs go
first: for a job with T remaining seconds, a step is worth the seconds that it saves / T ** ``POWER``. (For jobs with
sublinear speed-up, the average completion time is least if short jobs get more devices, but not all: Berg et al.,
"heSRPT: Parallel scheduling to minimize mean slowdown", Performance Evaluation 2020.)

A job with a deadline that it can meet starts before all others, with the devices that it needs for that. Beyond that,
more devices are of less use to it than to others (``NO_USE``), and also once the deadline can no longer be met. No job
restarts on devices with which it misses its deadline, unless another one meets its own by that.

A running job never gives up all its devices for others of its priority: if nothing is left for it, it starts first,
with as few devices as possible, or as its deadline allows. Without this rule, it would keep what it has, because a move
needs a part to move to, and no other job could start.

Finally, two jobs exchange devices if that multiplies the sum of 1 / T of both jobs by more than ``MIN_EXCHANGE``.

Jobs of a higher priority are assigned first, as if the others did not exist.

Each owner (namespace) is entitled to a fraction of each device type: its weight divided by the weights of all owners
that have jobs. If nothing is left for a job whose owner has less, jobs start within the entitlements first, so that an
owner with many short jobs cannot keep the others from starting.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby

from dljob.scheduling.assignment.moves import (
    fitting_moves,
    gains_by,
    helped_by,
    idle_option,
    movers,
    repays,
    spoils_deadline,
)
from dljob.scheduling.assignment.one_by_one import in_order, total_s
from dljob.scheduling.assignment.together import less, together
from dljob.scheduling.assignment.types import Assignment, Candidate, Choices, Held, Jobs, Option

__all__ = [
    "Assignment",
    "Candidate",
    "Choices",
    "Held",
    "Jobs",
    "Option",
    "assign",
    "assign_all",
    "gains_by",
    "idle_option",
    "in_order",
    "movers",
    "share",
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
    these running jobs. Each of them gets devices, unless jobs of a higher priority take all. The result ignores what a
    restart costs: ``movers`` decides which running jobs really move to their option.
    """
    return _by_priority(jobs, free, together, holding)


def assign_all(
    jobs: Sequence[Candidate], held: Sequence[Held], free: Mapping[str, int], restart_s: float
) -> Assignment:
    """Assign devices to waiting and running jobs together.

    ``jobs``: sorted, the highest priority first. ``held``: what each job holds now. ``free``: number of devices by
    type, including those that running jobs hold. ``restart_s``: seconds of a restart. A running job that does not gain
    restarts only for jobs of equal or higher priority that gain more than it loses.
    """
    parts = share(jobs, free, [i for i, mine in enumerate(held) if mine.devices])
    moving = movers(held, parts, free, restart_s)
    helped = tuple(helped_by(i, jobs, held, parts, moving) if moves else () for i, moves in enumerate(moving))
    gains = [
        part is not None and gains_by(mine, part.seconds, restart_s) for mine, part in zip(held, parts, strict=True)
    ]
    repay = {
        i
        for i, (m, own, others) in enumerate(zip(moving, gains, helped, strict=True))
        if m
        and (own or repays(i, jobs, held, parts, others, restart_s))
        and not spoils_deadline(i, jobs, held, parts, others, restart_s)
    }
    # The parts of some need devices of jobs that do not move now.
    fitting = fitting_moves(repay, held, parts, free)
    moves = tuple(i in fitting for i in range(len(jobs)))
    return Assignment(parts, moves, tuple(others if m else () for m, others in zip(moves, helped, strict=True)))


def _by_priority(
    jobs: Sequence[Candidate],
    free: Mapping[str, int],
    choose: Callable[[Sequence[Candidate], Mapping[str, int], Collection[int]], Choices],
    holding: Collection[int] = (),
) -> Choices:
    """Call ``choose`` for the jobs of each priority in turn, with the devices that are left, and join the results.

    ``jobs``: sorted, the highest priority first. The result has one entry per job, in this order. ``holding``: indices
    of jobs; ``choose`` gets those of its own jobs.
    """
    chosen: list[Option | None] = []
    left = dict(free)
    for _, group in groupby(jobs, key=lambda job: job.priority):
        equal, before = list(group), len(chosen)
        found = choose(equal, left, [i - before for i in holding if before <= i < before + len(equal)])
        chosen += found
        left = less(left, found)
    return tuple(chosen)
