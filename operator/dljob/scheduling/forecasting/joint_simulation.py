"""Simulate a queue whose devices are assigned to all jobs together, with the rule that decides: ``assign_all``.

The simulation counts devices of each type, not nodes. Jobs get parts, move, rest between two moves, and grow. It
decides when the controller decides: at the end of a job, an arrival and the end of a rest, ``LOOK_S`` after a decision
that started or moved a job, and ``AGAIN_S`` after any other decision.

A decision for many jobs takes milliseconds. The number of decisions is therefore limited (``Budget``). After the last
one, jobs keep their devices, and each waiting job, in order, starts with its fastest option that fits.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from dljob.scheduling.assignment import (
    Candidate,
    Choices,
    Held,
    Option,
    QuotaAmounts,
    assign_all,
    exceeds,
    is_overdue,
    sum_of,
)
from dljob.scheduling.gain import MIN_LEFT_S

Key = tuple[str, str]
LOOK_S = 10.0
"""Minimum seconds between two assignments that move running jobs. Starts and moves change the state of the cluster, so
that the next assignment follows after this time."""
AGAIN_S = 60.0
"""Seconds after which devices are assigned again although no job or pod has changed: running jobs progress."""
TICK_GROWTH = 0.1
"""In the simulation, the time between two decisions without a change is at least this fraction of the simulated time,
because decisions of the far future need not be as fine."""
SHORT_S = 1e-6
WAITS = Held({})


@dataclass(frozen=True, slots=True)
class JointJob:
    """A job that takes part in the assignment.

    ``options``: its plans, with the seconds of its remaining training. ``spread``: 90th percentile of these seconds /
    median. ``held``: what it holds now. ``rest_s``: seconds for which it must not move; infinity: it never moves.
    ``starting_s``: seconds until it trains, if it has just started. ``first_part``: part of its training before which
    it does not move once it has started. ``weight``: the weight of its namespace. ``due_s``: as in ``Candidate``, now.
    ``preempts``, ``allowed``: as there. ``waited_s``: seconds for which it has waited; 0 for a job that holds devices.
    """

    key: Key
    priority: int
    options: tuple[Option, ...]
    spread: float = 1.0
    held: Held = WAITS
    rest_s: float = 0.0
    starting_s: float = 0.0
    first_part: float = 0.0
    weight: float = 1.0
    due_s: float | None = None
    preempts: bool = False
    waited_s: float = 0.0
    allowed: QuotaAmounts = ()


@dataclass(frozen=True, slots=True)
class JointArrival:
    """A job that is expected to be created in ``in_s`` seconds."""

    in_s: float
    job: JointJob


@dataclass(frozen=True, slots=True)
class Ending:
    """A job outside the assignment, which gives up its devices in ``in_s`` seconds. ``devices``: number by type."""

    in_s: float
    devices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that starts and moves take.

    ``start_s``: from the start of a job to its first step. ``restart_s``: a restart, as the assignment counts it.
    ``rest_s``: minimum time between two moves of a job.
    """

    start_s: float
    restart_s: float
    rest_s: float


@dataclass
class Budget:
    """How much work the simulations may still do. ``work``: number of pairs of jobs compared in decisions."""

    work: float

    def spend(self, jobs: int) -> bool:
        """Return True if a decision for so many jobs is within the budget, and subtract it."""
        if self.work <= 0:
            return False
        self.work -= jobs * jobs
        return True


@dataclass
class _Job:
    """A job in the simulation.

    ``left``: fraction of the training left now that is still left. ``run_s``: seconds of that training on ``devices``,
    as the assignment knows them. ``rested_s``: simulated time from which it may move. ``started``: False if it has
    never held devices. ``came_s``: simulated time at which it arrives, or 0. ``uses``: what it has of its quotas.
    """

    job: JointJob
    factor: float
    devices: Mapping[str, int] = field(default_factory=dict)
    left: float = 1.0
    run_s: float = 0.0
    starting_s: float = 0.0
    rested_s: float = 0.0
    started: bool = False
    came_s: float = 0.0
    uses: QuotaAmounts = ()

    @property
    def end_s(self) -> float:
        return self.starting_s + self.left * self.run_s * self.factor if self.devices else inf

    def options(self) -> tuple[Option, ...]:
        left = max(self.left, 1e-9)
        return tuple(Option(o.device, o.nodes, o.per_node, left * o.seconds, o.needs) for o in self.job.options)

    def candidate(self, now_s: float) -> Candidate:
        due_s = None if self.job.due_s is None else self.job.due_s - now_s
        job, options = self.job, self.options()
        overdue = not self.devices and is_overdue(job.waited_s + now_s - self.came_s, options)
        return Candidate(job.priority, options, job.key[0], job.weight, due_s, job.preempts, overdue, job.allowed)

    def held(self, now_s: float) -> Held:
        if not self.devices:
            return Held({})
        left_s = self.left * self.run_s
        movable = now_s >= self.rested_s - SHORT_S and left_s >= MIN_LEFT_S
        return Held(self.devices, left_s, movable, self.uses)

    def advance(self, step_s: float) -> None:
        if not self.devices:
            return
        works_s = max(0.0, step_s - self.starting_s)
        self.starting_s = max(0.0, self.starting_s - step_s)
        true_s = self.run_s * self.factor
        self.left = max(0.0, self.left - works_s / true_s) if true_s > 0 else 0.0


def simulate_joint(
    jobs: Sequence[JointJob],
    factors: Sequence[float],
    free: Mapping[str, int],
    costs: Costs,
    arrivals: Sequence[JointArrival] = (),
    endings: Sequence[Ending] = (),
    budget: Budget | None = None,
    first_s: float = 0.0,
) -> dict[Key, tuple[float, float]]:
    """Simulate the queue. Return for each waiting job the seconds until its start and its end; infinity: unknown.

    ``jobs``: waiting and running jobs in the order of the queue, the highest priority first. ``factors``: for each job,
    and then for each arrival, true run time / predicted run time. ``free``: devices that no
    job holds now, by type. ``arrivals``, ``endings``: in any order. ``budget``: None: decisions are not limited.
    ``first_s``: seconds until the first decision if nothing else leads to an earlier one.
    """
    return _Simulation(jobs, factors, free, costs, arrivals, endings, budget or Budget(inf), first_s).run()


class _Simulation:
    def __init__(
        self,
        jobs: Sequence[JointJob],
        factors: Sequence[float],
        free: Mapping[str, int],
        costs: Costs,
        arrivals: Sequence[JointArrival],
        endings: Sequence[Ending],
        budget: Budget,
        first_s: float,
    ) -> None:
        self.costs, self.budget, self.now_s = costs, budget, 0.0
        self.due_s = first_s
        """Simulated time of the next decision if there is no event."""
        self.active = [_active(job, factor) for job, factor in zip(jobs, factors, strict=False)]
        self.waits = {job.key for job in jobs if not job.held.devices}
        self.found = dict.fromkeys(self.waits, (inf, inf))
        later = factors[len(jobs) :]
        coming = [
            (each.in_s, _Job(each.job, factor, came_s=each.in_s)) for each, factor in zip(arrivals, later, strict=True)
        ]
        self.coming = sorted(coming, key=lambda each: each[0])
        self.endings = sorted(endings, key=lambda each: each.in_s)
        self.free = Counter(free)

    def run(self) -> dict[Key, tuple[float, float]]:
        goes_on = self.due_s <= 0 or self._next(decides=True)
        while self.waits and goes_on:
            while self.coming and self.coming[0][0] <= self.now_s + SHORT_S:
                self._add(self.coming.pop(0)[1])
            while self.endings and self.endings[0].in_s <= self.now_s + SHORT_S:
                self.free.update(self.endings.pop(0).devices)
            decides = self.budget.spend(len(self.active))
            if decides:
                changed = self._decide()
                self.due_s = self.now_s + max(LOOK_S if changed else AGAIN_S, TICK_GROWTH * self.now_s)
            else:
                for job in self._waiting():
                    self._start(job, self.free)
            goes_on = self._next(decides)
        return self.found

    def _add(self, job: _Job) -> None:
        """Add a job behind those of its priority."""
        at = next((i for i, each in enumerate(self.active) if each.job.priority < job.job.priority), len(self.active))
        self.active.insert(at, job)

    def _waiting(self) -> list[_Job]:
        return [job for job in self.active if not job.devices]

    def _next(self, decides: bool) -> bool:
        """Go on to the next decision. Return False if nothing happens any more."""
        times = [job.end_s for job in self.active]
        times += [each[0] - self.now_s for each in self.coming[:1]]
        times += [each.in_s - self.now_s for each in self.endings[:1]]
        if decides:
            times += [
                job.rested_s - self.now_s for job in self.active if job.devices and job.rested_s > self.now_s + SHORT_S
            ]
            times.append(self.due_s - self.now_s if self.now_s == 0 or any(job.devices for job in self.active) else inf)
        step_s = max(0.0, min(times, default=inf))
        if step_s == inf:
            return False
        for job in [job for job in self.active if job.end_s <= step_s + SHORT_S]:
            self.free.update(job.devices)
            self.active.remove(job)
        for job in self.active:
            job.advance(step_s)
        self.now_s += step_s
        return True

    def _decide(self) -> bool:
        """Assign devices to all jobs. Return True if that starts or moves a job."""
        waited = len(self._waiting())
        parts: Choices = (None,) * len(self.active)
        moves: tuple[bool, ...] = (False,) * len(self.active)
        if len(self.active) > 1:
            candidates = [job.candidate(self.now_s) for job in self.active]
            held = [job.held(self.now_s) for job in self.active]
            total = self.free.copy()
            for job in self.active:
                total.update(job.devices)
            found = assign_all(candidates, held, total, self.costs.restart_s)
            parts, moves = found.parts, found.moves
            for job, moved in zip(self.active, moves, strict=True):
                if moved:
                    self.free.update(job.devices)
                    job.devices, job.uses = {}, ()
        # A job that moves has reserved its part before it stops, so that no waiting job can take it.
        for job, part, _ in sorted(zip(self.active, parts, moves, strict=True), key=lambda each: not each[2]):
            if part is not None and not job.devices:
                self._start(job, {part.device: min(part.devices, self.free[part.device])})
        if any(moves):
            return True
        reserved = {id(job): part for job, part in zip(self.active, parts, strict=True) if part and not job.devices}
        left = self.free.copy()
        for part in reserved.values():
            left[part.device] -= part.devices
        for job in self._waiting():
            mine = reserved.get(id(job))
            if mine is not None:
                left[mine.device] += mine.devices
            before = self.free.copy()
            self._start(job, left)
            left.subtract(before - self.free)
            if mine is not None and not job.devices:
                left[mine.device] -= mine.devices
        return len(self._waiting()) < waited

    def _used(self, namespace: str) -> QuotaAmounts:
        """Return what the jobs of a namespace use of its quotas."""
        return sum_of(each.uses for each in self.active if each.uses and each.job.key[0] == namespace)

    def _start(self, job: _Job, free: Mapping[str, int]) -> None:
        """Start a job with its fastest option that fits in ``free``; do nothing if none fits."""
        fitting = [option for option in job.job.options if option.devices <= free.get(option.device, 0)]
        if fitting and job.job.allowed:
            used = self._used(job.job.key[0])
            fitting = [option for option in fitting if not exceeds(option.needs, used, job.job.allowed)]
        best = min(fitting, key=lambda option: option.seconds, default=None)
        if best is None:
            return
        job.devices, job.run_s, job.uses = {best.device: best.devices}, best.seconds, best.needs
        first_steps_s = self.costs.start_s + job.job.first_part * best.seconds * job.factor
        rest_s = self.costs.rest_s if job.started else first_steps_s
        job.starting_s, job.rested_s, job.started = self.costs.start_s, self.now_s + rest_s, True
        self.free[best.device] -= best.devices
        key = job.job.key
        if key in self.waits:
            self.waits.remove(key)
            self.found[key] = self.now_s, self.now_s + job.end_s


def _active(job: JointJob, factor: float) -> _Job:
    return _Job(
        job, factor, dict(job.held.devices), 1.0, job.held.left_s, job.starting_s,
        job.rest_s if job.held.devices else 0.0, bool(job.held.devices), uses=job.held.uses,
    )  # fmt: skip
