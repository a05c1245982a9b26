"""Tests of the counts of jobs for metrics: phases, deadlines, and forecasts by namespace."""

from typing import Any

from dljob.controller.job_counts import count_jobs
from dljob.controller.metrics import PHASES, Metrics
from support.builders import job

Json = dict[str, Any]


def running(namespace: str = "team-a", devices: float = 4, phase: str = "Running", **forecast: float) -> Any:
    found = {"remainingSeconds": 100.0, "remainingSecondsP10": 80.0, "remainingSecondsP90": 125.0}
    found |= {"unsavedSeconds": 30.0, "restartSeconds": 20.0, **forecast}
    status: Json = {"phase": phase, "usage": {"rate": {"devices": devices}}, "forecast": found}
    return job(namespace=namespace, status=status)


def test_forecasts_are_summed_by_namespace() -> None:
    found = count_jobs([running(), running(devices=1), running("team-b"), running(phase="Complete"), job()], PHASES)
    assert found.phases["Running"] == 3 and found.phases["Complete"] == 1
    assert found.forecasts.keys() == {"team-a", "team-b"}
    assert found.forecasts["team-a"].remaining_s == {"p10": 400, "p50": 500, "p90": 625}
    assert found.forecasts["team-a"].stop_s == 250


def test_status_of_an_earlier_release_counts_with_its_median() -> None:
    one = running(devices=1)
    del one.status["forecast"]["remainingSecondsP10"]
    assert count_jobs([one], PHASES).forecasts["team-a"].remaining_s["p10"] == 100


def test_namespaces_without_running_jobs_have_no_series() -> None:
    metrics = Metrics()
    metrics.count_forecasts(count_jobs([running(), running("team-b")], PHASES).forecasts)
    metrics.count_forecasts(count_jobs([running("team-b")], PHASES).forecasts)
    text = metrics.text().decode()
    assert 'forecast_remaining_device_seconds{job_namespace="team-b",percentile="p90"} 500.0' in text
    assert 'forecast_stop_device_seconds{job_namespace="team-b"} 200.0' in text and "team-a" not in text
