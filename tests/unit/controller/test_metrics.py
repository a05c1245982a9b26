"""Tests of the operator's metrics: they are served, bounded and documented."""

import asyncio
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dljob.api import Condition, DLJobStatus, Phase, Progress, Usage
from dljob.app.health import serve
from dljob.controller.metrics import Metrics

OURS = "dljob_operator_"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
BOUNDED = {"kind", "scope", "phase", "result", "outcome", "verb", "resource", "code", "le", "reason"}
BOUNDED |= {"feasible", "percentile", "position", "job_namespace"}


def families(metrics: Metrics) -> dict[str, Any]:
    found = text_string_to_metric_families(metrics.text().decode())
    return {family.name: family for family in found if family.name.startswith(OURS)}


def test_no_label_contains_a_job_name() -> None:
    metrics = Metrics()
    metrics.requested("get", "pods", 200, 0.1)
    labels = {label for family in families(metrics).values() for sample in family.samples for label in sample.labels}
    assert labels and labels <= BOUNDED


def test_every_metric_has_a_help_sentence() -> None:
    for name, family in families(Metrics()).items():
        assert len(family.documentation) > 20 and family.documentation.rstrip().endswith("."), name


def test_all_phases_are_exported_from_the_start() -> None:
    samples = families(Metrics())["dljob_operator_jobs"].samples
    assert {s.labels["phase"]: s.value for s in samples} == {phase.value: 0.0 for phase in Phase}


def test_each_divergence_of_parameters_is_counted_once() -> None:
    """The job returns to its checkpoint or, if no failure is allowed, fails."""

    def status(restarts: int, reason: str = "") -> DLJobStatus:
        failed = Condition(type="Failed", status="True", reason=reason or "None", message="", last_transition_time=NOW)
        causes = {"ParametersDiverged": restarts, "RankKilled": 5}
        return DLJobStatus(restarts_by_cause=causes, conditions=(failed,) if reason else ())

    metrics = Metrics()
    story = [
        status(0),
        status(1),
        status(1),
        status(2),
        status(2, "ParametersDiverged"),
        status(2, "ParametersDiverged"),
    ]
    for before, after in pairwise(story):
        metrics.record_transition(before, after, "team-a")
    metrics.record_transition(status(0), status(0, "OutOfMemory"), "team-a")
    counted = {s.name: s.value for family in families(metrics).values() for s in family.samples if not s.labels}
    assert counted["dljob_operator_parameters_diverged_total"] == 3


def test_steps_that_were_done_twice_are_counted() -> None:
    def status(repeated: int | None) -> DLJobStatus:
        return DLJobStatus(progress=Progress(step=9, steps=10, percent=90, steps_repeated=repeated))

    metrics = Metrics()
    for before, after in pairwise([DLJobStatus(), status(None), status(3), status(3), status(8)]):
        metrics.record_transition(before, after, "team-a")
    [sample] = families(metrics)["dljob_operator_steps_repeated"].samples
    assert sample.value == 8


def test_use_is_summed_by_namespace() -> None:
    def status(seconds: float, carbon_g: float | None = None) -> DLJobStatus:
        use = Usage(
            time=NOW, device_seconds=seconds, energy_joules=10 * seconds, cost=seconds / 4, carbon_grams=carbon_g
        )
        return DLJobStatus(usage=use)

    metrics = Metrics()
    for before, after in pairwise([DLJobStatus(), status(2), status(2), status(8)]):
        metrics.record_transition(before, after, "team-a")
    metrics.record_transition(status(8), status(9, 3.0), "team-b")
    found = families(metrics)
    sums = {
        name: {s.labels["job_namespace"]: s.value for s in found[f"dljob_operator_used_{name}"].samples}
        for name in ("device_seconds", "energy_joules", "cost_dollars", "carbon_grams")
    }
    assert sums == {
        "device_seconds": {"team-a": 8, "team-b": 1},
        "energy_joules": {"team-a": 80, "team-b": 10},
        "cost_dollars": {"team-a": 2, "team-b": 0.25},
        "carbon_grams": {"team-b": 3},
    }


def test_failures_that_rules_ignore_are_counted() -> None:
    metrics = Metrics()
    counts = (None, 1, 1, 3, None, 1)  # The record starts anew when the job's coordinator does.
    for before, after in pairwise(DLJobStatus(failures_ignored=count) for count in counts):
        metrics.record_transition(before, after, "team-a")
    [sample] = families(metrics)["dljob_operator_failures_ignored"].samples
    assert sample.value == 4


def test_requests_are_counted() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.requested("apply", "statefulsets", 201, 0.02)
    [sample] = [s for s in families(metrics)["dljob_operator_api_requests"].samples if s.name.endswith("_total")]
    assert sample.value == 3 and sample.labels == {"verb": "apply", "resource": "statefulsets", "code": "201"}


@pytest.mark.parametrize(
    ("ill", "waiting", "path", "code", "text"),
    [
        (None, None, "/healthz", 200, "ok\n"),
        ("broken", None, "/healthz", 503, "broken\n"),
        (None, "waiting for lists", "/readyz", 503, "waiting for lists\n"),
        (None, None, "/readyz", 200, "ok\n"),
    ],
)
def test_probes_report_health_and_readiness(
    ill: str | None, waiting: str | None, path: str, code: int, text: str
) -> None:
    assert fetched(path, ill, waiting)[:2] == (code, text)


def test_job_metrics_are_computed_at_each_scrape() -> None:
    code, text, scrapes = fetched("/metrics", None, None)
    assert code == 200 and "dljob_operator_queue_depth" in text and "_created" not in text and scrapes == 1


def fetched(path: str, ill: str | None, waiting: str | None) -> tuple[int, str, int]:
    scrapes = 0

    def scraped() -> None:
        nonlocal scrapes
        scrapes += 1

    async def main() -> tuple[int, str]:
        runner = await serve(0, Metrics(), lambda: ill, lambda: waiting, scraped)
        try:
            port = next(address[1] for address in runner.addresses if len(address) == 2)  # of IPv4
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
                return answer.status, await answer.text()
        finally:
            await runner.cleanup()

    return *asyncio.run(main()), scrapes
