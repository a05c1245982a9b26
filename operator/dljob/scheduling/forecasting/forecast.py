"""Forecast when waiting jobs start and end: simulate the queue several times with predicted run times.

The forecast start is the median of ``MEDIANS`` simulations in which each run takes its median time. These simulations
also have new jobs: copies of the jobs that were created within the last hour (``expected_arrivals``), at different
times in each simulation. Without new jobs, the forecast would be much too early for half of the waiting jobs that new
jobs overtake. Two more simulations usually give the bounds. The earliest start assumes short runs (10th percentile) and
no new jobs. The latest start assumes long runs (90th percentile) and new jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf
from statistics import median

from dljob.cluster import ClusterView
from dljob.scheduling.forecasting.queue_simulation import Arrival, Holder, Key, Shares, Waiter, simulate
from dljob.scheduling.forecasting.times import NO_TIME, Interval

MAX_FORECAST = 100
"""Maximum number of waiting jobs that are simulated. For the jobs behind them, there is no forecast."""
MEDIANS = 3
"""Number of simulations with median run times. They differ in the moments at which new jobs come."""
WINDOW_S = 3600.0
"""Length of a window in seconds. The jobs created in the last window are expected to come again in each next window."""
WINDOWS = 4
"""Number of windows from now on with new jobs. Jobs that come later matter only to jobs that start hours later."""
MAX_ARRIVALS = 200
"""Maximum number of new jobs in a simulation."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a waiting job starts and ends, in seconds from now. ``start``: infinity if it is unknown."""

    start: Interval
    end: Interval


@dataclass(frozen=True, slots=True)
class Recent:
    """A job that was created ``age_s`` seconds ago. ``job``: the job as it was when it began to wait."""

    age_s: float
    job: Waiter


def forecast(
    free: ClusterView,
    holders: Sequence[Holder],
    line: Sequence[Waiter],
    shares: Shares | None = None,
    recent: Sequence[Recent] = (),
    start_up: Interval = NO_TIME,
) -> dict[Key, Forecast]:
    """Return forecasts for the first ``MAX_FORECAST`` jobs of a queue, by job.

    ``free``: the nodes with what no pod uses now. ``holders``: jobs that hold devices. ``line``: the waiting jobs that
    the cluster could run, in the order of the queue. ``shares``: None if the order of the queue never changes.
    ``recent``: jobs that were created within the last ``WINDOW_S``, whether they wait or not. ``start_up``: time from a
    start to the first step. During this time, the job holds its devices but does not train.
    """
    line = line[:MAX_FORECAST]
    if not line:
        return {}
    coming = [expected_arrivals(recent, n / MEDIANS) for n in range(MEDIANS)] if recent else [()]
    low = simulate(free, holders, line, lambda time: time.p10, shares, (), start_up)
    middle = [simulate(free, holders, line, lambda time: time.p50, shares, each, start_up) for each in coming]
    high = simulate(free, holders, line, lambda time: time.p90, shares, coming[0], start_up)
    found = {}
    for job in line:
        start = _percentiles(low[job.key][0], [each[job.key][0] for each in middle], high[job.key][0])
        end = _percentiles(low[job.key][1], [each[job.key][1] for each in middle], high[job.key][1])
        found[job.key] = Forecast(start, end)
    return found


def expected_arrivals(recent: Sequence[Recent], shift: float) -> tuple[Arrival, ...]:
    """Return the jobs that are expected to come in the next ``WINDOWS`` windows, sorted by time.

    A window lasts ``WINDOW_S`` seconds. In each of these windows, copies of the ``recent`` jobs, which were created in
    the last window, come at the same times within the window, but later by ``shift`` windows (at least 0, below 1). A
    time after the end of the window wraps around to its beginning.
    """
    arrivals = []
    for window in range(WINDOWS):
        for i, each in enumerate(recent[: MAX_ARRIVALS // WINDOWS]):
            in_s = WINDOW_S * (window + (1 - each.age_s / WINDOW_S + shift) % 1)
            queued = each.job.queued
            if queued is not None:
                created = queued.created + timedelta(seconds=each.age_s + in_s)
                queued = replace(queued, uid=f"{queued.uid}+{window}", created=created, latest_start=None)
            namespace, name = each.job.key
            arrivals.append(Arrival(in_s, Waiter((namespace, f"{name}+{window}.{i}"), each.job.plans, queued)))
    return tuple(sorted(arrivals, key=lambda arrival: arrival.in_s))


def _percentiles(low_s: float, middle_s: Sequence[float], high_s: float) -> Interval:
    """Combine the predictions of all simulations for one start or end (in seconds from now) into an interval.

    ``low_s``, ``middle_s``, ``high_s``: results with short, median and long runs. The bounds are the smallest and the
    largest of all results, because long runs do not always give the latest start: while others run longer, a job may be
    back-filled and start sooner. The upper bound is infinity if the median is.
    """
    p50 = median(middle_s)
    known = [low_s, *middle_s, high_s]
    return Interval(min(known), p50, max(known) if p50 < inf else inf)
