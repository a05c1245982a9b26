"""Forecast the starts of waiting jobs if devices are assigned to all jobs together (``joint_simulation``).

The forecast start is that of a simulation in which each job takes its median time and no job arrives. ``SCENARIOS``
more simulations give the bounds. In each, each job is longer or shorter than predicted by another factor, and copies of
the jobs of the last hour arrive at other times. Their median was a worse forecast in streams 10 to 14 of
benchmarks/scheduling: 15.3 % median error instead of 11.9 %, measured before decisions were simulated at ``LOOK_S``.
Draws depend only on the keys of jobs, so that forecasts change little from one to the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import NormalDist

from dljob.scheduling.forecasting.forecast import MAX_ARRIVALS, WINDOW_S, WINDOWS, Forecast
from dljob.scheduling.forecasting.joint_simulation import (
    Budget,
    Costs,
    Ending,
    JointArrival,
    JointJob,
    Key,
    simulate_joint,
)
from dljob.scheduling.forecasting.times import Interval

SCENARIOS = 8
"""Number of simulations for the bounds of one forecast."""
MAX_WORK = 100_000.0
"""Maximum work of one forecast: the sum over all simulated decisions of (number of jobs)²."""
_NORMAL = NormalDist()
_Z90 = _NORMAL.inv_cdf(0.9)


@dataclass(frozen=True, slots=True)
class RecentJoint:
    """A job that was created ``age_s`` seconds ago. ``job``: the job as it was when it was created."""

    age_s: float
    job: JointJob


@dataclass(frozen=True, slots=True)
class JointQueue:
    """What a forecast knows.

    ``jobs``: waiting and running jobs in the order of the queue, the highest priority first. ``free``: devices that no
    job holds, by type. ``recent``: jobs created within the last ``WINDOW_S`` seconds. ``endings``: jobs outside the
    assignment that will give up devices. ``first_s``: seconds until devices are assigned again without an event.
    """

    jobs: Sequence[JointJob]
    free: Mapping[str, int]
    costs: Costs
    recent: Sequence[RecentJoint] = ()
    endings: Sequence[Ending] = ()
    first_s: float = 0.0


def forecast_jointly(queue: JointQueue) -> dict[Key, Forecast]:
    """Return forecasts for the waiting jobs of a queue, by job. Their intervals are not calibrated."""
    jobs = queue.jobs
    if all(job.held.devices for job in jobs):
        return {}
    factors = [1.0] * len(jobs)
    budget = Budget(MAX_WORK / (SCENARIOS + 1))
    middle = simulate_joint(jobs, factors, queue.free, queue.costs, (), queue.endings, budget, queue.first_s)
    left, found = MAX_WORK * SCENARIOS / (SCENARIOS + 1) + max(0.0, budget.work), [middle]
    for n in range(SCENARIOS):
        budget = Budget(left / (SCENARIOS - n))
        left -= budget.work
        arrivals = expected(queue.recent, n)
        factors = [draw(job, n) for job in (*jobs, *(each.job for each in arrivals))]
        found.append(
            simulate_joint(jobs, factors, queue.free, queue.costs, arrivals, queue.endings, budget, queue.first_s)
        )
        left += max(0.0, budget.work)

    def interval(key: Key, i: int) -> Interval:
        times_s = [each[key][i] for each in found]
        return Interval(min(times_s), middle[key][i], max(times_s))

    return {job.key: Forecast(interval(job.key, 0), interval(job.key, 1)) for job in jobs if not job.held.devices}


def expected(recent: Sequence[RecentJoint], scenario: int) -> tuple[JointArrival, ...]:
    """Return the jobs that are expected to come in one scenario: copies of recent jobs, at random times.

    In each of the next ``WINDOWS`` windows of ``WINDOW_S`` seconds, as many jobs come as in the last window.
    """
    arrivals = []
    for window in range(WINDOWS):
        for i, each in enumerate(recent[: MAX_ARRIVALS // WINDOWS]):
            random = Random(f"{each.job.key} {window} {scenario}")
            namespace, name = each.job.key
            job = replace(each.job, key=(namespace, f"{name}+{window}.{i}"))
            arrivals.append(JointArrival(WINDOW_S * (window + random.random()), job))
    return tuple(sorted(arrivals, key=lambda arrival: arrival.in_s))


def draw(job: JointJob, scenario: int) -> float:
    """Return the factor by which a job is longer than its median in one scenario (log-normal, by its ``spread``).

    Over all scenarios, the factors of a job are equally likely: each is the middle of another ``1 / SCENARIOS`` of the
    distribution.
    """
    strata = list(range(SCENARIOS))
    Random(str(job.key)).shuffle(strata)
    z = _NORMAL.inv_cdf((strata[scenario] + 0.5) / SCENARIOS)
    return float(max(1.0, job.spread) ** (z / _Z90))
