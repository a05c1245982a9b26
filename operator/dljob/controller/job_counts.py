"""Count the jobs in the cache for the gauges of ``controller.metrics``: phases, deadlines and forecasts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dljob.job.observed import JobSeen
from dljob.reconcile import DEADLINE

PERCENTILES = {"p10": "remainingSecondsP10", "p50": "remainingSeconds", "p90": "remainingSecondsP90"}
"""Percentile → field of ``status.forecast`` with this percentile of the remaining seconds."""


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
        forecast = status.get("forecast") or {}
        if (slack_s := forecast.get("deadlineSlackSeconds")) is not None:
            found.slacks_s.append(slack_s)
        if phase in ("Complete", "Failed"):
            continue
        if (job.spec.get("scheduling") or {}).get("finishBy"):
            conditions = status.get("conditions") or ()
            feasible = (c.get("status") for c in conditions if c.get("type") == DEADLINE)
            found.deadlines.append(str(next(feasible, "Unknown")))
        if forecast:
            _add(found.forecasts.setdefault(job.namespace, NamespaceForecast()), status, forecast)
    return found


def _add(total: NamespaceForecast, status: Mapping[str, Any], forecast: Mapping[str, Any]) -> None:
    devices = ((status.get("usage") or {}).get("rate") or {}).get("devices") or 0
    for percentile, name in PERCENTILES.items():
        # A status that an earlier release wrote has no 10th percentile.
        total.remaining_s[percentile] += devices * forecast.get(name, forecast["remainingSeconds"])
    total.stop_s += devices * (forecast["unsavedSeconds"] + forecast["restartSeconds"])
