"""Count the jobs in the cache for the gauges of ``controller.metrics``: phases, deadlines and forecasts."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dljob.api.compact import ForecastFigures, brief_conditions, forecast_figures
from dljob.job.observed import JobSeen
from dljob.reconcile import DEADLINE

PERCENTILES = ("p10", "p50", "p90")


@dataclass
class NamespaceForecast:
    """The forecasts of all jobs of a namespace that hold devices, in seconds times devices."""

    remaining_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PERCENTILES, 0.0))
    """Sum of the remaining times of the jobs, for each percentile."""
    stop_s: float = 0.0
    """Time that would be lost if all jobs were killed now: since their last checkpoints, and for a restart."""


@dataclass
class JobCounts:
    phases: dict[str, int]
    """Number of jobs in each phase."""
    deadlines: list[str] = field(default_factory=list)
    """Status of the condition DeadlineFeasible of each job with finishBy that has not ended."""
    slacks_s: list[float] = field(default_factory=list)
    """Seconds from the predicted end to the deadline, for each job that trains with a deadline."""
    forecasts: dict[str, NamespaceForecast] = field(default_factory=dict)


def count_jobs(jobs: Iterable[JobSeen], phases: Iterable[str]) -> JobCounts:
    """Return the counts of all ``jobs``. ``phases``: those to count."""
    found = JobCounts(dict.fromkeys(phases, 0))
    for job in jobs:
        status = job.status or {}
        phase = status.get("phase") or "Pending"
        if phase in found.phases:
            found.phases[phase] += 1
        forecast = forecast_figures(status)
        if forecast is not None and forecast.slack_s is not None:
            found.slacks_s.append(forecast.slack_s)
        if phase in ("Complete", "Failed"):
            continue
        if (job.spec.get("scheduling") or {}).get("finishBy"):
            found.deadlines.append(brief_conditions(status).get(DEADLINE, ("Unknown", ""))[0])
        if forecast is not None:
            _add(found.forecasts.setdefault(job.namespace, NamespaceForecast()), forecast)
    return found


def _add(total: NamespaceForecast, forecast: ForecastFigures) -> None:
    for percentile, remaining_s in zip(PERCENTILES, (forecast.p10_s, forecast.p50_s, forecast.p90_s), strict=True):
        total.remaining_s[percentile] += forecast.devices * remaining_s
    total.stop_s += forecast.devices * (forecast.unsaved_s + forecast.restart_s)
