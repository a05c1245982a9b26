"""Every metric of the operator. Labels are bounded: never a job's name, whose series would outlive it.

Users: ``controller``, ``kube`` (through a callback), ``health``, which serves them.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from dljob.api import Phase

CONTENT_TYPE = CONTENT_TYPE_LATEST
PHASES = tuple(phase.value for phase in Phase)
_RESULTS = ("ok", "refused", "error")


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

    def requested(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Count one request; ``resource`` is one of the few kinds the operator deals with."""
        self.requests.labels(verb, resource, str(code)).inc()
        self.request_s.labels(verb).observe(seconds)

    def text(self) -> bytes:
        """The exposition, in ``CONTENT_TYPE``."""
        return generate_latest(self.registry)
