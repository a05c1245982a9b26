"""Define the Grafana dashboard as data: rows of panels with one or more queries each.

Queries select jobs by the labels ``namespace`` and ``dljob``, which the scrape configuration takes from the pods.
"""

import json
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 24, 8
_JOB = '{namespace=~"$namespace", dljob=~"$job"}'
_BY_JOB = "by (namespace, dljob)"


@dataclass(frozen=True)
class Panel:
    """One graph of the dashboard.

    ``text`` describes the graph. ``queries`` maps a text in the graph's legend to the PromQL expression of its lines.
    ``width`` counts columns of Grafana's grid, which has 24.
    """

    title: str
    text: str
    queries: dict[str, str]
    unit: str = "short"
    width: int = 8
    kind: str = "timeseries"


def _job(metric: str, how: str = "max", condition: str = "") -> str:
    """Return a PromQL query that aggregates ``metric`` over the ranks of each job with the operator ``how``.

    ``condition``: a PromQL comparison such as ' > 0' that selects values of the metric; empty for all values.
    """
    return f"{how} {_BY_JOB} (dljob_trainer_{metric}{_JOB}{condition})"


def _ranks(metric: str) -> dict[str, str]:
    return {"{{dljob}} {{rank}}": f"dljob_trainer_{metric}{_JOB}"}


def _total(metric: str, label: str, function: str, window: str) -> dict[str, str]:
    """Return {legend text: PromQL query} for a panel with one line for each value of the label ``label``.

    The query applies ``function`` (rate or increase) over ``window`` to the operator's counter ``metric``.
    """
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
        Panel(
            "Jobs",
            "Number of jobs by phase.",
            {"{{phase}}": "sum by (phase) (dljob_operator_jobs)"},
            width=12,
            kind="stat",
        ),
        Panel(
            "Nodes left out",
            "Nodes that new plans leave out because of repeated faults.",
            {"{{scope}}": "max by (scope) (dljob_operator_nodes_left_out)"},
            width=4,
            kind="stat",
        ),
        Panel("Active operators", "Must be 1.", {"": "sum(dljob_operator_leader)"}, width=4, kind="stat"),
        Panel("Queue", "Jobs waiting for a worker.", {"": "sum(dljob_operator_queue_depth)"}, width=4, kind="stat"),
    ),
    "Job": (
        Panel("Progress", "Completed steps divided by planned steps.", {"{{dljob}}": _PROGRESS}, "percentunit"),
        Panel("Loss", "Training loss.", {"{{dljob}}": _job("loss", "avg")}),
        Panel("Accuracy", "Accuracy on held-out data.", {"{{dljob}}": _job("accuracy_ratio")}, "percentunit"),
        Panel("Step time", "A large difference means that the plan used wrong constants.", _STEPS, "s"),
        Panel("Throughput", "Samples per second of the whole job.", {"{{dljob}}": _job("samples_per_second")}),
        Panel("Ranks", "Number of training ranks.", {"{{dljob}}": _job("world_size")}),
    ),
    "Step time by rank": (
        Panel("Computing", "Forward, backward and update.", _ranks("step_compute_seconds"), "s", 6),
        Panel("Waiting", "Waiting for slower ranks. The straggler waits least.", _ranks("step_wait_seconds"), "s", 6),
        Panel(
            "Communication",
            "Communication that does not overlap with computing.",
            _ranks("step_communication_seconds"),
            "s",
            6,
        ),
        Panel("Data loading", "Waiting for input data.", _ranks("step_data_seconds"), "s", 6),
        Panel("Local batch size", "Samples of the global batch per rank.", _ranks("share_samples")),
        Panel("Gradient norm", "It often jumps before the loss diverges.", _ranks("gradient_norm")),
        Panel(
            "Link bandwidth",
            "Bandwidth between ranks, measured at the start.",
            _ranks("link_bandwidth_bytes_per_second"),
            "Bps",
        ),
    ),
    "Faults": (
        Panel("Restarts of ranks", "Restarts within an hour, by cause.", {"{{dljob}} {{cause}}": _RESTARTS}),
        Panel(
            "Age of the last checkpoint",
            "Training time that a failure would lose now.",
            {
                "{{dljob}}": f"time() - {_job('checkpoint_timestamp_seconds')}",
                "{{dljob}}, upload of a script": f"time() - {_job('upload_timestamp_seconds')}",
            },
            "s",
        ),
        Panel(
            "Device mismatches",
            "Ranks on a device that the plan does not name.",
            {"{{dljob}}": _job("device_mismatches")},
        ),
    ),
    "Operator": (
        Panel("Reconciles", "Reconciles per second, by result.", _total("reconciles", "result", "rate", "5m"), "ops"),
        Panel("Reconcile duration", "Median and p99.", _quantiles("reconcile_duration_seconds", (50, 99), "5m"), "s"),
        Panel(
            "API requests", "Requests per second, by status code.", _total("api_requests", "code", "rate", "5m"), "ops"
        ),
        Panel(
            "Prediction error",
            "(predicted - measured) / measured step time of finished jobs.",
            _quantiles("plan_step_error_ratio", (10, 50, 90), "1d"),
            "percentunit",
        ),
        Panel("Plans", "Plans within an hour, by result.", _total("plans", "result", "increase", "1h")),
        Panel(
            "Finished jobs",
            "Jobs that finished within an hour, by outcome.",
            _total("jobs_finished", "outcome", "increase", "1h"),
        ),
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
    """Return the dashboard as JSON."""
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
