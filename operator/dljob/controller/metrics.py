"""Every metric of the operator. Labels are bounded: never a job's name, whose series would outlive it."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from dlcontract.reasons import PARAMETERS_DIVERGED
from dljob.api import DLJobStatus, Phase
from dljob.status import find, is_true

CONTENT_TYPE = CONTENT_TYPE_LATEST
PHASES = tuple(phase.value for phase in Phase)
_RESULTS = ("ok", "refused", "error")


def _diverged(status: DLJobStatus) -> int:
    """How often ranks were found to hold different parameters: relaunches for it, and the last failure of all."""
    failed = find(status.conditions, "Failed")
    last = failed is not None and is_true(status.conditions, "Failed") and failed.reason == PARAMETERS_DIVERGED
    return status.restarts_by_cause.get(PARAMETERS_DIVERGED, 0) + int(last)


class Metrics:
    """One registry an operator, so that tests have their own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # a series more for each, which nobody asks for
        self.registry = registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        prefix = "dljob_operator"
        self.reconcile_s = Histogram(
            f"{prefix}_reconcile_duration_seconds",
            "Time of one reconcile. When the 99th percentile passes a second, look at the API server's latency.",
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=registry,
        )
        self.reconciles = Counter(
            f"{prefix}_reconciles",
            "Reconciles by result: ok; refused (the API server took an object not: see the job's events); error "
            "(see the operator's log).",
            ["result"],
            registry=registry,
        )
        self.queue_depth = Gauge(
            f"{prefix}_queue_depth",
            "Jobs that wait for a worker. Raise operator.concurrency when it does not go back to 0.",
            registry=registry,
        )
        self.jobs = Gauge(
            f"{prefix}_jobs", "Jobs by phase. Look at those that stay Pending or Recovering.", ["phase"],
            registry=registry,
        )  # fmt: skip
        self.leader = Gauge(
            f"{prefix}_leader", "1 on the operator that works. The sum over replicas must be 1.", registry=registry
        )
        self.plans = Counter(
            f"{prefix}_plans",
            "Plans by result: accepted, or infeasible (no plan is possible: the job's Planned condition says why).",
            ["result"],
            registry=registry,
        )
        self.plan_error = Histogram(
            f"{prefix}_plan_step_error_ratio",
            "(predicted - measured) / measured step time of finished jobs. Far from 0: see docs on calibration.",
            buckets=(-0.9, -0.5, -0.3, -0.2, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5),
            registry=registry,
        )
        self.finished = Counter(
            f"{prefix}_jobs_finished", "Jobs that ended, by outcome: Complete or Failed.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.recoveries = Counter(
            f"{prefix}_recoveries",
            "Relaunches of ranks, over all jobs. A rise without evictions or lost nodes: look at failing programs.",
            registry=registry,
        )
        self.diverged = Counter(
            f"{prefix}_parameters_diverged",
            "Times that a job's ranks were found to hold different parameters, whether it went on or failed. If any: "
            "suspect the hardware; status.restartsByCause and the condition Failed tell the job.",
            registry=registry,
        )
        self.requests = Counter(
            f"{prefix}_api_requests",
            "Requests to the API server by verb, resource and code; code 0: no answer.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self.request_s = Histogram(
            f"{prefix}_api_request_duration_seconds",
            "Time until the API server answered.",
            ["verb"],
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15),
            registry=registry,
        )
        for phase in PHASES:
            self.jobs.labels(phase)
        for result in _RESULTS:
            self.reconciles.labels(result)
        for result in ("accepted", "infeasible"):
            self.plans.labels(result)
        for outcome in ("Complete", "Failed"):
            self.finished.labels(outcome)

    def went_on(self, before: DLJobStatus, after: DLJobStatus) -> None:
        """Count what a new status tells that the one before did not."""
        self.recoveries.inc(max(0, after.restarts - before.restarts))
        self.diverged.inc(max(0, _diverged(after) - _diverged(before)))
        for outcome in ("Complete", "Failed"):
            if is_true(after.conditions, outcome) and not is_true(before.conditions, outcome):
                self.finished.labels(outcome).inc()
                if after.measured is not None and after.measured.step_error is not None:
                    self.plan_error.observe(after.measured.step_error)

    def requested(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Count one request; ``resource`` is one of the few kinds the operator deals with."""
        self.requests.labels(verb, resource, str(code)).inc()
        self.request_s.labels(verb).observe(seconds)

    def text(self) -> bytes:
        """The exposition, in ``CONTENT_TYPE``."""
        return generate_latest(self.registry)
