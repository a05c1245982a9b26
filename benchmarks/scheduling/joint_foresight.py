"""Forecasts with the policy ``dljob``: what the operator knows of the jobs, for ``forecast_jointly``."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp

from benchmarks.scheduling.simulator import SHORT_S, State
from benchmarks.scheduling.workload import START_S, Job

from dljob.reconcile.planning.resize import MIN_STEPS
from dljob.scheduling import Interval
from dljob.scheduling.assignment import Candidate, Held, Option, QuotaAmounts, is_overdue
from dljob.scheduling.forecasting.calibration import Calibration
from dljob.scheduling.forecasting.forecast import WINDOW_S
from dljob.scheduling.forecasting.joint_forecast import JointQueue, RecentJoint, forecast_jointly
from dljob.scheduling.forecasting.joint_simulation import (
    AGAIN_S,
    LOOK_S,
    Costs,
    JointArrival,
    JointJob,
    simulate_joint,
)
from dljob.scheduling.gain import MIN_BETWEEN_S
from dljob.scheduling.pace import MEASURED_P90

COSTS = Costs(START_S, START_S, MIN_BETWEEN_S)


def joint_jobs(
    now_s: float,
    line: Sequence[State],
    options: Callable[[State], tuple[Option, ...]],
    held: Callable[[State], Held],
    moved_s: Mapping[str, float],
    rested_s: Mapping[str, float],
    spread: float,
    due_s: Callable[[State], float | None] = lambda _: None,
    allowed: QuotaAmounts = (),
) -> list[JointJob]:
    """Return the jobs of a queue as the operator knows them.

    A job that trains has a measured step time, which ``options`` and ``held`` show. ``moved_s``: when a job that holds
    devices got them. ``rested_s``: when it may move, of which only a job that trains gives notice. ``spread``: 90th
    percentile of run times / median. ``due_s``: function to ``JointJob.due_s``. ``allowed``: as in ``JointJob``.
    """
    found = []
    for state in line:
        measured, mine = state.left < 1, held(state)
        name, first = state.job.name, first_part(state.job)
        starting_s = max(0.0, START_S - now_s + moved_s[name]) if mine.devices else 0.0
        rest_s = max(0.0, rested_s[name] - now_s) if mine.devices else 0.0
        found.append(
            JointJob(
                (state.job.namespace, name),
                0,
                options(state),
                min(spread, MEASURED_P90) if measured else spread,
                mine,
                rest_s=rest_s if measured else starting_s + first * mine.left_s,
                starting_s=starting_s,
                first_part=first,
                due_s=due_s(state),
                waited_s=0.0 if mine.devices else now_s - state.job.arrival_s,
                allowed=allowed,
            )
        )
    return found


def spread_of(noise: float) -> float:
    """Return the ratio of the 90th percentile to the median of a log-normal factor."""
    return exp(1.2815515655 * noise)


def options(state: State, factor: float = 1.0) -> tuple[Option, ...]:
    """Return the options of a job for the assignment, with its remaining seconds as predicted, times ``factor``."""
    return _options(state.job, factor * max(state.left, 1e-9))


def candidate(
    now_s: float, state: State, found: tuple[Option, ...], due_s: float | None, holds: bool, allowed: QuotaAmounts = ()
) -> Candidate:
    """Return a job with the options ``found`` as it takes part in an assignment. ``holds``: it holds devices.

    ``allowed``: as in ``Candidate``.
    """
    overdue = not holds and is_overdue(now_s - state.job.arrival_s, found)
    return Candidate(0, found, state.job.namespace, due_s=due_s, overdue=overdue, allowed=allowed)


def _options(job: Job, part: float = 1.0) -> tuple[Option, ...]:
    """Return the options of a job, with the predicted seconds of its whole training times ``part``.

    They need their devices of the quota of the namespace, if there is one.
    """
    return tuple(
        Option(use.device, use.nodes, use.devices // use.nodes, part * use.seconds, (use.devices,)) for use in job.uses
    )


def first_part(job: Job) -> float:
    """Return the part of a job's training that its first steps are, before which it does not move."""
    return min(1.0, MIN_STEPS / job.request.total_steps)


def next_s(now_s: float, rested_s: Iterable[float], *, changed: bool) -> float:
    """Return the seconds until the next decision without an event, as ``controller.planning.joint`` decides.

    ``rested_s``: when the rests of the jobs that hold devices end, after which a decision follows. ``changed``: True if
    the last decision started or moved a job. The next one then follows soon.
    """
    rests = (at_s - now_s for at_s in rested_s)
    return min([LOOK_S if changed else AGAIN_S, *(rest_s for rest_s in rests if rest_s > SHORT_S)])


class Knowledge(StrEnum):
    """What a forecaster knows. The others show which errors of the first one ignorance causes."""

    PREDICTIONS = "predictions"
    RUN_TIMES = "true run times"
    ARRIVALS = "true run times and arrivals"


@dataclass
class JointForesight:
    """Forecasts of one simulation, made by the operator's code. Times in seconds of the simulation."""

    calibration: Calibration = field(default_factory=Calibration)
    seen: dict[str, tuple[float, JointJob]] = field(default_factory=dict)
    """The moment at which each job arrived, and the job as it was then."""
    stream: Sequence[Job] = ()
    """All jobs of the simulation. Only a forecaster that knows the truth may read them."""
    allowed: QuotaAmounts = ()
    """``JointJob.allowed`` of all jobs: the number of devices that a namespace may use; empty: no limit."""

    def arrived(self, state: State, options: tuple[Option, ...], spread: float) -> None:
        key = state.job.namespace, state.job.name
        job = JointJob(key, 0, options, spread, first_part=first_part(state.job), allowed=self.allowed)
        self.seen.setdefault(state.job.name, (state.job.arrival_s, job))

    def forecast(
        self,
        now_s: float,
        jobs: Sequence[JointJob],
        free: Mapping[str, int],
        knows: Knowledge,
        first_s: float,
        measured: Collection[str],
    ) -> dict[str, Interval]:
        """Return the forecast wait of each waiting job. ``first_s``: seconds to the next decision without an event.

        ``measured``: names of the jobs that train.
        """
        if knows is not Knowledge.PREDICTIONS:
            return self._with_truth(now_s, jobs, free, first_s, measured, arrivals=knows is Knowledge.ARRIVALS)
        recent = [RecentJoint(now_s - at_s, job) for at_s, job in self.seen.values() if now_s - at_s < WINDOW_S]
        found = forecast_jointly(JointQueue(jobs, free, COSTS, recent, first_s=first_s))
        return {name: self.calibration.forecast_of(name, now_s, each).start for (_, name), each in found.items()}

    def _with_truth(
        self,
        now_s: float,
        jobs: Sequence[JointJob],
        free: Mapping[str, int],
        first_s: float,
        measured: Collection[str],
        *,
        arrivals: bool,
    ) -> dict[str, Interval]:
        """Return the wait of each waiting job as the rule gives it for true run times, and perhaps true arrivals."""
        noise = {job.name: job.noise for job in self.stream}
        true = [1.0 if job.key[1] in measured else noise[job.key[1]] for job in jobs]
        later = [
            JointArrival(
                job.arrival_s - now_s,
                JointJob((job.namespace, job.name), 0, _options(job), first_part=first_part(job), allowed=self.allowed),
            )
            for job in self.stream
            if arrivals and job.arrival_s > now_s
        ]
        factors = [*true, *(noise[each.job.key[1]] for each in later)]
        found = simulate_joint(jobs, factors, free, COSTS, later, first_s=first_s)
        return {name: Interval(wait_s, wait_s, wait_s) for (_, name), (wait_s, _) in found.items()}
