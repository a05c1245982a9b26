"""The Grafana dashboard, as data: rows of panels, a query or more each. Users: ``generation``, tests/chart.

Jobs are picked by the labels ``namespace`` and ``dljob`` that the scrape configuration takes from the pods.
"""

import json
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 24, 8
_JOB = '{namespace=~"$namespace", dljob=~"$job"}'
_BY_JOB = "by (namespace, dljob)"


@dataclass(frozen=True)
class Panel:
    """One graph. ``queries``: legend → PromQL."""

    title: str
    text: str
    queries: dict[str, str]
    unit: str = "short"
    width: int = 8
    kind: str = "timeseries"


def _job(metric: str, how: str = "max", condition: str = "") -> str:
    """One figure per job, from those of its ranks."""
    return f"{how} {_BY_JOB} (dljob_trainer_{metric}{_JOB}{condition})"


def _ranks(metric: str) -> dict[str, str]:
    return {"{{dljob}} {{rank}}": f"dljob_trainer_{metric}{_JOB}"}


def _total(metric: str, label: str, function: str, window: str) -> dict[str, str]:
    """Rate or increase of one of the operator's counters, by one of its labels."""
    return {f"{{{{{label}}}}}": f"sum by ({label}) ({function}(dljob_operator_{metric}_total[{window}]))"}


def _quantiles(metric: str, quantiles: tuple[int, ...], window: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate(dljob_operator_{metric}_bucket[{window}]))"
    return {f"p{q}": f"histogram_quantile({q / 100}, {buckets})" for q in quantiles}


_RESTARTS = f"sum by (namespace, dljob, cause) (increase(dljob_trainer_restarts_total{_JOB}[1h]))"
_PROGRESS = f"{_job('step')} / {_job('planned_steps', condition=' > 0')}"
_STEPS = {
    "{{dljob}} measured": _job("step_seconds"),
    "{{dljob}} predicted": _job("expected_step_seconds", condition=" > 0"),
}

ROWS: dict[str, tuple[Panel, ...]] = {
    "Cluster": (
        Panel("Jobs", "By phase.", {"{{phase}}": "sum by (phase) (dljob_operator_jobs)"}, width=16, kind="stat"),
        Panel("Operators at work", "Must be 1.", {"": "sum(dljob_operator_leader)"}, width=4, kind="stat"),
        Panel("Queue", "Jobs waiting for a worker.", {"": "sum(dljob_operator_queue_depth)"}, width=4, kind="stat"),
    ),
    "Job": (
        Panel("Progress", "Steps done of all.", {"{{dljob}}": _PROGRESS}, "percentunit"),
        Panel("Loss", "Training loss.", {"{{dljob}}": _job("loss", "avg")}),
        Panel("Accuracy", "On held-out data.", {"{{dljob}}": _job("accuracy_ratio")}, "percentunit"),
        Panel("Step: predicted and measured", "Far apart: the plan was made from wrong constants.", _STEPS, "s"),
        Panel("Throughput", "Samples per second of the whole job.", {"{{dljob}}": _job("samples_per_second")}),
        Panel("Ranks", "Ranks that take part.", {"{{dljob}}": _job("world_size")}),
    ),
    "Where the time goes, by rank": (
        Panel("Computing", "Forward, backward and update.", _ranks("step_compute_seconds"), "s", 6),
        Panel("Waiting", "For slower ranks; the slow one waits least.", _ranks("step_wait_seconds"), "s", 6),
        Panel("Communicating", "What did not hide behind computing.", _ranks("step_communication_seconds"), "s", 6),
        Panel("Reading", "Waiting for input data.", _ranks("step_data_seconds"), "s", 6),
        Panel("Shares", "Samples of each global batch.", _ranks("share_samples")),
        Panel("Gradient norm", "It jumps before the loss goes wild.", _ranks("gradient_norm")),
        Panel("Links", "Bandwidth between ranks at the start.", _ranks("link_bandwidth_bytes_per_second"), "Bps"),
    ),
    "Faults": (
        Panel("Relaunches", "By cause, in an hour.", {"{{dljob}} {{cause}}": _RESTARTS}),
        Panel(
            "Age of the last checkpoint",
            "What a failure would cost now.",
            {"{{dljob}}": f"time() - {_job('checkpoint_timestamp_seconds')}"},
            "s",
        ),
        Panel("Device mismatches", "Ranks on another device than planned.", {"{{dljob}}": _job("device_mismatches")}),
    ),
    "Operator": (
        Panel("Reconciles", "Per second, by result.", _total("reconciles", "result", "rate", "5m"), "ops"),
        Panel("A reconcile takes", "Seconds.", _quantiles("reconcile_duration_seconds", (50, 99), "5m"), "s"),
        Panel("API requests", "Per second, by code.", _total("api_requests", "code", "rate", "5m"), "ops"),
        Panel(
            "Error of predictions",
            "(predicted - measured) / measured step time of finished jobs.",
            _quantiles("plan_step_error_ratio", (10, 50, 90), "1d"),
            "percentunit",
        ),
        Panel("Plans", "Accepted, and impossible ones, in an hour.", _total("plans", "result", "increase", "1h")),
        Panel("Jobs that ended", "In an hour, by outcome.", _total("jobs_finished", "outcome", "increase", "1h")),
    ),
}


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    definition = {"query": query, "refId": name}
    everything = {"includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"}}
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": source,
        "query": definition,
        "refresh": 2,
    } | everything


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend}
        for i, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "title": panel.title,
        "description": panel.text,
        "type": panel.kind,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0} if panel.unit != "percentunit" else {"unit": panel.unit}
        },
        "targets": targets,
    }


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        )
        x, y = 0, y + 1
        for panel in row:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x += panel.width
        y += HEIGHT
    return panels


def dashboard() -> str:
    """The dashboard's JSON."""
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    document = {
        "uid": "dljob",
        "title": "dljob",
        "description": "Distributed training jobs and their operator.",
        "tags": ["dljob"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                source,
                _variable("namespace", "Namespace", "label_values(dljob_trainer_step, namespace)"),
                _variable("job", "Job", 'label_values(dljob_trainer_step{namespace=~"$namespace"}, dljob)'),
            ]
        },
        "panels": _panels(),
    }
    return json.dumps(document, indent=1) + "\n"
